"""The double for tests: a cluster in a `with` block, and faults that tests can inject."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.cluster import kueue, schema, trainjob
from tests.cluster.api import ApiServer, Fault
from tests.cluster.controllers import Controllers
from tests.cluster.kubelet import Kubelet, Script, set_condition
from tests.cluster.store import NAMESPACE, RESOURCES, Object, Refusal, Store, delete_pod

# The Role `d2plm-launcher`: what the pipeline's steps may do.
_OBJECTS = ("jobs", "pytorchjobs", "trainjobs", "trainingruntimes")
_ON_OBJECTS = ("create", "get", "list", "watch", "delete", "patch")
LAUNCHER_ROLE = frozenset(
    {(plural, verb) for plural in _OBJECTS for verb in _ON_OBJECTS}
    | {("pods", verb) for verb in ("get", "list", "watch")}
    | {("pods/log", "get"), ("events", "list"), ("trainingruntimes/finalizers", "update")}
    | {("workloads", "list"), ("workflows", "get")}
)
QUOTA = "exceeded quota: team, requested: pods=1, used: pods=0, limited: pods=0"
NO_IMAGE = "Back-off pulling image: rpc error: code = NotFound desc = failed to resolve reference"
JOBS = ("pytorchjobs", "trainjobs", "jobs")


class Cluster:
    """A Kubernetes cluster of one test; see the package's docstring.

    `mounts` are paths in containers → folders of this machine, `role` the (resource, verb) pairs
    that the client may; None: everything.
    """

    def __init__(
        self,
        folder: Path,
        mounts: Mapping[str, Path] | None = None,
        role: frozenset[tuple[str, str]] | None = LAUNCHER_ROLE,
    ) -> None:
        self.folder = folder
        self.store = Store()
        self.kubelet = Kubelet(self.store, folder / "pods", mounts or {})
        self.controllers = Controllers(self.store)
        self.api = ApiServer(self.store, self.kubelet, self._admit)
        self.api.allowed = role
        self.kube_config = folder / "kube-config"

    def __enter__(self) -> "Cluster":
        self.api.start()
        self.kubelet.start()
        self.controllers.start()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_kube_config(self.kube_config, f"http://127.0.0.1:{self.api.port}")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.controllers.stop()
        self.kubelet.stop()
        self.api.stop()
        own = self.controllers.errors + self.kubelet.errors
        if own and error is None:
            raise own[0]

    def count(self, verb: str, resource: str) -> int:
        """How many requests there were, such as ("create", "pytorchjobs")."""
        return sum((r.verb, r.resource) == (verb, resource) for r in self.api.requests)

    def job(self, name: str, plural: str = "pytorchjobs") -> Object | None:
        """A job as it is now; None: there is none."""
        try:
            return self.store.get(plural, NAMESPACE, name)
        except Refusal:
            return None

    def pods(self, job: str | None = None) -> list[Object]:
        """A job's pods, or all, by their workers' numbers."""
        pods = self.store.list("pods")
        mine = [pod for pod in pods if job is None or pod["metadata"]["name"].startswith(f"{job}-")]
        return sorted(mine, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, name: str) -> Object:
        """The pod of a name, or whose name begins with it, as TrainJobs' names have random ends."""
        found = [pod for pod in self.pods() if pod["metadata"]["name"].startswith(name)]
        if not found:
            raise LookupError(f"no pod {name}; there are {[_name(pod) for pod in self.pods()]}")
        return found[0]

    def log(self, pod: str) -> str:
        known = self.pod(pod)
        name = known["spec"]["containers"][0]["name"]
        log = self.kubelet.log_of(known["metadata"]["uid"], name)
        return "" if log is None else log.text()

    def wait_for(self, condition: Callable[[], Any], seconds: float = 90) -> Any:
        """What `condition` gives, once it is true; it may raise LookupError until then."""
        end = time.monotonic() + seconds
        while True:
            try:
                if found := condition():
                    return found
            except LookupError:
                pass
            if time.monotonic() > end:
                raise AssertionError(f"waited {seconds} s in vain\n{self.describe()}")
            with self.store.changed:
                self.store.changed.wait(0.02)

    def describe(self) -> str:
        """States of jobs and pods, the ends of logs, and events, for a test that fails."""
        known = [one for plural in (*JOBS, "pods") for one in self.store.list(plural)]
        lines = [f"{one['kind']} {_name(one)}: {one.get('status')}" for one in known]
        lines += [self.log(_name(pod))[-2000:] for pod in self.pods()]
        return "\n".join([*lines, *(one["message"] for one in self.store.list("events"))])

    def script(self, *scripts: Script, worker: int | None = None) -> None:
        """Let a worker's pods to come run these scripts in turn, in place of their command.

        The last one stays; without a number, the first is that of all workers without their own.
        """
        self.kubelet.scripts[worker] = list(scripts)

    def full(self) -> None:
        self.kubelet.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."

    def without_image(self) -> None:
        self.kubelet.no_image = NO_IMAGE

    def over_quota(self) -> None:
        """Controllers may create no pods."""
        self._have(quota=QUOTA)

    def kueue(self, **queues: str) -> None:
        """Install Kueue with these queues, and why each admits no job; an empty text: it does."""
        self._have(queues=queues)

    def _have(self, **changes: Any) -> None:
        with self.store.changed:
            vars(self.store).update(changes)
            self.store.version += 1  # controllers look again
            self.store.changed.notify_all()

    def oom_kill(self, pod: str) -> None:
        """Kill a pod for its memory: exit code 137, reason OOMKilled."""
        self.kubelet.runner(self.pod(pod)).kill(137, "OOMKilled")

    def evict(self, pod: str, reason: str, message: str) -> None:
        """End a pod as a node under pressure or its shutdown does: Failed, without statuses."""
        words = {"reason": reason, "message": message, "containerStatuses": []}
        self.kubelet.runner(self.pod(pod)).kill(137, "Error", words)

    def lose_node(self, pod: str, answers: bool = True) -> None:
        """Cut a pod off with its node; its log is answered with an error, or not at all."""
        known = self.pod(pod)
        self.kubelet.lost[known["metadata"]["uid"]] = answers
        with self.store.edit("pods", NAMESPACE, _name(known)) as edited:
            set_condition(edited, "Ready", "False")
        self.store.warn(known, "NodeNotReady", "Node is not ready")
        self.kubelet.runner(known).kill(137, "Error")

    def preempt(self, pod: str) -> None:
        """Delete a pod as the scheduler does for one of higher priority: SIGTERM, then SIGKILL."""
        known = self.pod(pod)
        message = "preempting to accommodate a higher priority pod"
        with self.store.edit("pods", NAMESPACE, _name(known)) as edited:
            set_condition(edited, "DisruptionTarget", "True", "PreemptionByScheduler", message)
        delete_pod(self.store, known)

    def delete_pod(self, pod: str, grace_seconds: int | None = None) -> None:
        delete_pod(self.store, self.pod(pod), grace_seconds)

    def delete(self, plural: str, name: str, policy: str = "Background") -> None:
        self.store.delete(plural, NAMESPACE, name, policy)

    def forbid(self, verb: str, resource: str) -> None:
        """Take a permission away: 403, such as for ("create", "pytorchjobs")."""
        self.api.forbidden.add((resource, verb))

    def fail_next(
        self, times: int, status: int = 500, verb: str | None = None, resource: str | None = None
    ) -> None:
        refusal = Refusal(status, "", "etcdserver: a fault of a test")
        self.api.faults.append(Fault(times, refusal, verb, resource))

    def cut_streams(self) -> None:
        """Hang up on all who watch, or follow a log."""
        self.api.cuts += 1

    def expire_watches(self) -> None:
        """Forget all changes so far: a watch from an older resource version ends with 410 Gone."""
        self._have(oldest=self.store.version + 1)

    def restart_api(self, seconds: float) -> None:
        """Stop the API server for so long."""
        self.api.stop()
        time.sleep(seconds)
        self.api.start()

    def _admit(self, plural: str, content: Object, is_new: bool) -> None:
        resource = RESOURCES[plural]
        is_queued = kueue.QUEUE in content["metadata"].get("labels", {})
        if is_new and is_queued and self.store.queues is not None and plural in JOBS:
            kueue.set_suspended(content, True)
        if found := schema.errors(resource, content):
            name = content["metadata"].get("name")
            what = f'{resource.kind}.{resource.group} "{name}" is invalid: {"; ".join(found)}'
            raise Refusal(422, "Invalid", what)
        if plural == "pods" and self.store.quota is not None:
            raise Refusal(403, "Forbidden", f"pods is forbidden: {self.store.quota}")
        if plural == "trainjobs":
            trainjob.admit(self.store, content)


def _name(content: Object) -> str:
    return str(content["metadata"]["name"])


def write_kube_config(file: Path, address: str) -> Path:
    """What kubectl would have to reach `address`."""
    context = {"cluster": "double", "user": "launcher", "namespace": NAMESPACE}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "double",
        "clusters": [{"name": "double", "cluster": {"server": address}}],
        "contexts": [{"name": "double", "context": context}],
        "users": [{"name": "launcher", "user": {"token": "not-a-secret"}}],
    }
    file.write_text(json.dumps(config))  # JSON is YAML
    return file
