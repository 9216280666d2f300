"""The Kubernetes API as the launcher needs it: training jobs, their pods, and errors in one line.

Requests are repeated while the server does not answer, as it does for minutes when a control plane
is upgraded; what it refuses is final.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from d2plm.core.errors import ClusterError, first_line
from d2plm.launch.job_spec import PYTORCHJOB_CONTAINER, TRAINJOB_CONTAINER, Manifest

TIMEOUT_SECONDS = 30  # of one request
PATIENCE_SECONDS = 900  # with a server that does not answer
LONGEST_PAUSE_SECONDS = 15
WATCH_SECONDS = 10
NOT_STARTED, ABSENT, THERE_ALREADY, GONE = 400, 404, 409, 410
LISTED, DELETED, TICK = "LISTED", "DELETED", "TICK"
TRANSIENT = (429, 500, 502, 503, 504)
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Resource:
    """A kind of object that a cluster may know.

    Attributes:
        name, group, version, plural: as the API has it.
        controller: what has to be installed for it.
    """

    name: str
    group: str
    version: str
    plural: str
    controller: str


@dataclass(frozen=True)
class JobKind(Resource):
    """A kind of training job, as its controller has it.

    Attributes:
        container: of its pods, the one that trains.
        job_label: of its pods, holding the job's name.
        index_label: of its pods, holding their number.
        suspension: where, below `spec`, it says whether it is suspended.
        succeeded: type of the condition that ends it well.
        failed: type of the condition that ends it badly.
    """

    container: str
    job_label: str
    index_label: str
    suspension: tuple[str, ...]
    succeeded: str
    failed: str = "Failed"


PYTORCHJOB = JobKind(
    name="PyTorchJob",
    group="kubeflow.org",
    version="v1",
    plural="pytorchjobs",
    controller="the Kubeflow training operator (v1)",
    container=PYTORCHJOB_CONTAINER,
    job_label="training.kubeflow.org/job-name",
    index_label="training.kubeflow.org/replica-index",
    suspension=("runPolicy", "suspend"),
    succeeded="Succeeded",
)
TRAINJOB = JobKind(
    name="TrainJob",
    group="trainer.kubeflow.org",
    version="v1alpha1",
    plural="trainjobs",
    controller="Kubeflow Trainer (v2)",
    container=TRAINJOB_CONTAINER,
    job_label="jobset.sigs.k8s.io/jobset-name",
    index_label="batch.kubernetes.io/job-completion-index",
    suspension=("suspend",),
    succeeded="Complete",
)
JOB_KINDS = {"pytorchjob": PYTORCHJOB, "trainjob": TRAINJOB}
TRAINING_RUNTIME = Resource(
    name="TrainingRuntime",
    group=TRAINJOB.group,
    version=TRAINJOB.version,
    plural="trainingruntimes",
    controller=TRAINJOB.controller,
)


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster, as the current credentials see it.

    Every method raises `ClusterError` where the server refuses or stays away.

    Attributes:
        api: a `kubernetes.client.ApiClient`.
        namespace: where everything is.
    """

    api: Any
    namespace: str

    def has(self, kind: Resource) -> bool:
        """Whether the cluster knows `kind`; asking needs no permission."""
        listed = self._request(
            "ask what kinds of objects there are",
            lambda: self._objects.get_api_resources(
                kind.group, kind.version, _request_timeout=TIMEOUT_SECONDS
            ),
            answers=[ABSENT],
        )
        return listed is not None and any(r.name == kind.plural for r in listed.resources)

    def create(self, kind: Resource, manifest: Manifest) -> Manifest | None:
        """The object that was created; None where there is one of its name."""
        name = manifest["metadata"]["name"]
        created: Manifest | None = self._request(
            f"create {self.of(kind, name)}",
            lambda: self._objects.create_namespaced_custom_object(
                **self._of(kind), body=manifest, _request_timeout=TIMEOUT_SECONDS
            ),
            answers=[THERE_ALREADY],
            not_known=kind,
        )
        return created

    def read(self, kind: Resource, name: str) -> Manifest | None:
        """An object; None where there is none."""
        found: Manifest | None = self._request(
            f"read {self.of(kind, name)}",
            lambda: self._objects.get_namespaced_custom_object(
                **self._of(kind), name=name, _request_timeout=TIMEOUT_SECONDS
            ),
            answers=[ABSENT],
        )
        return found

    def patch(self, kind: Resource, name: str, change: Manifest) -> None:
        """Merge `change` into an object."""
        self._request(
            f"change {self.of(kind, name)}",
            lambda: self._objects.patch_namespaced_custom_object(
                **self._of(kind), name=name, body=change, _request_timeout=TIMEOUT_SECONDS
            ),
        )

    def suspend(self, kind: JobKind, name: str, suspended: bool) -> None:
        """Suspend a job, whose pods then end, or let it go on."""
        change: Any = suspended
        for key in reversed(("spec", *kind.suspension)):
            change = {key: change}
        self.patch(kind, name, change)

    def delete(self, kind: Resource, name: str) -> None:
        """Delete an object and what it owns, if it is there."""
        self._request(
            f"delete {self.of(kind, name)}",
            lambda: self._objects.delete_namespaced_custom_object(
                **self._of(kind),
                name=name,
                propagation_policy="Foreground",
                _request_timeout=TIMEOUT_SECONDS,
            ),
            answers=[ABSENT],
        )

    def states(self, kind: Resource, name: str) -> Iterator[Manifest]:
        """An object whenever it has changed, and every `WATCH_SECONDS` anyway, until it is gone."""
        found: Manifest | None = None
        for change, seen in self._changes(
            f"watch {self.of(kind, name)}",
            self._objects.list_namespaced_custom_object,
            **self._of(kind),
            field_selector=f"metadata.name={name}",
        ):
            if change == LISTED:
                found = next(iter(seen["items"]), None)
            elif change == DELETED:
                found = None
            elif change != TICK:
                found = seen
            if found is None:
                return
            yield found

    def pods(self, kind: JobKind, name: str) -> list[Any]:
        """A job's pods, as the client's `V1Pod`."""
        listed = self._request(
            f"list the pods of {self.of(kind, name)}",
            lambda: self.core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{kind.job_label}={name}",
                _request_timeout=TIMEOUT_SECONDS,
            ),
        )
        return list(listed.items)

    def watched_pods(self, kind: JobKind, name: str) -> Iterator[Any]:
        """Each of a job's pods, as the client's `V1Pod`, whenever it has changed or is deleted.

        Every `WATCH_SECONDS`, None.
        """
        for change, seen in self._changes(
            f"watch the pods of {self.of(kind, name)}",
            self.core.list_namespaced_pod,
            namespace=self.namespace,
            label_selector=f"{kind.job_label}={name}",
        ):
            if change == LISTED:
                yield from seen.items
            else:
                yield seen

    def _changes(
        self, what: str, listing: Callable[..., Any], **arguments: str
    ) -> Iterator[tuple[str, Any]]:
        """Lists, then watches from the list's version on, and lists anew where a watch breaks.

        Gives (LISTED, the list), (ADDED, MODIFIED or DELETED, the object), (TICK, None).
        """
        from kubernetes.client import ApiException
        from kubernetes.watch import Watch
        from urllib3.exceptions import HTTPError

        while True:
            listed = self._request(
                what, partial(listing, **arguments, _request_timeout=TIMEOUT_SECONDS)
            )
            yield LISTED, listed
            version = _version(listed)
            try:
                while True:
                    watch = Watch()
                    for event in watch.stream(
                        listing,  # itself: its documentation tells the client what it lists
                        **arguments,
                        resource_version=version,
                        timeout_seconds=WATCH_SECONDS,
                        _request_timeout=(TIMEOUT_SECONDS, WATCH_SECONDS + TIMEOUT_SECONDS),
                    ):
                        version = _version(event["object"])
                        yield event["type"], event["object"]
                    yield TICK, None
            except ApiException as error:
                if error.status not in (GONE, *TRANSIENT):
                    raise ClusterError(f"cannot {what}: {_refusal(error)}") from error
            except (HTTPError, OSError):
                pass  # listing waits for a server that is away
            time.sleep(1)

    def last_warning(self, name: str) -> str | None:
        """What the cluster complained of last about the object of this name."""
        listed = self._request(
            f"list the events of {self.namespace}/{name}",
            lambda: self.core.list_namespaced_event(
                self.namespace,
                field_selector=f"involvedObject.name={name}",
                _request_timeout=TIMEOUT_SECONDS,
            ),
        )
        warnings = [event for event in listed.items if event.type == "Warning"]
        return f"{warnings[-1].reason}: {warnings[-1].message}" if warnings else None

    def last_lines(self, pod_name: str, container: str, lines: int = 20) -> list[str]:
        """The end of a pod's log; nothing where it is gone."""
        text = self._request(
            f"read the log of pod {self.namespace}/{pod_name}",
            lambda: self.core.read_namespaced_pod_log(
                pod_name,
                self.namespace,
                container=container,
                tail_lines=lines,
                _request_timeout=TIMEOUT_SECONDS,
            ),
            answers=[ABSENT, NOT_STARTED],
        )
        return (text or "").splitlines()

    def workflow_of(self, pod_name: str) -> list[Manifest]:
        """`ownerReferences` to the pipeline run that a pod of it belongs to."""
        pod = self._request(
            f"read pod {self.namespace}/{pod_name}",
            lambda: self.core.read_namespaced_pod(
                pod_name, self.namespace, _request_timeout=TIMEOUT_SECONDS
            ),
        )
        return [
            {"apiVersion": o.api_version, "kind": o.kind, "name": o.name, "uid": o.uid}
            for o in pod.metadata.owner_references or ()
            if o.kind == "Workflow"
        ]

    def of(self, kind: Resource, name: str) -> str:
        """An object's name in messages."""
        return f"{kind.name} {self.namespace}/{name}"

    @property
    def core(self) -> Any:
        """The client's `CoreV1Api`."""
        from kubernetes.client import CoreV1Api

        return CoreV1Api(self.api)

    @property
    def _objects(self) -> Any:
        from kubernetes.client import CustomObjectsApi

        return CustomObjectsApi(self.api)

    def _of(self, kind: Resource) -> dict[str, str]:
        return {
            "group": kind.group,
            "version": kind.version,
            "namespace": self.namespace,
            "plural": kind.plural,
        }

    def _request(
        self,
        what: str,
        call: Callable[[], Any],
        *,
        answers: Collection[int] = (),
        not_known: Resource | None = None,
    ) -> Any:
        """What `call` gives; None where the server refuses it in a way that will do.

        Args:
            what: completes "cannot …".
            call: the request.
            answers: statuses of refusals that will do.
            not_known: the kind that an answer of "not found" may mean.
        """
        from kubernetes.client import ApiException

        try:
            return patiently(what, call)
        except ApiException as error:
            if error.status in answers:
                return None
            if error.status == ABSENT and not_known is not None and not self.has(not_known):
                raise ClusterError(
                    f"cannot {what}: the cluster has no {not_known.plural}.{not_known.group}; "
                    f"install {not_known.controller}, or choose another kind of job"
                ) from error
            raise ClusterError(f"cannot {what}: {_refusal(error)}") from error


def is_suspended(kind: JobKind, job: Manifest) -> bool:
    """Whether a job waits to be let go on, as a queue has it."""
    value: Any = job["spec"]
    for key in kind.suspension:
        value = (value or {}).get(key)
    return bool(value)


def connect(namespace: str | None = None) -> Cluster:
    """The cluster that this pod runs in, or else kubectl's current one.

    Args:
        namespace: None: the pod's own, or kubectl's current one.

    Raises:
        ClusterError: where there is neither, or the client is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ClusterError(
            f"the Kubernetes client is not installed ({error}); install d2plm[pipelines]"
        ) from error
    configuration = client.Configuration()
    try:
        if (_ACCOUNT / "token").is_file():
            config.load_incluster_config(configuration)
            current = (_ACCOUNT / "namespace").read_text().strip()
        else:
            file = os.environ.get("KUBECONFIG") or None  # the client looks when it is imported
            config.load_kube_config(file, client_configuration=configuration)
            context = config.list_kube_config_contexts(file)[1]["context"]
            current = context.get("namespace") or "default"
    except Exception as error:  # of a malformed kube config, whatever its reader stumbles over
        raise ClusterError(
            f"there is no cluster to talk to: {first_line(error)}; run this in a pod with a "
            "service account, or give a kube config (KUBECONFIG), or train on this machine"
        ) from error
    configuration.retries = False  # `patiently` does that
    return Cluster(client.ApiClient(configuration), namespace or current)


def patiently(what: str, call: Callable[[], Result]) -> Result:
    """What `call` gives, repeated while the server does not answer.

    Args:
        what: completes "cannot …".
        call: a request of the client's.

    Raises:
        ApiException: if the server refuses.
        ClusterError: if it has not answered for `PATIENCE_SECONDS`.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    end, pause = time.monotonic() + PATIENCE_SECONDS, 1.0
    while True:
        try:
            return call()
        except (ApiException, HTTPError, OSError) as error:
            if isinstance(error, ApiException) and error.status not in TRANSIENT:
                raise
            if time.monotonic() + pause > end:
                reason = error.reason if isinstance(error, ApiException) else first_line(error)
                raise ClusterError(
                    f"cannot {what}: the Kubernetes API has not answered for "
                    f"{PATIENCE_SECONDS / 60:.0f} minutes ({reason}); check the kube config and "
                    "the network"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _refusal(error: Any) -> str:
    """What an `ApiException` says, and how to mend it."""
    message = error.reason
    with suppress(ValueError, TypeError, AttributeError):
        message = json.loads(error.body)["message"]
    mends = {
        401: "renew the credentials",
        403: "grant it: k8s/base/access.yaml has what the launcher needs; d2plm doctor checks it",
        422: "correct the setting",
    }
    mend = mends.get(error.status)
    return f"{message} ({error.status})" + (f"; {mend}" if mend else "")


def _version(listed: Any) -> str:
    """The resourceVersion of a list or an object, a dictionary or the client's."""
    if isinstance(listed, dict):
        return str(listed["metadata"]["resourceVersion"])
    return str(listed.metadata.resource_version)
