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
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d2plm.core.errors import ClusterError, first_line, from_extra
from d2plm.launch.job_spec import (
    PYTORCHJOB_CONTAINER,
    TRAINJOB_CONTAINER,
    Manifest,
    pytorchjob,
    training_runtime,
    trainjob,
)

TIMEOUT_SECONDS = 30  # of one request
RETRIES = 64  # of a request that is not answered: about 15 minutes
LONGEST_PAUSE_SECONDS = 15  # between two retries
SILENT_RETRIES = 2  # before a retry is reported
WATCH_SECONDS = 10
NOT_STARTED, ABSENT, CONFLICT, GONE = 400, 404, 409, 410
LISTED, DELETED, TICK = "LISTED", "DELETED", "TICK"
VERBS = {"GET": "read", "PATCH": "change", "DELETE": "delete"}
TRANSIENT = (429, 500, 502, 503, 504)
REMEDIES = {
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
    """A kind of training job.

    Attributes:
        container: name of the container that trains.
        replica: follows the job's name in the names of its pods, and of a TrainJob's Job.
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
        of_pods = rf"-{self.replica}-\d+(-.*)?"
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
JOB_KINDS = {"pytorchjob": PYTORCHJOB, "trainjob": TRAINJOB}
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
OBJECTS = {
    PYTORCHJOB: ((PYTORCHJOB, pytorchjob),),
    TRAINJOB: ((TRAINING_RUNTIME, training_runtime), (TRAINJOB, trainjob)),
}
POD = Resource(name="pod", plural="pods")
EVENT = Resource(name="event", plural="events")


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster, with the current credentials.

    Every method raises `ClusterError` if the server rejects the request or does not answer.

    Attributes:
        api: a `kubernetes.client.ApiClient`.
        timeout_seconds: timeout for connecting and between two parts of a response.
    """

    api: Any
    namespace: str
    timeout_seconds: float = TIMEOUT_SECONDS

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
        """Delete an object, if it exists, and the objects that it owns, which may take a while."""
        query = {"propagationPolicy": kind.propagation}
        self._of_one("DELETE", kind, name, query=query, answers=[ABSENT])

    def states(self, kind: Resource, name: str) -> Iterator[Manifest]:
        """Yield an object whenever it changes, and every `WATCH_SECONDS`, until it is deleted."""
        found: Manifest | None = None
        what, query = f"watch {self.of(kind, name)}", {"fieldSelector": f"metadata.name={name}"}
        for change, seen in self._changes(kind, what, query):
            if change == LISTED:
                found = next(iter(seen["items"]), None)
            elif change != TICK:
                found = None if change == DELETED else seen
            if found is None:
                return
            yield found

    def pods(self, kind: JobKind, name: str) -> list[Manifest]:
        query = {"labelSelector": f"{kind.job_label}={name}"}
        what = f"list the pods of {self.of(kind, name)}"
        return list(self.call("GET", self.path(POD), what, query=query)["items"])

    def watched_pods(self, kind: JobKind, name: str) -> Iterator[Manifest | None]:
        """Yield each pod of a job that changes or is deleted; None every `WATCH_SECONDS`."""
        query = {"labelSelector": f"{kind.job_label}={name}"}
        for change, seen in self._changes(POD, f"watch the pods of {self.of(kind, name)}", query):
            yield from seen["items"] if change == LISTED else [seen]

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
            expired = False  # whether the version is too old
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
        """Warning events of a job and of the objects created for it, in order.

        Earlier events belong to a former job of the same name, which was deleted before.
        """
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

        `query` contains parameters of the request, such as `follow="true"`.
        """
        response = self.call(
            "GET",
            f"{self.path(POD, pod_name)}/log",
            f"read the log of pod {self.namespace}/{pod_name}",
            query={"container": container, **query},
            answers=[ABSENT, NOT_STARTED],
            read_seconds=3600 if "follow" in query else TIMEOUT_SECONDS,
        )
        return iter(()) if response is None else lines(response)

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
        """Response to a request about one object."""
        what = f"{VERBS[method]} {self.of(kind, name)}"
        return self.call(method, self.path(kind, name), what, **request)

    def call(self, method: str, path: str, what: str, **request: Any) -> Any:
        """Like `request`, with one-line errors "cannot {what}"."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return self.request(path, method, **request)
        except ApiException as error:
            remedy = f"; {REMEDIES[error.status]}" if error.status in REMEDIES else ""
            said = f"{server_message(error)} ({error.status})"
            raise ClusterError(f"cannot {what}: {said}{remedy}") from error
        except (HTTPError, OSError) as error:
            raise ClusterError(
                f"cannot {what}: the Kubernetes API did not answer after "
                f"{self.api.configuration.retries.total} retries ({first_line(error)}); check the "
                "kube config and the network"
            ) from error

    def request(
        self,
        path: str,
        method: str = "GET",
        query: Mapping[str, Any] | None = None,
        body: Manifest | None = None,
        *,
        answers: Collection[int] = (),
        read_seconds: float | None = None,
    ) -> Any:
        """Send a request and return the response as JSON; raises the client's own errors.

        Args:
            answers: statuses of an error for which None is returned.
            read_seconds: if given, the response is a stream with this timeout between two parts.
        """
        from kubernetes.client import ApiException

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
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
        except ApiException as error:
            if error.status not in answers:
                raise
            return None


def first_known_kind(cluster: Cluster) -> JobKind:
    """The first kind of job that the cluster knows.

    Raises:
        ClusterError: if it knows none.
    """
    for kind in JOB_KINDS.values():
        if cluster.has(kind):
            return kind
    controllers = " nor ".join(kind.controller for kind in JOB_KINDS.values())
    raise ClusterError(
        f"launcher=auto: the cluster has neither {controllers}; install one, or set "
        "launcher=local to train in the step's own pod"
    )


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
        timeout_seconds: timeout of requests, which are then not retried; None: requests are
            retried while the server does not answer.

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
            f"no cluster is configured: {first_line(error)}; run this in a pod with a service "
            "account, or set KUBECONFIG, or train on this machine"
        ) from error
    configuration.retries = _retries(RETRIES if timeout_seconds is None else 0)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # warns of every retry
    return Cluster(
        client.ApiClient(configuration), namespace or current, timeout_seconds or TIMEOUT_SECONDS
    )


def _retries(times: int) -> Any:
    """Retry policy of requests; the third retry logs a warning with the reason."""
    from urllib3 import Retry

    class Reported(Retry):
        def increment(  # type: ignore[no-untyped-def, override]  # urllib3's signature
            self, method=None, url=None, response=None, error=None, **more
        ):
            if len(self.history) == SILENT_RETRIES:
                refusal = None if response is None else _message_in(response.data, response.status)
                path = str(url).partition("?")[0]
                log.warning(
                    "the Kubernetes API: %s; retrying %s %s for up to 15 minutes",
                    *(refusal or first_line(error), method, path),
                )
            return super().increment(method, url, response, error, **more)

    return Reported(
        times,
        allowed_methods=None,  # all
        status_forcelist=TRANSIENT,
        raise_on_status=False,
        backoff_factor=0.5,
        backoff_max=LONGEST_PAUSE_SECONDS,
    )


def lines(response: Any) -> Iterator[str]:
    try:
        for line in response:
            yield line.decode(errors="replace").removesuffix("\n")
    finally:
        response.release_conn()


def server_message(error: Any) -> str:
    """Message of the API server in an `ApiException`; HTML pages of other servers are ignored."""
    return _message_in(error.body, error.reason)


def _message_in(body: Any, otherwise: Any) -> str:
    """Message in a response of the API server, or `otherwise`."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, TypeError, KeyError):
        return str(otherwise)
