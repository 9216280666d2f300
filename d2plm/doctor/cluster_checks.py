"""Checks of the cluster, based on the API server's response to the job that training would create.

In a dry run, the server validates, authorises and admits the job and one of its pods, so schemas,
webhooks, Pod Security, quotas, service accounts and priority classes need no rules here. Other
checks cover what a dry run does not; kubectl says more about the queue, claims, image and GPUs.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from d2plm.core.errors import ClusterError
from d2plm.doctor.verdicts import Check, Verdict, failed, ok, skipped, warning
from d2plm.launch import client
from d2plm.launch.job_spec import TrainingJob, worker_pod
from d2plm.launch.pod_state import container_statuses, waiting

CLAIM = client.Resource(name="claim", plural="persistentvolumeclaims")
LOCAL_QUEUE = client.Resource(name="LocalQueue", group=client.KUEUE, plural="localqueues")
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
JOB_VERBS = ("create", "get", "list", "watch", "delete", "patch")
POD_ACTIONS = [  # verb, group, resource
    *((verb, "", "pods") for verb in ("get", "list", "watch")),
    *(("get", "", "pods/log"), ("list", "", "events")),
]
PULL_FAILURES = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}


@dataclass
class ClusterChecks:
    """A cluster, and the job that training would create in it with `launcher.kind=kind`."""

    kind: str
    job: TrainingJob
    timeout_seconds: float

    @cached_property
    def cluster(self) -> client.Cluster:
        """The cluster; requests are not retried."""
        return client.connect(self.job.namespace, timeout_seconds=self.timeout_seconds)

    @cached_property
    def used(self) -> client.JobKind:
        """The kind of job that the launcher would create."""
        return client.JOB_KINDS.get(self.kind) or client.first_known_kind(self.cluster)

    def reach(self) -> Verdict:
        """Whether the API server answers and accepts the credentials."""
        self._read("/apis/")  # unlike the version, only for accounts that it knows
        release, host = self._read("/version/"), self.cluster.api.configuration.host
        return ok(f"{release['gitVersion']} at {host}")

    def checks(self) -> dict[str, Check]:
        """All other checks, after `reach` has succeeded."""
        claims = {f"claim {name}": partial(self.claim, name) for name in self.job.claims}
        rows: dict[str, Check] = {"permissions": self.permissions, "Kueue": self.queue, **claims}
        rows |= {"image": self.image, "GPUs": self.gpus}
        return {
            "job": self.job_accepted,
            "pod": self.pod_accepted,
            **{name: partial(permitted, check) for name, check in rows.items()},
        }

    def job_accepted(self) -> Verdict:
        """Whether the server accepts the job in a dry run."""
        for resource, manifest in client.OBJECTS[self.used]:
            try:
                self.cluster.create(resource, manifest(self.job), dry_run=True)
            except ClusterError as error:
                # Trainer's webhook needs the runtime, which the dry run before has not created.
                if resource is not client.TRAINJOB or "runtime" not in str(error).lower():
                    raise
        return ok(f"{self.cluster.namespace} accepts the {self.used.name} (dry run)")

    def pod_accepted(self) -> Verdict:
        """Whether the namespace admits a pod of the job in a dry run."""
        if not self._allowed("create", "", "pods"):
            return skipped("this account may not create pods", "use one that may, to check quotas")
        self.cluster.create(client.POD, worker_pod(self.job), dry_run=True)
        return ok(f"{self.cluster.namespace} admits a pod of the job (dry run)")

    def permissions(self) -> Verdict:
        """Whether this account may do everything that the launcher does."""
        objects = [resource for resource, _ in client.OBJECTS[self.used]]
        asked = [*POD_ACTIONS, *((v, one.group, one.plural) for one in objects for v in JOB_VERBS)]
        if (runtime := client.TRAINING_RUNTIME) in objects:  # which owns its TrainJob
            asked.append(("update", runtime.group, f"{runtime.plural}/finalizers"))
        if self.job.queue is not None:
            asked.append(("list", client.KUEUE, client.WORKLOAD.plural))
        denied = ", ".join(f"{one[0]} {one[2]}" for one in asked if not self._allowed(*one))
        if denied:
            fix = "bind it to the Role d2plm-launcher (k8s/base)"
            return failed(f"this account may not, in {self.cluster.namespace}: {denied}", fix)
        # An administrator's reviews are positive even in a namespace that does not exist.
        namespace, may_look = self.cluster.namespace, self._allowed("get", "", "namespaces")
        if may_look and self._read(f"/api/v1/namespaces/{namespace}") is None:
            fix = f"correct launcher.namespace, or run kubectl create namespace {namespace}"
            return failed(f"the cluster has no namespace {namespace}", fix)
        return ok(f"all {len(asked)} required by the launcher, in {self.cluster.namespace}")

    def queue(self) -> Verdict:
        """Whether the local queue of the job exists in Kueue."""
        queue = self.job.queue
        if queue is None:
            return skipped("launcher.queue=null does not use it")
        kind = self.cluster.served(LOCAL_QUEUE)
        if kind is None or self.cluster.read(kind, queue) is None:
            return failed(f"no LocalQueue {queue}", "install Kueue, or correct launcher.queue")
        return ok(f"LocalQueue {queue}; kubectl describe localqueue shows its state")

    def claim(self, name: str) -> Verdict:
        """Whether a volume claim exists, is bound, and all pods of the job can mount it."""
        claim = self.cluster.read(CLAIM, name)
        if claim is None:
            fix = "kubectl apply -k k8s/overlays/…, or set launcher.claims to an existing claim"
            return failed(f"{self.cluster.namespace} has no PersistentVolumeClaim {name}", fix)
        # A bound claim has the modes of its volume, which may be more than it requests.
        phase, modes = claim["status"]["phase"], claim["spec"]["accessModes"]
        modes = claim["status"].get("accessModes", modes)
        found = f"{phase}, {', '.join(modes)}"
        if phase == "Bound" and ("ReadWriteMany" in modes or self.job.same_node):
            return ok(found)
        described = f"kubectl describe pvc -n {self.cluster.namespace} {name}"
        return warning(found, f"{described}; for pods on one node: launcher.same_node=true")

    def image(self) -> Verdict:
        """Whether a pod waits for the job's image: only nodes can tell whether they can pull it."""
        image, pods = self.job.image, self._read(self.cluster.path(client.POD))["items"]
        used = [p for p in pods if image in {one["image"] for one in p["spec"]["containers"]}]
        for pod in used:
            for reason in map(waiting, container_statuses(pod)):
                if reason[0] in PULL_FAILURES:
                    fix = "push it, correct launcher.image, or add imagePullSecrets to the account"
                    return failed(f"{image} in {pod['metadata']['name']}: {': '.join(reason)}", fix)
        if not used:
            run = f"kubectl run -n {self.cluster.namespace} d2plm-version --image={image} --rm -it"
            return skipped(f"no pod has used {image}", f"{run} --restart=Never -- d2plm --version")
        return ok(f"{image}: in {len(used)} pods, none of which waits for it")

    def gpus(self) -> Verdict:
        """Whether enough nodes have the devices that a job requests, in use or not."""
        job, nodes = self.job, self._read("/api/v1/nodes")["items"]
        counts = [int(node["status"]["allocatable"].get(job.gpu_resource, 0)) for node in nodes]
        hosts, each = (1, job.nodes * job.gpus) if job.same_node else (job.nodes, job.gpus)
        found = f"{sum(counts)} {job.gpu_resource}; {job.nodes} nodes × {job.gpus} requested"
        if not each or sum(number >= each for number in counts) >= hosts:
            return ok(found)
        # Not a failure, because an autoscaler may add nodes when a pod requests them.
        return warning(found, "install the device plugin, or lower launcher.nodes, launcher.gpus")

    def _read(self, path: str) -> Any:
        return self.cluster.call("GET", path, f"read {path}", answers=[client.ABSENT])

    def _allowed(self, verb: str, group: str, plural: str) -> bool:
        resource, _, subresource = plural.partition("/")
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": self.cluster.namespace, **asked}},
        }
        answer = self.cluster.call("POST", REVIEWS, f"ask for {verb} {plural}", body=body)
        return bool(answer["status"]["allowed"])


def permitted(check: Check) -> Verdict:
    """Run a check; skips it if a request is forbidden."""
    try:
        return check()
    except ClusterError as error:
        if getattr(error.__cause__, "status", None) != 403:
            raise
        return skipped(str(error))
