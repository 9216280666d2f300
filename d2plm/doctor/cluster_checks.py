"""Checks of the cluster, based on the API server's response to the job that training would create.

In a dry run, the server validates, authorises and admits the training job and one of its pods, so
schemas, webhooks, Pod Security, quotas, service accounts and priority classes need no rules here.
One row each tells what a dry run does not reach: the queue, the claims, the image and the GPUs;
kubectl says more about them. All requests use the credentials of the user who runs the doctor;
checks without permission are skipped.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from uuid import uuid4

from d2plm.core.errors import first_line
from d2plm.doctor.verdicts import Check, Verdict, failed, ok, skipped, warning
from d2plm.launch.client import (
    ABSENT,
    JOB_KINDS,
    OBJECTS,
    POD,
    TRAINING_RUNTIME,
    TRAINJOB,
    Cluster,
    JobKind,
    Resource,
    connect,
    server_message,
)
from d2plm.launch.job_spec import Manifest, TrainingJob, pytorchjob
from d2plm.launch.pod_state import container_statuses, waiting

CLAIM = Resource(name="claim", plural="persistentvolumeclaims")
LOCAL_QUEUE = Resource(name="LocalQueue", group="kueue.x-k8s.io", plural="localqueues")
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
# (verb, group, resource) that the launcher needs in addition to the job's own objects.
LAUNCHER_NEEDS = [
    *((verb, "", "pods") for verb in ("get", "list", "watch")),
    ("get", "", "pods/log"),
    ("list", "", "events"),
]
JOB_VERBS = ("create", "get", "list", "watch", "delete", "patch")
POD_LIMIT = 500
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


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
        return answered(self._reach)

    def _reach(self) -> Verdict:
        release = self.cluster.request("/version/")["gitVersion"]
        groups = self.cluster.request("/apis/")["groups"]
        self.groups = {one["name"]: [v["version"] for v in one["versions"]] for one in groups}
        return ok(f"{release} at {self.cluster.api.configuration.host}")

    def checks(self) -> dict[str, Check]:
        """All other checks, after `reach` has succeeded."""
        named: dict[str, Check] = {
            **{kind.name: partial(self.job_accepted, kind) for kind in OBJECTS},
            "pod": self.pod_accepted,
            "permissions": self.permissions,
            "Kueue": self.queue,
            **{f"claim {name}": partial(self.claim, name) for name in self.job.claims},
            "image": self.image,
            "GPUs": self.gpus,
        }
        return {name: partial(answered, check) for name, check in named.items()}

    def job_accepted(self, kind: JobKind) -> Verdict:
        """Whether the server supports this kind of job, and accepts the job in a dry run."""
        version = f"{kind.group}/{kind.version}"
        if kind not in self.kinds_used():
            return skipped(f"launcher.kind={self.kind} does not use it")
        if not self.serves(kind):
            verdict = skipped if any(map(self.serves, self.kinds_used())) else failed
            fix = f"install {kind.controller} (docs/cluster.md) to use it"
            return verdict(f"{version} {kind.plural} is not served", fix)
        for resource, manifest in OBJECTS[kind]:
            rejected = self._rejected(resource, manifest(self.job))
            # The TrainJob's webhook needs the runtime, which the previous dry run has not created.
            if rejected and (resource is not TRAINJOB or "runtime" not in rejected.found.lower()):
                return rejected
        return ok(f"{version} accepts the job in namespace {self.cluster.namespace} (dry run)")

    def kinds_used(self) -> list[JobKind]:
        """The kinds of job that the launcher may create."""
        return [kind for name, kind in JOB_KINDS.items() if self.kind in (name, "auto")]

    def serves(self, kind: JobKind) -> bool:
        """Whether the server supports all resources of a kind."""
        if kind.version not in self.groups.get(kind.group, []):
            return False
        served = self.cluster.request(kind.root)["resources"]
        return {one["name"] for one in served} >= {one.plural for one, _ in OBJECTS[kind]}

    def pod_accepted(self) -> Verdict:
        """Whether the namespace admits a pod of the job, by a dry run."""
        if not self.allowed(("create", "", "pods")):
            return skipped("this account may not create pods", "use one that may, to check quotas")
        admitted = ok(f"namespace {self.cluster.namespace} admits a pod of the job (dry run)")
        return self._rejected(POD, worker_pod(self.job)) or admitted

    def permissions(self) -> Verdict:
        """Whether this account may do everything that the launcher does."""
        served = filter(self.serves, self.kinds_used())
        objects = [resource for kind in served for resource, _ in OBJECTS[kind]]
        of_jobs = [(verb, one.group, one.plural) for one in objects for verb in JOB_VERBS]
        if TRAINING_RUNTIME in objects:  # which owns its TrainJob
            runtimes = f"{TRAINING_RUNTIME.plural}/finalizers"
            of_jobs.append(("update", TRAINING_RUNTIME.group, runtimes))
        asked = [*LAUNCHER_NEEDS, *of_jobs]
        denied = [f"{one[0]} {one[2]}" for one in asked if not self.allowed(one)]
        if not denied:
            return ok(f"all {len(asked)} required by the launcher, in {self.cluster.namespace}")
        return failed(
            f"this account may not, in {self.cluster.namespace}: {', '.join(denied)}",
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

    def queue(self) -> Verdict:
        """Whether the local queue of the job exists in Kueue and is active."""
        queue, versions = self.job.queue, self.groups.get(LOCAL_QUEUE.group)
        if queue is None:
            return skipped("launcher.queue=null does not use it")
        path = versions and self.cluster.path(replace(LOCAL_QUEUE, version=versions[0]), queue)
        found = self.cluster.request(path, answers=[ABSENT]) if path else None
        if found is None:
            return failed(f"no LocalQueue {queue}", "install Kueue, or correct launcher.queue")
        conditions = found.get("status", {}).get("conditions", [])
        if any(one["type"] == "Active" and one["status"] != "True" for one in conditions):
            return failed(f"LocalQueue {queue} is not active", "kubectl describe localqueue")
        return ok(f"LocalQueue {queue}")

    def claim(self, name: str) -> Verdict:
        """Whether a volume claim exists, is bound, and all nodes can mount it."""
        claim = self.cluster.request(self.cluster.path(CLAIM, name), answers=[ABSENT])
        if claim is None:
            return failed(
                f"{self.cluster.namespace} has no PersistentVolumeClaim {name}",
                "kubectl apply -k k8s/overlays/…, or set launcher.claims to an existing claim",
            )
        phase, modes = claim["status"]["phase"], claim["spec"]["accessModes"]
        found = f"{phase}, {', '.join(modes)}"
        if phase == "Bound" and "ReadWriteMany" in modes:
            return ok(found)
        return warning(
            f"{found}: ReadWriteOnce needs one node for all pods; Pending may wait for a pod",
            f"launcher.same_node=true, or kubectl describe pvc -n {self.cluster.namespace} {name}",
        )

    def image(self) -> Verdict:
        """Whether the newest pod with the job's image has pulled it: only nodes can tell."""
        image, namespace = self.job.image, self.cluster.namespace
        pods = self.cluster.request(self.cluster.path(POD), query={"limit": POD_LIMIT})["items"]
        for pod in sorted(pods, key=lambda p: p["metadata"]["creationTimestamp"], reverse=True):
            names = {one["name"] for one in pod["spec"]["containers"] if one["image"] == image}
            for status in (one for one in container_statuses(pod) if one["name"] in names):
                found = f"{image} in {pod['metadata']['name']}"
                if status.get("imageID"):
                    return ok(f"{found}: pulled")
                if (reason := waiting(status))[0] in PULL_FAILURES:
                    fix = "push it, correct launcher.image, or add imagePullSecrets to the account"
                    return failed(f"{found}: {' '.join(reason)}", fix)
        run = f"kubectl run -n {namespace} d2plm-version --image={image} --rm -it --restart=Never"
        return skipped(f"no pod in {namespace} has used {image}", f"{run} -- d2plm --version")

    def gpus(self) -> Verdict:
        """Whether enough nodes have the devices that a job requests, in use or not."""
        job, nodes = self.job, self.cluster.request("/api/v1/nodes")["items"]
        counts = {
            node["metadata"]["name"]: int(node["status"]["allocatable"].get(job.gpu_resource, 0))
            for node in nodes
        }
        listed = ", ".join(f"{number} on {name}" for name, number in counts.items() if number)
        found = f"{job.gpu_resource}: {listed or 'none'}; {job.nodes} nodes × {job.gpus} requested"
        hosts, each = (1, job.nodes * job.gpus) if job.same_node else (job.nodes, job.gpus)
        if not each or sum(number >= each for number in counts.values()) >= hosts:
            return ok(found)
        # Not a failure, because an autoscaler may add nodes when a pod requests them.
        return warning(
            f"{found}: the job would wait unless an autoscaler adds nodes",
            "install the device plugin, or request fewer GPUs (launcher.nodes, launcher.gpus)",
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
            "log in again, and check whether kubectl reports the same error",
        )
    except HTTPError as error:
        return failed(
            f"the API server does not answer ({first_line(error)})",
            "start the cluster, choose its context (kubectl config use-context), or wait longer "
            "(timeout_seconds=30); cluster=false skips these checks",
        )


def worker_pod(job: TrainingJob) -> Manifest:
    """One of a training job's pods, as a standalone pod."""
    template = pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job.name}-{uuid4().hex[:8]}", **template["metadata"]},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }
