"""The double's store: objects, their resource versions, and the changes that watches receive.

One lock guards everything; whoever waits for a change waits on `Store.changed`.
"""

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
NAMESPACE = "d2plm"  # the only one; that of cluster-scoped objects is empty
FOREGROUND = "foregroundDeletion"  # finalizer


@dataclass(frozen=True)
class Resource:
    """A kind of object and where the API serves it."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


TRAINER = ("trainer.kubeflow.org", "v1alpha1")
RESOURCES = {
    resource.plural: resource
    for resource in (
        Resource("", "v1", "pods", "Pod"),
        Resource("", "v1", "events", "Event"),
        Resource("", "v1", "nodes", "Node", False),
        Resource("", "v1", "namespaces", "Namespace", False),
        Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
        Resource("batch", "v1", "jobs", "Job"),
        Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload"),
        Resource("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue"),
        Resource("argoproj.io", "v1alpha1", "workflows", "Workflow"),
        Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"),
        Resource(*TRAINER, "trainjobs", "TrainJob"),
        Resource(*TRAINER, "trainingruntimes", "TrainingRuntime"),
        Resource(*TRAINER, "clustertrainingruntimes", "ClusterTrainingRuntime", False),
    )
}


class Refusal(Exception):  # noqa: N818  # the API's answer, which need not be an error of anyone's
    """An answer other than success, as the API server words it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> Object:
        said = {"message": self.message, "reason": self.reason, "code": self.code}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", **said}


def now() -> str:
    """The time as Kubernetes writes it, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Change:
    version: int
    plural: str
    type: str
    object: Object


class Store:
    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1000  # as in a cluster that has lived
        self.oldest = 0  # version from which a watch can still start
        self.history: list[Change] = []
        self.quota: str | None = None  # what is said of pods that may not be created
        # Kueue's queues, and why they admit nothing; None: it is not installed
        self.queues: dict[str, str] | None = None
        self._made_at: dict[str, float] = {}  # by uid
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._recorded: set[tuple[str, str, str]] = set()

    def create(self, plural: str, content: Object) -> Object:
        """Add an object, with what the API server gives it; `generateName` is honoured."""
        with self.changed:
            made = copy.deepcopy(content)
            metadata = made["metadata"]
            name = metadata.setdefault("name", f"{metadata.get('generateName')}{suffix()}")
            if (plural, metadata["namespace"], name) in self._objects:
                raise Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists')
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            made |= {"apiVersion": RESOURCES[plural].api_version, "kind": RESOURCES[plural].kind}
            self._objects[plural, metadata["namespace"], name] = made
            self._made_at[metadata["uid"]] = time.monotonic()
            return self._tell(plural, "ADDED", made)

    def create_pod(self, pod: Object, maker: Object, reason: str) -> None:
        """A controller's pod; over the quota, what makes it has an event instead.

        Seen on Kubernetes 1.36: the events of a PyTorchJob are on itself (training operator 1.9.3),
        those of a TrainJob on the Job that its JobSet made (Trainer 2.3, JobSet 0.12).
        """
        if self.quota is None:
            self.create("pods", pod)
        else:
            text = f'Error creating: pods "{maker["metadata"]["name"]}-" is forbidden: {self.quota}'
            self.warn(maker, reason, text)

    def age(self, content: Object) -> float:
        return time.monotonic() - self._made_at[content["metadata"]["uid"]]

    def get(self, plural: str, namespace: str, name: str) -> Object:
        """A copy; raises a 404."""
        with self.changed:
            if (plural, namespace, name) not in self._objects:
                raise Refusal(404, "NotFound", f'{plural} "{name}" not found')
            return copy.deepcopy(self._objects[plural, namespace, name])

    def list(
        self,
        plural: str,
        namespace: str | None = None,
        chosen: Callable[[Object], bool] = lambda _: True,
    ) -> list[Object]:
        with self.changed:
            return [
                copy.deepcopy(content)
                for (kind, place, _), content in self._objects.items()
                if kind == plural and namespace in (None, place) and chosen(content)
            ]

    @contextmanager
    def edit(self, plural: str, namespace: str, name: str) -> Iterator[Object]:
        """The object, to be changed in place; a change is announced when the block ends."""
        with self.changed:
            edited = self.get(plural, namespace, name)
            yield edited
            if edited != self._objects[plural, namespace, name]:
                self._objects[plural, namespace, name] = edited
                self._tell(plural, "MODIFIED", edited)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Take an object away; it may be gone already."""
        with self.changed:
            found = self._objects.pop((plural, namespace, name), None)
            if found is not None:
                self._tell(plural, "DELETED", found)

    def delete(self, plural: str, namespace: str, name: str, policy: str = "Background") -> None:
        """What the API server does upon a deletion; the garbage collector sees to what it owns.

        In the background an object goes at once, unless it has finalizers, and what it owns after
        it; in the foreground it waits for what it owns (Kubernetes' documentation, and 1.36).
        """
        with self.changed:
            found = self.get(plural, namespace, name)
            if plural == "pods":
                delete_pod(self, found)
            elif policy != "Foreground" and not found["metadata"].get("finalizers"):
                self.remove(plural, namespace, name)
            else:
                with self.edit(plural, namespace, name) as edited:
                    edited["metadata"].setdefault("deletionTimestamp", now())
                    edited["metadata"]["finalizers"] = [FOREGROUND]

    def warn(self, regarding: Object, reason: str, message: str) -> None:
        """Add an Event of type Warning, unless one says the same already."""
        metadata = regarding["metadata"]
        with self.changed:
            if (metadata["uid"], reason, message) in self._recorded:
                return
            self._recorded.add((metadata["uid"], reason, message))
            involved = {"kind": regarding["kind"], "apiVersion": regarding["apiVersion"]}
            involved |= {key: metadata[key] for key in ("name", "namespace", "uid")}
            name, place = f"{metadata['name']}.{uuid.uuid4().hex[:16]}", metadata["namespace"]
            event: Object = {"metadata": {"name": name, "namespace": place}}
            event |= {"involvedObject": involved, "type": "Warning", "count": 1}
            event |= {"reason": reason, "message": message}
            self.create("events", {**event, "firstTimestamp": now(), "lastTimestamp": now()})

    def _tell(self, plural: str, change: str, content: Object) -> Object:
        self.version += 1
        content["metadata"]["resourceVersion"] = str(self.version)
        told = copy.deepcopy(content)
        self.history.append(Change(self.version, plural, change, told))
        self.changed.notify_all()
        return copy.deepcopy(content)


def suffix() -> str:
    """Five letters such as Kubernetes adds to a generated name."""
    alphabet = "bcdfghjklmnpqrstvwxz2456789"
    return "".join(alphabet[byte % len(alphabet)] for byte in uuid.uuid4().bytes[:5])


def owner(of: Object) -> Object:
    """The `ownerReferences` entry of a controller's object."""
    return {
        "apiVersion": of["apiVersion"],
        "kind": of["kind"],
        "name": of["metadata"]["name"],
        "uid": of["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owned_by(uid: str) -> Callable[[Object], bool]:
    return lambda content: (
        uid in [reference["uid"] for reference in content["metadata"].get("ownerReferences", ())]
    )


def made_pod(
    job: Object, template: Object, name: str, labels: dict[str, str], variables: dict[str, str]
) -> Object:
    """A pod that a job's controller makes of a template, with variables for its containers."""
    made = copy.deepcopy(template)
    known = made.get("metadata", {})
    metadata = {**known, "name": name, "namespace": job["metadata"]["namespace"]}
    metadata |= {"ownerReferences": [owner(job)], "labels": {**known.get("labels", {}), **labels}}
    for container in made["spec"]["containers"]:
        own = [{"name": key, "value": value} for key, value in variables.items()]
        container["env"] = [*container.get("env", ()), *own]
    return {"metadata": metadata, "spec": made["spec"], "status": {"phase": "Pending"}}


def end_pods(store: Store, pods: list[Object]) -> None:
    for pod in pods:
        if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            delete_pod(store, pod)


def delete_pod(store: Store, pod: Object, grace_seconds: int | None = None) -> None:
    """Ask for a pod's end; the kubelet takes it away when its processes are gone."""
    metadata = pod["metadata"]
    own = pod["spec"].get("terminationGracePeriodSeconds", 30)
    seconds = own if grace_seconds is None else grace_seconds
    with suppress(Refusal), store.edit("pods", metadata["namespace"], metadata["name"]) as edited:
        if (known := edited["metadata"])["uid"] == metadata["uid"]:
            # A second deletion may shorten the grace period, and never lengthens it.
            shorter = min(known.get("deletionGracePeriodSeconds", seconds), seconds)
            known |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": shorter}
