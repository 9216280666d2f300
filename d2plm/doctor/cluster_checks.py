"""Checks of the cluster, based on the API server's response to the job that training would create.

In a dry run, the server validates, authorises and admits the training job and one of its pods, so
schemas, webhooks, Pod Security, quotas, service accounts and priority classes need no rules here.
The other checks cover what the server does not check: whether controllers run, the queue exists,
volumes can be shared and nodes have the devices. All requests use the credentials of the user who
runs the doctor; checks without permission are skipped.
"""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from d2plm.core.errors import first_line
from d2plm.doctor.image_checks import image_pulled, image_seen, worker_pod
from d2plm.doctor.verdicts import Check, Verdict, Verdicts, failed, ok, skipped, warning
from d2plm.launch.client import (
    ABSENT,
    EVENT,
    JOB_KINDS,
    OBJECTS,
    POD,
    PYTORCHJOB,
    TRAINING_RUNTIME,
    TRAINJOB,
    Cluster,
    JobKind,
    Resource,
    connect,
    server_message,
)
from d2plm.launch.job_spec import Manifest, TrainingJob

CLAIM = Resource(name="claim", plural="persistentvolumeclaims")
LOCAL_QUEUE = Resource(name="LocalQueue", group="kueue.x-k8s.io", plural="localqueues")
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
OPERATORS = {
    PYTORCHJOB: ("training-operator",),
    TRAINJOB: ("kubeflow-trainer-controller-manager", "jobset-controller-manager"),
}
# (verb, group, resource) that the launcher needs in addition to the job's own objects.
LAUNCHER_NEEDS = [
    *((verb, "", "pods") for verb in ("get", "list", "watch")),
    ("get", "", "pods/log"),
    ("list", "", "events"),
]
JOB_VERBS = ("create", "get", "list", "watch", "delete", "patch")
REVIEWS_AT_ONCE = 4


@dataclass
class ClusterChecks:
    """A cluster, and the job that training would create in it.

    Args:
        timeout_seconds: timeout for connecting and between two parts of a response.

    Attributes:
        groups: API group → versions that the server supports; empty until `reach` succeeds.
    """

    kind: str
    job: TrainingJob
    timeout_seconds: float
    groups: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster; requests are not retried."""
        return connect(self.job.namespace, timeout_seconds=self.timeout_seconds)

    def reach(self) -> Verdict:
        """Whether the API server answers and accepts the credentials."""
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        host = self.cluster.api.configuration.host
        try:
            release = self.cluster.request("/version/")["gitVersion"]
            groups = self.cluster.request("/apis/")["groups"]
        except ApiException as error:
            return failed(
                f"{host} answers {error.status}: {server_message(error)}",
                "log in again and check that `kubectl get pods` works",
            )
        except HTTPError as error:
            return failed(
                f"{host} does not answer ({first_line(error)})",
                "start the cluster, or choose its context (kubectl config use-context); "
                "cluster=false skips these checks",
            )
        self.groups = {one["name"]: [v["version"] for v in one["versions"]] for one in groups}
        return ok(f"{release} at {host}")

    def checks(self, pull: bool) -> dict[str, Check]:
        """All other checks, after `reach` has succeeded; `pull` starts a pod with the image."""
        image = image_pulled if pull else image_seen
        named: dict[str, Check] = {
            **{kind.name: partial(self.job_accepted, kind) for kind in OBJECTS},
            "pod": self.pod_accepted,
            "permissions": self.permissions,
            "operators": self.operators,
            "Kueue": self.queue,
            **{f"claim {name}": partial(self.claim, name) for name in self.job.claims},
            "image": lambda: image(self.cluster, self.job),
            "GPUs": self.gpus,
        }
        return {name: partial(answered, check) for name, check in named.items()}

    def unreached(self) -> Verdicts:
        """Verdicts of all other checks if `reach` has failed."""
        return dict.fromkeys(self.checks(pull=False), skipped("the API server was not reached"))

    def job_accepted(self, kind: JobKind) -> Verdict:
        """Whether the server supports this kind of job, and accepts the job in a dry run."""
        version = f"{kind.group}/{kind.version}"
        if not self.serves(kind):
            others = ", ".join(self.groups.get(kind.group, [])) or "none"
            found = f"{version} {kind.plural} is not served (versions of {kind.group}: {others})"
            fix = f"install {kind.controller} (docs/cluster.md)"
            if JOB_KINDS.get(self.kind) == kind:
                return failed(found, f"{fix}, or choose another launcher")
            if self.kind == "auto" and kind == PYTORCHJOB and not self.kinds_served():
                return failed(f"{found}, nor is a TrainJob: pipelines cannot train", fix)
            return skipped(found, f"{fix} to use it")
        if kind not in self.kinds_served():
            return ok(f"{version} is served; launcher.kind={self.kind} does not use it")
        for resource, manifest in OBJECTS[kind]:
            rejected = self._rejected(resource, manifest(self.job))
            # The TrainJob's webhook needs the runtime, which the previous dry run has not created.
            if rejected and (resource is not TRAINJOB or "runtime" not in rejected.found.lower()):
                return rejected
        return ok(f"{version} accepts the job in namespace {self.cluster.namespace} (dry run)")

    def serves(self, kind: JobKind) -> bool:
        """Whether the server supports all resources of a kind."""
        if kind.version not in self.groups.get(kind.group, []):
            return False
        served = self.cluster.request(kind.root)["resources"]
        return {one["name"] for one in served} >= {one.plural for one, _ in OBJECTS[kind]}

    def kinds_served(self) -> list[JobKind]:
        """The kinds that the launcher may use and the cluster supports."""
        wanted = [kind for key, kind in JOB_KINDS.items() if self.kind in (key, "auto")]
        return [kind for kind in wanted if self.serves(kind)]

    def pod_accepted(self) -> Verdict:
        """Whether the namespace admits a pod of the job, by a dry run."""
        if not self.allowed(("create", "", "pods")):
            return skipped(
                "this account may not create pods, so Pod Security and quotas were not checked",
                "run d2plm doctor with an account that may create pods",
            )
        admitted = ok(f"namespace {self.cluster.namespace} admits a pod of the job (dry run)")
        return self._rejected(POD, worker_pod(self.job)) or admitted

    def permissions(self) -> Verdict:
        """Whether this account may do everything that the launcher does."""
        objects = [resource for kind in self.kinds_served() for resource, _ in OBJECTS[kind]]
        of_jobs = [(verb, one.group, one.plural) for one in objects for verb in JOB_VERBS]
        if TRAINING_RUNTIME in objects:  # which owns its TrainJob
            runtimes = f"{TRAINING_RUNTIME.plural}/finalizers"
            of_jobs.append(("update", TRAINING_RUNTIME.group, runtimes))
        asked = [*LAUNCHER_NEEDS, *of_jobs]
        with ThreadPoolExecutor(REVIEWS_AT_ONCE) as pool:
            answers = list(pool.map(self.allowed, asked))
        denied: defaultdict[str, list[str]] = defaultdict(list)
        for (verb, _, resource), allowed in zip(asked, answers, strict=True):
            if not allowed:
                denied[resource].append(verb)
        if not denied:
            return ok(f"all {len(asked)} required by the launcher, in {self.cluster.namespace}")
        listed = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in denied.items())
        return failed(
            f"this account may not, in {self.cluster.namespace}: {listed}",
            "bind it to the Role d2plm-launcher (k8s/base), or run as the service account",
        )

    def allowed(self, asked: tuple[str, str, str]) -> bool:
        """Whether this account may do a (verb, group, resource) in the namespace."""
        verb, group, resource = asked
        resource, _, subresource = resource.partition("/")
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        place = {"namespace": self.cluster.namespace, "resource": resource}
        attributes = {"verb": verb, "group": group, **place, "subresource": subresource}
        review = {**kind, "spec": {"resourceAttributes": attributes}}
        answer = self.cluster.request(REVIEWS, "POST", body=review)
        return bool(answer["status"]["allowed"])

    def operators(self) -> Verdict:
        """Whether the controllers that create pods for jobs are running."""
        names = [name for kind in self.kinds_served() for name in OPERATORS[kind]]
        if not names:
            return skipped("the cluster supports no kind of training job")
        found: dict[str, str] = {}  # name → namespace
        for name in names:
            query = {"fieldSelector": f"metadata.name={name}"}
            for one in self.cluster.request("/apis/apps/v1/deployments", query=query)["items"]:
                found[name] = namespace = one["metadata"]["namespace"]
                if not one["status"].get("availableReplicas"):
                    return failed(
                        f"{name} in {namespace} has no running pod, so jobs get no pods",
                        f"kubectl describe deployment -n {namespace} {name}",
                    )
        absent = {*names} - {*found}
        if absent:
            return warning(
                f"no deployment is named {' or '.join(sorted(absent))}",
                "if jobs get no pods, install it (docs/cluster.md)",
            )
        return ok(", ".join(f"{name} in {namespace}" for name, namespace in found.items()))

    def queue(self) -> Verdict:
        """Whether the local queue of the job exists in Kueue and is active."""
        queue, versions = self.job.queue, self.groups.get(LOCAL_QUEUE.group, [])
        if queue is None:
            installed = "is installed" if versions else "is not installed"
            return skipped(f"Kueue {installed}; launcher.queue=null does not use it")
        if not versions:
            return failed(f"launcher.queue={queue}, but Kueue is not installed", "install Kueue")
        kind = replace(LOCAL_QUEUE, version=versions[0])
        found = self.cluster.request(self.cluster.path(kind, queue), answers=[ABSENT])
        if found is None:
            return failed(
                f"{self.cluster.namespace} has no LocalQueue {queue}",
                f"correct launcher.queue: kubectl get localqueues -n {self.cluster.namespace}",
            )
        for condition in found.get("status", {}).get("conditions", []):
            if condition["type"] == "Active" and condition["status"] != "True":
                return failed(
                    f"LocalQueue {queue} is not active: {condition.get('message')}",
                    f"kubectl describe localqueue -n {self.cluster.namespace} {queue}",
                )
        return ok(f"{LOCAL_QUEUE.group}/{versions[0]}, LocalQueue {queue}")

    def claim(self, name: str) -> Verdict:
        """Whether a volume exists and can be used by all pods at the same time.

        There are at least two pods, because the pipeline step that follows a job also mounts it.
        """
        claim = self.cluster.request(self.cluster.path(CLAIM, name), answers=[ABSENT])
        if claim is None:
            return failed(
                f"{self.cluster.namespace} has no PersistentVolumeClaim {name}",
                "kubectl apply -k k8s/overlays/…, or set launcher.claims to an existing claim",
            )
        spec, status = claim["spec"], claim["status"]
        modes, storage = spec["accessModes"], spec.get("storageClassName") or "none"
        found = f"{status['phase']}, {', '.join(modes)}, storage class {storage}"
        if status["phase"] != "Bound":
            return self._unbound(name, found)
        found = f"{status.get('capacity', {}).get('storage', 'unknown size')} {found}"
        shared = "a storage class with ReadWriteMany (NFS, CephFS, EFS, Filestore)"
        if "ReadWriteMany" in modes:
            return ok(found)
        if "ReadWriteOnce" not in modes:
            return failed(f"{found}: several pods cannot write to it", f"use {shared}")
        if self.job.nodes > 1 and not self.job.same_node:
            return failed(
                f"{found}: launcher.nodes={self.job.nodes} cannot all mount it",
                f"use {shared}, or set launcher.same_node=true",
            )
        return warning(
            f"{found}: all pods that use it at the same time must be on one node",
            f"select one node (launcher.node_selector), or use {shared}",
        )

    def _unbound(self, name: str, found: str) -> Verdict:
        """Verdict on a claim without a volume, according to its latest event."""
        selector = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={name}"
        path, query = self.cluster.path(EVENT), {"fieldSelector": selector}
        last: Manifest = next(reversed(self.cluster.request(path, query=query)["items"]), {})
        reason, message = last.get("reason"), last.get("message")
        if reason == "WaitForFirstConsumer":
            return ok(f"{found}: the first pod that uses it binds it")
        return failed(
            f"{found}: {message or 'no volume'}",
            f"kubectl describe pvc -n {self.cluster.namespace} {name}; "
            "its storage class must exist (kubectl get storageclass) and offer its access mode",
        )

    def gpus(self) -> Verdict:
        """Whether enough nodes have the devices that a job requests, in use or not."""
        job = self.job
        selector = ",".join(f"{key}={value}" for key, value in job.node_selector.items())
        query = {"labelSelector": selector} if selector else None
        nodes = self.cluster.request("/api/v1/nodes", query=query)["items"]
        together = job.gpus * (job.nodes if job.same_node else 1)  # on one machine
        able, counts = 0, []
        for node in nodes:
            number = int(node["status"].get("allocatable", {}).get(job.gpu_resource, 0))
            if number:
                closed = _closed(node, job)
                counts.append(f"{number} on {node['metadata']['name']}{closed and f' ({closed})'}")
                able += number >= together and not closed
        where = f" with {selector}" if selector else ""
        none = f"none on {len(nodes)} nodes"
        found = f"{job.gpu_resource}{where}: {', '.join(counts) or none}"
        if not job.gpus:
            return ok(f"{found}; launcher.gpus=0 requests none")
        found += f"; launcher.nodes={job.nodes} × launcher.gpus={job.gpus}"
        if able >= (1 if job.same_node else job.nodes):
            return ok(found)
        # Not a failure, because an autoscaler may add nodes when a pod requests them.
        return warning(
            f"{found}: too few nodes, the job would wait",
            "install the device plugin, set launcher.node_selector and launcher.tolerations, or "
            "request fewer GPUs, unless an autoscaler adds nodes",
        )

    def _rejected(self, resource: Resource, manifest: Manifest) -> Verdict | None:
        """Verdict on an object that the server rejects in a dry run; None if it is accepted."""
        from kubernetes.client import ApiException

        path, query = self.cluster.path(resource), {"dryRun": "All"}
        try:
            self.cluster.request(path, "POST", query, manifest)
        except ApiException as error:
            fixes = {
                403: "correct the setting or raise the quota in the message, or bind this account "
                "to the Role d2plm-launcher (k8s/base)",
                404: "set launcher.namespace, or create the namespace: kubectl apply -k "
                "k8s/overlays/…",
            }
            said = f"{server_message(error)} ({error.status})"
            return failed(
                f"the API server rejects the {resource.name}: {said}",
                fixes.get(error.status, "correct the launcher setting in the message"),
            )
        return None


def answered(check: Check) -> Verdict:
    """Run a check; skips it if a request is forbidden."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        return check()
    except ApiException as error:
        if error.status == 403:
            return skipped(f"no permission: {server_message(error)}", "ask a cluster administrator")
        return failed(
            f"the API server answers {error.status}: {server_message(error)}",
            "check whether kubectl reports the same error",
        )
    except HTTPError as error:
        return failed(
            f"the API server does not answer ({first_line(error)})",
            "run the doctor again, with timeout_seconds=30 to wait longer",
        )


def _closed(node: Manifest, job: TrainingJob) -> str:
    """Reason why a job's pods cannot run on a node; empty if they can."""
    conditions = node["status"].get("conditions", ())
    if {one["type"]: one["status"] for one in conditions}.get("Ready") != "True":
        return "not ready"
    if node["spec"].get("unschedulable"):
        return "cordoned"
    tolerated = {toleration.get("key") for toleration in job.tolerations}
    for taint in node["spec"].get("taints", ()):
        if taint["effect"] != "PreferNoSchedule" and not {taint["key"], None} & tolerated:
            return f"taint {taint['key']}={taint.get('value', '')}:{taint['effect']}"
    return ""
