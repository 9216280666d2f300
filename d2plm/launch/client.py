"""Client of the Kubernetes API: training jobs, their pods, and errors in one line.

Requests go through the official client, which handles credentials and certificates. Objects are
plain dictionaries. Requests are retried while the server does not answer, because upgrading a
control plane takes minutes; a request that the server rejects is not retried.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d2plm.core.errors import ClusterError, first_line, from_extra
from d2plm.core.number_text import duration
from d2plm.launch.job_spec import (
    PYTORCHJOB_CONTAINER,
    SHARD_CONTAINER,
    TRAINJOB_CONTAINER,
    Manifest,
    indexed_job,
    pytorchjob,
    training_runtime,
    trainjob,
)
from d2plm.launch.kfp_server import POD_VARIABLE
from d2plm.launch.remedies import remedy_for

TIMEOUT_SECONDS = 30  # of a request
PATIENCE_SECONDS = 900  # during which unanswered requests are repeated
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0  # between repeated requests
REPORT_SECONDS = (1.0, 60.0)  # until repeated requests are reported, and between two reports
LOG_SECONDS = 10  # timeout of a request for a log, and time during which it is repeated
MOST_LINE_BYTES = 2**16  # maximum length of a line of a log
QUIET_LOG_SECONDS = 15  # until a followed log is requested again, as its node may be lost
WATCH_SECONDS = 10
NOT_STARTED, ABSENT, CONFLICT, GONE = 400, 404, 409, 410
LISTED, DELETED, TICK = "LISTED", "DELETED", "TICK"
VERBS = {"GET": "read", "PATCH": "change", "DELETE": "delete"}
NO_ANSWER = 0  # status of unanswered requests; the client uses it for TLS errors
TRANSIENT = (NO_ANSWER, 429, 500, 502, 503, 504)
REMEDIES = {  # if the message names none
    NO_ANSWER: "check the kube config and the network",
    401: "renew the credentials",
    403: "correct what the message names, or grant the permissions in k8s/base/access.yaml, which "
    "d2plm doctor checks",
    422: "correct the setting",
}
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A kind of object in a cluster.

    Attributes:
        name, group, version, plural: as in the API.
        controller: software that must be installed to support the kind.
        propagation: deletion policy; with Foreground, an object outlives the objects it owns.
    """

    name: str
    plural: str
    group: str = ""
    version: str = "v1"
    controller: str = "Kubernetes"
    propagation: str = "Background"

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


@dataclass(frozen=True, kw_only=True)
class JobKind(Resource):
    """A kind of job.

    Attributes:
        container: name of the container that trains, or computes a shard.
        replica: follows the job's name in the names of its pods, and of a TrainJob's Job; or empty.
        job_label, index_label: labels of the pods with the job's name and their index.
        suspension: path below `spec` of the field that suspends the job.
        succeeded, failed: types of the conditions of a finished job.
    """

    container: str
    replica: str
    job_label: str
    index_label: str
    suspension: tuple[str, ...]
    succeeded: str
    failed: str = "Failed"

    def owns(self, name: str, other: str) -> bool:
        """Whether `other` names the job `name` or an object that controllers create for it."""
        of_pods = rf"{'-' * bool(self.replica)}{self.replica}-\d+(-.*)?"
        return re.fullmatch(rf"{re.escape(name)}({of_pods})?", other) is not None


PYTORCHJOB = JobKind(
    name="PyTorchJob",
    group="kubeflow.org",
    plural="pytorchjobs",
    controller="the Kubeflow training operator (v1)",
    container=PYTORCHJOB_CONTAINER,
    replica="worker",
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
    replica="node",
    job_label="jobset.sigs.k8s.io/jobset-name",
    index_label="batch.kubernetes.io/job-completion-index",
    suspension=("suspend",),
    succeeded="Complete",
)
JOB_KINDS = {"pytorchjob": PYTORCHJOB, "trainjob": TRAINJOB}  # kinds of training jobs
INDEXED_JOB = JobKind(
    name="Job",
    group="batch",
    plural="jobs",
    container=SHARD_CONTAINER,
    replica="",
    job_label="batch.kubernetes.io/job-name",
    index_label="batch.kubernetes.io/job-completion-index",
    suspension=("suspend",),
    succeeded="Complete",
)
# The runtime owns its TrainJob and outlives it: Trainer's webhook rejects every change of a
# TrainJob whose runtime is gone, and the end of a foreground deletion is a change.
TRAINING_RUNTIME = Resource(
    name="TrainingRuntime",
    group=TRAINJOB.group,
    version=TRAINJOB.version,
    plural="trainingruntimes",
    controller=TRAINJOB.controller,
    propagation="Foreground",
)
# Objects of a job of each kind, in order of creation.
OBJECTS: dict[JobKind, tuple[tuple[Resource, Callable[[Any], Manifest]], ...]] = {
    PYTORCHJOB: ((PYTORCHJOB, pytorchjob),),
    TRAINJOB: ((TRAINING_RUNTIME, training_runtime), (TRAINJOB, trainjob)),
    INDEXED_JOB: ((INDEXED_JOB, indexed_job),),
}
POD = Resource(name="pod", plural="pods")
EVENT = Resource(name="event", plural="events")
KUEUE = "kueue.x-k8s.io"
WORKLOAD = Resource(name="Workload", group=KUEUE, plural="workloads")


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster, with the current credentials.

    Every method raises `ClusterError` if the server rejects the request or does not answer.

    Attributes:
        api: a `kubernetes.client.ApiClient`.
        timeout_seconds: timeout for connecting and between two parts of a response.
        patience_seconds: how long a request is repeated while the server does not answer.
    """

    api: Any
    namespace: str
    timeout_seconds: float
    patience_seconds: float

    def has(self, kind: Resource) -> bool:
        """Whether the cluster knows `kind`; this needs no permission."""
        known = self.call("GET", kind.root, "list the kinds of objects", answers=[ABSENT])
        return known is not None and any(r["name"] == kind.plural for r in known["resources"])

    def create(
        self, kind: Resource, manifest: Manifest, *, dry_run: bool = False
    ) -> Manifest | None:
        """Create an object and return it; None if the name is taken.

        In a dry run, the server only checks and admits the object.
        """
        metadata = manifest["metadata"]
        what = f"create {self.of(kind, metadata.get('name') or metadata['generateName'])}"
        try:
            query = {"dryRun": "All"} if dry_run else {}
            path = self.path(kind)
            return self.call("POST", path, what, query=query, body=manifest, answers=[CONFLICT])
        except ClusterError as error:
            if getattr(error.__cause__, "status", None) != ABSENT:
                raise
            if self.has(kind):
                raise ClusterError(
                    f"cannot {what}: the cluster has no namespace {self.namespace}; correct the "
                    f"name, or run kubectl create namespace {self.namespace}"
                ) from error
            raise ClusterError(
                f"cannot {what}: the cluster has no {kind.plural}.{kind.group}; install "
                f"{kind.controller}, or choose another kind of job"
            ) from error

    def read(self, kind: Resource, name: str) -> Manifest | None:
        """Read an object; None if it does not exist."""
        return self._of_one("GET", kind, name, answers=[ABSENT])

    def suspend(self, kind: JobKind, name: str, suspended: bool) -> None:
        """Suspend a job, which ends its pods, or resume it."""
        change: Any = suspended
        for key in reversed(("spec", *kind.suspension)):
            change = {key: change}
        self._of_one("PATCH", kind, name, body=change)

    def delete(self, kind: Resource, name: str) -> None:
        """Delete an object, if it exists, and the objects that it owns; this may take a while."""
        query = {"propagationPolicy": kind.propagation}
        self._of_one("DELETE", kind, name, query=query, answers=[ABSENT])

    def states(self, kind: Resource, name: str) -> Iterator[Manifest]:
        """Yield an object when it changes and every `WATCH_SECONDS`, until its deletion begins."""
        found: Manifest | None = None
        what, query = f"watch {self.of(kind, name)}", {"fieldSelector": f"metadata.name={name}"}
        for change, seen in self._changes(kind, what, query):
            if change == LISTED:
                found = next(iter(seen["items"]), None)
            elif change != TICK:
                found = None if change == DELETED else seen
            if found is None or "deletionTimestamp" in found["metadata"]:
                return
            yield found

    def pods(self, kind: JobKind, name: str) -> list[Manifest]:
        query = {"labelSelector": f"{kind.job_label}={name}"}
        what = f"list the pods of {self.of(kind, name)}"
        return list(self.call("GET", self.path(POD), what, query=query)["items"])

    def watched_pods(self, kind: JobKind, name: str) -> Iterator[tuple[str, list[Manifest]]]:
        """Yield the type of each change of a job's pods (see `_changes`), and the pods."""
        query = {"labelSelector": f"{kind.job_label}={name}"}
        for change, seen in self._changes(POD, f"watch the pods of {self.of(kind, name)}", query):
            yield change, seen["items"] if change == LISTED else [] if change == TICK else [seen]

    def _changes(
        self, kind: Resource, what: str, query: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """List, then watch from the list's version, and list again when a watch breaks.

        Yields (LISTED, the list), (ADDED, MODIFIED or DELETED, the object), (TICK, None).
        """
        from urllib3.exceptions import HTTPError

        path, watch = self.path(kind), {"watch": "true", "timeoutSeconds": WATCH_SECONDS}
        while True:
            listed = self.call("GET", path, what, query=query)
            yield LISTED, listed
            version = listed["metadata"]["resourceVersion"]
            expired = False  # whether the resource version is too old
            with suppress(HTTPError, OSError):  # the next listing waits for the server
                while not expired:
                    response = self.call(
                        "GET",
                        path,
                        what,
                        query={**query, **watch, "resourceVersion": version},
                        answers=[GONE],
                        read_seconds=WATCH_SECONDS + TIMEOUT_SECONDS,
                    )
                    expired = response is None
                    for event in map(json.loads, () if expired else lines(response)):
                        if expired := event["type"] == "ERROR":
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        yield event["type"], event["object"]
                    if not expired:
                        yield TICK, None
            time.sleep(1)

    def warnings(self, kind: JobKind, job: Manifest) -> list[Manifest]:
        """Warning events of a job and its objects, in order, without those of a former job."""
        name, created = job["metadata"]["name"], job["metadata"]["creationTimestamp"]
        query, what = {"fieldSelector": "type=Warning"}, f"list the events of {self.of(kind, name)}"
        events = self.call("GET", self.path(EVENT), what, query=query)["items"]
        own = [
            event
            for event in events
            if kind.owns(name, event["involvedObject"].get("name", ""))
            and event["metadata"]["creationTimestamp"] >= created
        ]
        return sorted(own, key=lambda one: str(one.get("lastTimestamp") or one.get("eventTime")))

    def log(self, pod_name: str, container: str, **query: Any) -> Iterator[str]:
        """Yield the lines of a pod's log; none if the pod is gone or has not started.

        The limits are short, because only the pod's node has the log. `query` contains parameters
        of the request, such as `follow="true"`.
        """
        response = replace(self, patience_seconds=LOG_SECONDS).call(
            "GET",
            f"{self.path(POD, pod_name)}/log",
            f"read the log of pod {self.namespace}/{pod_name} from its node",
            query={"container": container, **query},
            answers=[ABSENT, NOT_STARTED],
            read_seconds=QUIET_LOG_SECONDS if "follow" in query else LOG_SECONDS,
        )
        return iter(()) if response is None else lines(response, MOST_LINE_BYTES)

    def served(self, kind: Resource) -> Resource | None:
        """`kind` in the version that the server prefers; None if the group is not installed."""
        path, what = f"/apis/{kind.group}/", f"look for {kind.group}"
        group = self.call("GET", path, what, answers=[ABSENT])
        return group and replace(kind, version=group["preferredVersion"]["version"])

    def workload(self, kind: JobKind, job: Manifest) -> Manifest | None:
        """Kueue's Workload of a job; None if there is none."""
        workload = self.served(WORKLOAD)
        if workload is None:
            return None
        query = {"labelSelector": f"{KUEUE}/job-uid={job['metadata']['uid']}"}
        what = f"list Kueue's workloads of {self.of(kind, job['metadata']['name'])}"
        return next(iter(self.call("GET", self.path(workload), what, query=query)["items"]), None)

    def workflow_of(self, pod_name: str) -> list[Manifest]:
        """`ownerReferences` to the pipeline run that a pod belongs to."""
        keys = ("apiVersion", "kind", "name", "uid")
        owners = self._of_one("GET", POD, pod_name)["metadata"].get("ownerReferences", ())
        return [{key: o[key] for key in keys} for o in owners if o["kind"] == "Workflow"]

    def of(self, kind: Resource, name: str) -> str:
        """Name of an object in messages."""
        return f"{kind.name} {self.namespace}/{name}"

    def path(self, kind: Resource, name: str | None = None) -> str:
        """Path of an object, or of all objects of its kind."""
        path = f"{kind.root}/namespaces/{self.namespace}/{kind.plural}"
        return path if name is None else f"{path}/{name}"

    def _of_one(self, method: str, kind: Resource, name: str, **request: Any) -> Any:
        what = f"{VERBS[method]} {self.of(kind, name)}"
        return self.call(method, self.path(kind, name), what, **request)

    def call(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Manifest | None = None,
        answers: Collection[int] = (),
        read_seconds: float | None = None,
    ) -> Any:
        """Send a request, again while the server does not answer, and return the response as JSON.

        Args:
            what: action of the request, for errors "cannot {what}".
            answers: statuses of an error for which None is returned.
            read_seconds: if given, the response is a stream with this timeout between two parts.
        """
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        began, pause = time.monotonic(), FIRST_PAUSE_SECONDS
        report_at = began + REPORT_SECONDS[0]
        while True:
            try:
                return self.api.call_api(
                    path,
                    method,
                    query_params=list((query or {}).items()),
                    header_params={"Accept": "*/*", "Content-Type": kind},
                    body=body,
                    response_type="object",
                    auth_settings=["BearerToken"],
                    _return_http_data_only=True,
                    _preload_content=read_seconds is None,
                    _request_timeout=(self.timeout_seconds, read_seconds or self.timeout_seconds),
                )
            except (ApiException, HTTPError, OSError) as error:
                status, said = NO_ANSWER, f"no answer ({first_line(error)})"
                if isinstance(error, ApiException):
                    status, said = error.status, f"{server_message(error)} ({error.status})"
                if status in answers:
                    return None
                now = time.monotonic()
                left = began + self.patience_seconds - now
                if left <= 0 or status not in TRANSIENT:
                    remedy = remedy_for(said) or REMEDIES.get(status)
                    advice = f"; {remedy}" if remedy else ""
                    raise ClusterError(f"cannot {what}: {said}{advice}") from error
                is_long = self.patience_seconds > REPORT_SECONDS[1]  # not for logs
                if is_long and now >= report_at:
                    report_at = now + REPORT_SECONDS[1]
                    again = (method, path, duration(left))
                    log.warning(
                        "the Kubernetes API: %s; repeating %s %s for up to %s", said, *again
                    )
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def first_known_kind(cluster: Cluster) -> JobKind:
    """The first kind of training job that the cluster knows; `ClusterError` if it knows none."""
    for kind in JOB_KINDS.values():
        if cluster.has(kind):
            return kind
    controllers = " nor ".join(kind.controller for kind in JOB_KINDS.values())
    raise ClusterError(
        f"launcher=auto: the cluster has neither {controllers}; install one, or set "
        "launcher=local to train in the step's own pod"
    )


def where_to_train(kind: str) -> str:
    """Resolve `launcher.kind` to `local`, `pytorchjob` or `trainjob`.

    `auto` is `local` except in a pipeline's step in a cluster, where it is a job; raises
    `ClusterError` if that cluster has no training operator.
    """
    if kind != "auto":
        return kind
    if POD_VARIABLE not in os.environ:
        return "local"
    used = first_known_kind(connect())
    return next(name for name, known in JOB_KINDS.items() if known is used)


def is_suspended(kind: JobKind, job: Manifest) -> bool:
    """Whether a job is suspended, for example by a queue without free capacity."""
    value: Any = job["spec"]
    for key in kind.suspension:
        value = (value or {}).get(key)
    return bool(value)


def is_configured() -> bool:
    """Whether a kubectl configuration or a pod's service account exists."""
    files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    places = [*map(Path, files.split(os.pathsep)), _ACCOUNT / "token"]
    return any(place.is_file() for place in places)


def connect(namespace: str | None = None, *, timeout_seconds: float | None = None) -> Cluster:
    """Connect to the cluster of this pod, or else to kubectl's current cluster.

    Args:
        namespace: None: the pod's own, or kubectl's current one.
        timeout_seconds: timeout of requests, which are then not repeated; None: requests are
            repeated while the server does not answer.

    Raises:
        ClusterError: if no cluster is configured, or the client is not installed.
    """
    with from_extra("the Kubernetes client", "pipelines", ClusterError):
        from kubernetes import client, config
    configuration = client.Configuration()
    try:
        if (_ACCOUNT / "token").is_file():
            config.load_incluster_config(configuration)
            current = (_ACCOUNT / "namespace").read_text().strip()
        else:
            file = os.environ.get("KUBECONFIG") or None  # the client reads it only on import
            config.load_kube_config(file, client_configuration=configuration)
            context = config.list_kube_config_contexts(file)[1]["context"]
            current = context.get("namespace") or "default"
    except Exception as error:  # a malformed kube config raises arbitrary exceptions
        raise ClusterError(
            f"no cluster is configured: {first_line(error).rstrip('.')}; run this in a pod with a "
            "service account, or set KUBECONFIG, or train on this machine"
        ) from error
    configuration.retries = False  # `Cluster.call` repeats requests, for a limited time
    patience = PATIENCE_SECONDS if timeout_seconds is None else 0
    timeout = TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    return Cluster(client.ApiClient(configuration), namespace or current, timeout, patience)


def lines(response: Any, most_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of a stream, each up to its first `most_bytes`."""
    line = b""
    try:
        for part in response.stream():
            first, *others = part.split(b"\n")
            line = (line + first)[:most_bytes]
            for other in others:
                yield line.decode(errors="replace")
                line = other[:most_bytes]
        if line:
            yield line.decode(errors="replace")
    finally:
        response.release_conn()


def server_message(error: Any) -> str:
    """Message of the API server in an `ApiException`; HTML pages of other servers are ignored."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return " ".join(str(error.reason).split())
