"""Checks of the cluster, over the Kubernetes API with the official client.

They ask as whoever runs the doctor: on a laptop with kubectl's configuration, in a pod with its
service account. What that account may not see is skipped and not failed, as it may be well. What is
served comes from discovery, which needs no permission to read the definitions of resources.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.core.errors import first_line
from d2plm.doctor.report import Check, Verdict, Verdicts, failed, ok, skipped, warning
from d2plm.launch.client import (
    JOB_KINDS,
    PYTORCHJOB,
    TRAINING_RUNTIME,
    TRAINJOB,
    JobKind,
    connect,
)
from d2plm.launch.job_spec import TrainingJob

ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105  # its path
# What a kind's TrainJob or PyTorchJob needs beside its own resource, and the deployments behind it.
RESOURCES = {
    PYTORCHJOB: (PYTORCHJOB.plural,),
    TRAINJOB: (TRAINJOB.plural, TRAINING_RUNTIME.plural),
}
OPERATORS = {
    PYTORCHJOB: ("training-operator",),
    TRAINJOB: ("kubeflow-trainer-controller-manager", "jobset-controller-manager"),
}
EVERY_VERB = ("create", "get", "list", "watch", "delete", "patch")
# (verb, group, resource, subresource) that the launcher needs whatever the kind of its job is.
OF_EVERY_LAUNCHER = [
    ("get", "", "pods", ""),
    ("list", "", "pods", ""),
    ("watch", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("list", "", "events", ""),
]
REVIEWS_AT_ONCE = 8
BLOCKING_TAINTS = ("NoSchedule", "NoExecute")


def is_configured() -> bool:
    """Whether there is a kubectl configuration, or an account that a pod was given."""
    files = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return any(Path(file).is_file() for file in [*files.split(os.pathsep), ACCOUNT_TOKEN])


@dataclass
class ClusterChecks:
    """A cluster and what is asked of it.

    Args:
        kind: `launcher.kind`.
        job: as the launcher would start it.
        timeout_seconds: of each request, to connect and between two parts of an answer.

    Attributes:
        api: the client, once `reach` was ok.
        namespace: that jobs run in.
        groups: {API group: versions that are served}.
    """

    kind: str
    job: TrainingJob
    timeout_seconds: float
    api: Any = None
    namespace: str = "default"
    groups: dict[str, list[str]] = field(default_factory=dict)

    @property
    def timeout(self) -> tuple[float, float]:
        """As the client takes it: a single number it would ignore unless it is an integer."""
        return self.timeout_seconds, self.timeout_seconds

    def reach(self) -> Verdict:
        """Whether the API server answers, and knows who asks."""
        from kubernetes.client import ApiException, ApisApi, VersionApi
        from urllib3.exceptions import HTTPError

        connection = connect(self.job.namespace, patient=False)
        api, self.namespace = connection.api, connection.namespace
        host = api.configuration.host
        try:
            release = VersionApi(api).get_code(_request_timeout=self.timeout).git_version
            found = ApisApi(api).get_api_versions(_request_timeout=self.timeout)
        except ApiException as error:
            return failed(
                f"{host} answers {error.status}: {_message(error)}",
                "log in again, until `kubectl get pods` answers",
            )
        except HTTPError as error:
            return failed(
                f"{host} does not answer ({first_line(error)})",
                "start the cluster, or choose its context (kubectl config use-context); "
                "cluster=false leaves it out",
            )
        self.groups = {group.name: [v.version for v in group.versions] for group in found.groups}
        self.api = api
        return ok(f"{release} at {host}")

    def checks(self, pull: bool) -> dict[str, Check]:
        """All others; they need `reach` to have been ok.

        Args:
            pull: whether a pod may be started, to see whether the image can be pulled.
        """
        from d2plm.doctor.image import Image

        image = Image(self.job, self.timeout, self.api, self.namespace)
        named: dict[str, Check] = {
            "namespace": self.namespace_there,
            **{kind.name: partial(self.job_kind, kind) for kind in RESOURCES},
            "operators": self.operators,
            "Kueue": self.kueue,
            "permissions": self.permissions,
            **{f"claim {one.name}": partial(self.claim, one.name) for one in self.job.claims},
            "image": image.pulled if pull else image.seen,
            "GPUs": self.gpus,
        }
        return {name: partial(answered, check) for name, check in named.items()}

    def unreached(self) -> Verdicts:
        """What is said of all others where `reach` was not ok."""
        return dict.fromkeys(self.checks(pull=False), skipped("the API server was not reached"))

    def namespace_there(self) -> Verdict:
        """The namespace, and what Pod Security asks of its pods."""
        read = self._core().read_namespace
        namespace = found_or_none(partial(read, self.namespace), self.timeout)
        if namespace is None:
            return failed(
                f"there is no namespace {self.namespace}",
                "set launcher.namespace, or make it with the rest: kubectl apply -k k8s/overlays/…",
            )
        if namespace.status.phase != "Active":
            return failed(f"{self.namespace} is {namespace.status.phase}", "wait, and make it anew")
        labels = namespace.metadata.labels or {}
        level = labels.get("pod-security.kubernetes.io/enforce", "not enforced")
        return ok(f"{self.namespace}, Pod Security: {level}")  # ours are fit for the strictest

    def job_kind(self, kind: JobKind) -> Verdict:
        """Whether a kind of job is served in the version that d2plm speaks."""
        versions = self.groups.get(kind.group, [])
        if self.serves(kind):
            others = ", ".join(version for version in versions if version != kind.version)
            return ok(f"{kind.group}/{kind.version}" + (f", also {others}" if others else ""))
        found = f"{kind.group}/{kind.version} {kind.plural} is not served"
        if versions:
            found += f" ({kind.group} {', '.join(versions)} is)"
        mend = f"install {kind.controller} (docs/cluster.md)"
        if JOB_KINDS.get(self.kind) == kind:
            return failed(found, f"{mend}, or choose another launcher")
        if self.kind == "auto" and kind == PYTORCHJOB and not self.kinds_served():
            return failed(f"{found}, nor is a TrainJob: the pipeline has nothing to train in", mend)
        return skipped(found, f"{mend} to use it")

    def serves(self, kind: JobKind) -> bool:
        """Whether all of a kind's resources are there."""
        from kubernetes.client import CustomObjectsApi

        if kind.version not in self.groups.get(kind.group, []):
            return False
        served = CustomObjectsApi(self.api).get_api_resources(
            kind.group, kind.version, _request_timeout=self.timeout
        )
        return {resource.name for resource in served.resources} >= set(RESOURCES[kind])

    def kinds_served(self) -> list[JobKind]:
        """Those that the launcher may use and the cluster has."""
        wanted = [kind for key, kind in JOB_KINDS.items() if self.kind in (key, "auto")]
        return [kind for kind in wanted if self.serves(kind)]

    def operators(self) -> Verdict:
        """Whether what turns jobs into pods is running."""
        from kubernetes.client import AppsV1Api

        names = [name for kind in self.kinds_served() for name in OPERATORS[kind]]
        if not names:
            return skipped("there is no kind of job to serve")
        running, absent = [], []
        for name in names:
            deployments = AppsV1Api(self.api).list_deployment_for_all_namespaces(
                field_selector=f"metadata.name={name}", _request_timeout=self.timeout
            )
            for one in deployments.items:
                where = f"{name} in {one.metadata.namespace}"
                if not one.status.available_replicas:
                    return failed(
                        f"{where} has no running pod, so jobs stay without pods",
                        f"kubectl describe deployment -n {one.metadata.namespace} {name}",
                    )
                running.append(where)
            if not deployments.items:
                absent.append(name)
        if absent:
            return warning(
                f"no deployment is named {' or '.join(absent)}",
                "if jobs stay without pods, install it (docs/cluster.md)",
            )
        return ok(f"{', '.join(running)}")

    def kueue(self) -> Verdict:
        """Whether the local queue that jobs go to exists and takes them."""
        from kubernetes.client import CustomObjectsApi

        queue, versions = self.job.queue, self.groups.get("kueue.x-k8s.io", [])
        if not versions:
            if queue is None:
                return skipped("not installed, and launcher.queue names none")
            return failed(f"launcher.queue={queue}, but Kueue is not installed", "install Kueue")
        served = f"kueue.x-k8s.io {', '.join(versions)}"
        if queue is None:
            return ok(f"{served}; launcher.queue names none, so jobs are not queued")
        get = CustomObjectsApi(self.api).get_namespaced_custom_object
        asked = partial(get, "kueue.x-k8s.io", versions[0], self.namespace, "localqueues", queue)
        found = found_or_none(asked, self.timeout)
        if found is None:
            return failed(
                f"{self.namespace} has no LocalQueue {queue}",
                f"correct launcher.queue: kubectl get localqueues -n {self.namespace}",
            )
        conditions = found.get("status", {}).get("conditions", [])
        stopped = [c for c in conditions if c["type"] == "Active" and c["status"] != "True"]
        if stopped:
            return failed(
                f"LocalQueue {queue} takes no jobs: {stopped[0].get('message')}",
                f"kubectl describe localqueue -n {self.namespace} {queue}",
            )
        return ok(f"{served}; LocalQueue {queue}")

    def permissions(self) -> Verdict:
        """Whether this account may do all that the launcher does."""
        resources = [(kind.group, one) for kind in self.kinds_served() for one in RESOURCES[kind]]
        jobs = [(verb, group, one, "") for group, one in resources for verb in EVERY_VERB]
        asked = [*OF_EVERY_LAUNCHER, *jobs]
        with ThreadPoolExecutor(REVIEWS_AT_ONCE) as pool:
            answers = list(pool.map(self.allowed, asked))
        refused: dict[str, list[str]] = {}
        for (verb, _, resource, subresource), allowed in zip(asked, answers, strict=True):
            if not allowed:
                what = f"{resource}/{subresource}" if subresource else resource
                refused.setdefault(what, []).append(verb)
        if not refused:
            return ok(f"all {len(asked)} that the launcher needs, in {self.namespace}")
        listed = "; ".join(f"{', '.join(verbs)} {what}" for what, verbs in refused.items())
        return failed(
            f"this account may not, in {self.namespace}: {listed}",
            "bind it to the Role d2plm-launcher (k8s/base), or run as the service account",
        )

    def allowed(self, asked: tuple[str, str, str, str]) -> bool:
        """Whether this account may do a (verb, group, resource, subresource) in the namespace."""
        from kubernetes import client

        verb, group, resource, subresource = asked
        attributes = client.V1ResourceAttributes(
            namespace=self.namespace,
            verb=verb,
            group=group,
            resource=resource,
            subresource=subresource or None,
        )
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        answer = client.AuthorizationV1Api(self.api).create_self_subject_access_review(
            review, _request_timeout=self.timeout
        )
        return bool(answer.status.allowed)

    def claim(self, name: str) -> Verdict:
        """Whether a volume is there, and may be used by all pods that will.

        The pipeline's step follows a job with the volume mounted, so it has two users at least.
        """
        read = self._core().read_namespaced_persistent_volume_claim
        claim = found_or_none(partial(read, name, self.namespace), self.timeout)
        if claim is None:
            return failed(
                f"{self.namespace} has no PersistentVolumeClaim {name}",
                "kubectl apply -k k8s/overlays/…, or name yours in launcher.claims",
            )
        modes, storage = claim.spec.access_modes, claim.spec.storage_class_name or "none"
        found = f"{claim.status.phase}, {', '.join(modes)}, storage class {storage}"
        if claim.status.phase != "Bound":
            return self._unbound(name, found)
        size = (claim.status.capacity or {}).get("storage", "unknown size")
        return _shareable(f"{size} {found}", modes, self.job)

    def _unbound(self, name: str, found: str) -> Verdict:
        events = self._core().list_namespaced_event(
            self.namespace,
            field_selector=f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={name}",
            _request_timeout=self.timeout,
        )
        latest = events.items[-1] if events.items else None
        if latest is not None and latest.reason == "WaitForFirstConsumer":
            return ok(f"{found}: it is made for the first pod that uses it")
        why = f": {latest.message}" if latest is not None and latest.message else ""
        return failed(
            f"{found}{why}",
            f"kubectl describe pvc -n {self.namespace} {name}; "
            "its storage class must exist (kubectl get storageclass) and offer its access mode",
        )

    def gpus(self) -> Verdict:
        """Whether enough nodes have the devices that a job asks for, free or not."""
        nodes = self._core().list_node(_request_timeout=self.timeout).items
        resource, wanted = self.job.gpu_resource, self.job.gpus
        together = wanted * (self.job.nodes if self.job.same_node else 1)  # on one machine
        able, counts = 0, []
        for node in nodes:
            number = int((node.status.allocatable or {}).get(resource, 0))
            if not number:
                continue
            why = _not_for_us(node, self.job)
            counts.append(f"{number} on {node.metadata.name}{f' ({why})' if why else ''}")
            able += number >= together and not why
        found = f"{resource}: {', '.join(counts) or f'none on {len(nodes)} nodes'}"
        if not wanted:
            return ok(f"{found}; launcher.gpus=0 asks for none")
        found += f"; launcher.nodes={self.job.nodes} × launcher.gpus={wanted}"
        if able >= (1 if self.job.same_node else self.job.nodes):
            return ok(found)
        # Not a failure, as an autoscaler may keep nodes away until a pod asks for them.
        return warning(
            f"{found} finds too few nodes and would wait",
            "install the devices' plugin, set launcher.node_selector and launcher.tolerations, or "
            "ask for less, unless an autoscaler adds nodes",
        )

    def _core(self) -> Any:
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self.api)


def answered(check: Check) -> Verdict:
    """A check's verdict; a refusal to show something is no failure of it."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return check()
    except ApiException as error:
        if error.status == 403:
            return skipped(f"not allowed to see it: {_message(error)}", "ask who may")
        return failed(
            f"the API server answers {error.status}: {_message(error)}",
            "see whether kubectl gets the same answer",
        )
    except HTTPError as error:
        return failed(
            f"the API server does not answer ({first_line(error)})",
            "run this again; timeout_seconds=30 waits longer",
        )


def found_or_none(read: Callable[..., Any], timeout: tuple[float, float]) -> Any:
    """The object that `read` reads, or None where there is none."""
    from kubernetes.client import ApiException

    try:
        return read(_request_timeout=timeout)
    except ApiException as error:
        if error.status != 404:
            raise
        return None


def _message(error: Any) -> str:
    """What the API server says; other servers' pages are left out."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _shareable(found: str, modes: list[str], job: TrainingJob) -> Verdict:
    shared = "a storage class with ReadWriteMany (NFS, CephFS, EFS, Filestore)"
    if "ReadWriteMany" in modes:
        return ok(found)
    if "ReadWriteOnce" not in modes:
        return failed(f"{found}: several pods cannot write to it", f"use {shared}")
    if job.nodes > 1 and not job.same_node:
        return failed(
            f"{found}: launcher.nodes={job.nodes} cannot all mount it",
            f"use {shared}, or set launcher.same_node=true",
        )
    return warning(
        f"{found}: all pods that use it at a time must be on one node",
        f"keep them on one (launcher.node_selector), or use {shared}",
    )


def _not_for_us(node: Any, job: TrainingJob) -> str:
    """Why a job's pods would not go to a node, or nothing."""
    ready = {c.type: c.status for c in node.status.conditions or ()}.get("Ready")
    if ready != "True":
        return "not ready"
    if node.spec.unschedulable:
        return "cordoned"
    labels = node.metadata.labels or {}
    for key, value in job.node_selector.items():
        if labels.get(key) != str(value):
            return f"not {key}={value}"
    for taint in node.spec.taints or ():
        if taint.effect in BLOCKING_TAINTS and not _tolerated(taint, job.tolerations):
            return f"taint {taint.key}{f'={taint.value}' if taint.value else ''}:{taint.effect}"
    return ""


def _tolerated(taint: Any, tolerations: Sequence[Mapping[str, Any]]) -> bool:
    def tolerates(one: Mapping[str, Any]) -> bool:
        same_value = one.get("operator") == "Exists" or one.get("value", "") == (taint.value or "")
        return (
            one.get("effect", taint.effect) == taint.effect
            and one.get("key", taint.key) == taint.key
            and same_value
        )

    return any(map(tolerates, tolerations))
