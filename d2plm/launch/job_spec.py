"""A job on Kubernetes: one specification for two kinds of training jobs, and for work in shards.

`pytorchjob` creates a PyTorchJob (kubeflow.org/v1, the training operator), `trainjob` a TrainJob
with its `training_runtime` (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer), both for the files in
`k8s/` and for the jobs of the pipeline. A PyTorchJob is elastic: it continues with the remaining
nodes, down to `min_nodes`. A TrainJob restarts as a whole. The pods of an `indexed_job` (batch/v1)
know nothing of each other: each computes a shard, and is retried alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from d2plm import __version__
from d2plm.core.errors import ClusterError, ConfigError, from_extra, require, require_number
from d2plm.core.processes import ALLOCATOR
from d2plm.core.shards import format_indices
from d2plm.launch.elastic import GRACE_SECONDS

Manifest = dict[str, Any]

PYTORCHJOB_CONTAINER = "pytorch"  # the operator requires this name
TRAINJOB_CONTAINER = "node"
SHARD_CONTAINER = "shard"
PREPARATION_CONTAINER = "prepare"
SHARDS = "d2plm/shards"  # annotation: shards of the job's indices, and number of all shards
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
USER = 10001
IMAGE = f"d2plm-trainer:{__version__}"
COMMAND = ("python", "-m", "d2plm.launch.elastic")
# When a node is lost, all pods end and are restarted. If torchrun restarted the workers in the
# remaining pods, they would join a rendezvous that still includes the lost node.
RESTARTS_IN_A_POD = 0
JOIN_SECONDS = 1800  # until all nodes have pulled the image
CONNECT_SECONDS = 300  # until node 0 answers; then the pod ends and is restarted
# Exit codes of wrong settings and of bugs; jobs with other exit codes are retried.
PERMANENT_EXIT_CODES = (1, 2)
MOST_SHARD_RESTARTS = 5  # after crashes; a shard that runs out of memory will do so again
SHUTDOWN_MARGIN_SECONDS = 60
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class TrainingJob:
    """Specification of a training job.

    Attributes:
        name: name of the job and prefix of its pods' names, a DNS-1035 label.
        arguments: arguments of torchrun, such as `("-m", "d2plm", "train", …)`.
        namespace: None: the namespace in which the job is created.
        nodes: number of pods that train together.
        min_nodes: smallest number that continues when others are lost; None: all. PyTorchJob only.
        gpus, gpu_resource: GPUs per node, and their resource name.
        processes: processes per node; None: one per GPU, or one.
        cpu, memory: requests per node, Kubernetes quantities; memory is also the limit.
        shared_memory: size of /dev/shm, a quantity that counts towards `memory`.
        claims: PersistentVolumeClaims on storage that the nodes share → mount paths.
        preparation: command that every pod runs before training, concurrently with other pods.
        config_maps, secrets: names of optional objects whose keys become environment variables.
        service_account: None: the namespace's default; its token is not mounted.
        same_node: whether the pods must be on one machine, as a ReadWriteOnce volume requires.
        node_selector, tolerations, priority_class: as in a pod.
        queue: local queue of Kueue.
        restarts: total restarts of the pods, or of a TrainJob, after pre-emptions and lost nodes.
            The training operator does not count restarts after an exit code; the launcher does.
        deadline_seconds: time limit of the whole job, or None.
        start_deadline_seconds: time limit for the first pod to run.
        queue_deadline_seconds: time limit for leaving a queue.
        stall_deadline_seconds: time limit for a started job with fewer pods than `smallest`.
        kept_seconds: time for which a finished job (of a TrainJob, its pods) is kept.
        annotations: annotations of the job and its pods.
        owners: `ownerReferences`: the job is deleted with its owners.
    """

    name: str
    image: str
    arguments: Sequence[str]
    namespace: str | None = None
    nodes: int = 1
    min_nodes: int | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    processes: int | None = None
    cpu: str = "2"
    memory: str = "8Gi"
    shared_memory: str = "1Gi"
    claims: Mapping[str, str] = field(default_factory=dict)
    preparation: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config_maps: Sequence[str] = ("d2plm-config",)
    secrets: Sequence[str] = ("d2plm-secrets",)
    service_account: str | None = None
    same_node: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    priority_class: str | None = None
    queue: str | None = None
    restarts: int = 50
    deadline_seconds: int | None = None
    start_deadline_seconds: float = 1800
    queue_deadline_seconds: float = 7 * 24 * 3600
    stall_deadline_seconds: float = 3600
    kept_seconds: int = 7 * 24 * 3600
    annotations: Mapping[str, str] = field(default_factory=dict)
    owners: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        """Reject values that the API server or, much later, the operator would reject."""
        dns = _DNS_1035.fullmatch(self.name) is not None
        wanted = "1–63 of a–z, 0–9 and '-', beginning with a letter and not ending with '-'"
        require(dns, "name", self.name, wanted)
        require(bool(self.image), "image", self.image, "an image's name")
        require_number("nodes", self.nodes, integer=True, low=1)
        require_number("min_nodes", self.min_nodes, optional=True, integer=True, low=1)
        fits = self.smallest <= self.nodes
        require(fits, "min_nodes", self.min_nodes, f"≤ nodes={self.nodes}")
        require_number("gpus", self.gpus, integer=True, low=0)
        require_number("restarts", self.restarts, integer=True, low=0)
        require_number("processes", self.processes, optional=True, integer=True, low=1)
        shared = quantity("shared_memory", self.shared_memory)
        fits = shared < quantity("memory", self.memory)
        wanted = f"less than memory={self.memory}, which includes it"
        require(fits, "shared_memory", self.shared_memory, wanted)
        quantity("cpu", self.cpu)
        for key in ("node_selector", "annotations"):
            values = dict(getattr(self, key))
            text = all(isinstance(value, str) for value in values.values())
            require(text, key, values, "a mapping to text; put numbers in quotes")

    @property
    def processes_per_node(self) -> int:
        return self.processes or self.gpus or 1

    @property
    def smallest(self) -> int:
        return self.nodes if self.min_nodes is None else self.min_nodes


@dataclass(frozen=True)
class ShardedJob(TrainingJob):
    """Work in shards; `arguments` are those of d2plm, and only the pods' attributes apply.

    Attributes:
        shards: indices of the shards to compute, of `count`: all or the missing ones.
        parallel: maximum number of pods at a time; None: all.
    """

    shards: Sequence[int] = ()
    count: int = 1
    parallel: int | None = None

    @property
    def chosen(self) -> str:
        """Value of the setting `shard` in all pods."""
        return f"{format_indices(self.shards)}/{self.count}"


def pytorchjob(job: TrainingJob) -> Manifest:
    """Build a PyTorchJob; only Workers, because with a Master the elastic PET_NNODES is wrong."""
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job),
        "spec": {
            "nprocPerNode": str(job.processes_per_node),
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "minReplicas": job.smallest,
                "maxReplicas": job.nodes,
                "maxRestarts": RESTARTS_IN_A_POD,
                "rdzvConf": [
                    {"key": "join_timeout", "value": str(JOIN_SECONDS)},
                    {"key": "read_timeout", "value": str(CONNECT_SECONDS)},
                ],
            },
            "runPolicy": _present(
                # Frees the GPUs of a failed job's running workers; keeps the logs of ended ones.
                cleanPodPolicy="Running",
                backoffLimit=job.restarts,
                ttlSecondsAfterFinished=job.kept_seconds,
                activeDeadlineSeconds=job.deadline_seconds,
            ),
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": job.nodes,
                    "restartPolicy": "ExitCode",  # ≥ 128: pre-empted, lost, out of memory
                    "template": {
                        "metadata": _pod_metadata(job),
                        "spec": {
                            **_pod(job),
                            "containers": [
                                _container(
                                    job,
                                    PYTORCHJOB_CONTAINER,
                                    command=list(COMMAND),
                                    args=list(job.arguments),
                                    env=_environment(job),
                                    resources=_resources(job, gpus=job.gpus),
                                )
                            ],
                        },
                    },
                }
            },
        },
    }


def trainjob(job: TrainingJob) -> Manifest:
    """Build a TrainJob; its volumes, security context and affinity are in `training_runtime`."""
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": _present(
            runtimeRef=runtime,
            trainer={
                "image": job.image,
                "command": list(COMMAND),
                "args": list(job.arguments),
                "env": _environment(job),
                "numNodes": job.nodes,
                "numProcPerNode": job.processes_per_node,
                "resourcesPerNode": _resources(job, gpus=job.gpus),
            },
            activeDeadlineSeconds=job.deadline_seconds,
        ),
    }


def indexed_job(job: ShardedJob) -> Manifest:
    """Build a Job: errors fail only their shard, lost pods are replaced, crashes are retried."""
    pods = len(job.shards)
    metadata = _metadata(replace(job, annotations={**job.annotations, SHARDS: job.chosen}))
    container = _container(
        job,
        SHARD_CONTAINER,
        command=["python", "-m", "d2plm"],
        args=[*job.arguments, f"shard='{job.chosen}'"],
        env=_environment(job),
        resources=_resources(job, gpus=job.gpus),
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": _present(
            completionMode="Indexed",
            completions=pods,
            parallelism=min(job.parallel or pods, pods),
            backoffLimitPerIndex=min(job.restarts, MOST_SHARD_RESTARTS),
            podFailurePolicy={
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    _on_permanent_exit_codes("FailIndex"),
                ]
            },
            ttlSecondsAfterFinished=job.kept_seconds,
            activeDeadlineSeconds=job.deadline_seconds,
            template={
                "metadata": _pod_metadata(job),
                "spec": {**_pod(job), "restartPolicy": "Never", "containers": [container]},
            },
        ),
    }


def worker_pod(job: TrainingJob) -> Manifest:
    """Build one of the PyTorchJob's pods as a standalone pod."""
    template = pytorchjob(job)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    metadata = {"generateName": f"{job.name}-", **template["metadata"]}
    spec = {**template["spec"], "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def training_runtime(job: TrainingJob) -> Manifest:
    """Build the TrainingRuntime to which the TrainJob of the same name refers."""
    metadata = _metadata(replace(job, queue=None))  # Kueue queues the TrainJob
    metadata["labels"]["trainer.kubeflow.org/framework"] = "torch"
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "ttlSecondsAfterFinished": job.kept_seconds,
                    "failurePolicy": {
                        "maxRestarts": job.restarts,
                        "rules": [
                            {
                                "name": "permanent",
                                "action": "FailJobSet",
                                "onJobFailureReasons": ["PodFailurePolicy"],
                            }
                        ],
                    },
                    "replicatedJobs": [_replicated_job(job)],
                }
            },
        },
    }


def persistent_volume_claim(job: TrainingJob, name: str, size: str, shared: bool) -> Manifest:
    """Build a claim on a volume of `size` (a quantity), `shared` by several machines or not."""
    quantity("claim_size", size)
    without = replace(job, queue=None, owners=())  # the results outlive the job
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(without) | {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany" if shared else "ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
        },
    }


def quantity(key: str, value: str) -> float:
    """Parse a Kubernetes quantity; raises `ConfigError` naming `key` if it is malformed."""
    with from_extra("the Kubernetes client", "pipelines", ClusterError):
        from kubernetes.utils import parse_quantity
    try:
        return float(parse_quantity(value))
    except ValueError:
        raise ConfigError(
            "must be a Kubernetes quantity, such as 500m, 4 or 16Gi", {key: value}
        ) from None


def _replicated_job(job: TrainingJob) -> Manifest:
    return {
        "name": TRAINJOB_CONTAINER,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,  # the job set restarts all nodes
                "podFailurePolicy": {"rules": [_on_permanent_exit_codes("FailJob")]},
                "template": {
                    "metadata": _pod_metadata(job),
                    "spec": {
                        **_pod(job),
                        "restartPolicy": "Never",
                        "containers": [_container(job, TRAINJOB_CONTAINER)],
                    },
                },
            },
        },
    }


def _on_permanent_exit_codes(action: str) -> Manifest:
    codes = list(PERMANENT_EXIT_CODES)
    return {"action": action, "onExitCodes": {"operator": "In", "values": codes}}


def _present(**fields: Any) -> Manifest:
    return {name: value for name, value in fields.items() if value not in (None, {}, [])}


def _metadata(job: TrainingJob) -> Manifest:
    queue = {} if job.queue is None else {QUEUE_LABEL: job.queue}
    return _present(
        name=job.name,
        namespace=job.namespace,
        labels=labels("trainer", job.name) | queue,
        annotations=dict(job.annotations),
        ownerReferences=[dict(owner) for owner in job.owners],
    )


def _pod_metadata(job: TrainingJob) -> Manifest:
    # A sidecar never ends, so the job would not end either.
    without_sidecar = {"sidecar.istio.io/inject": "false"}
    return {
        # Istio prefers the label to the annotation.
        "labels": labels("trainer", job.name) | without_sidecar,
        "annotations": {**job.annotations, **without_sidecar},
    }


def labels(component: str, instance: str | None = None) -> dict[str, str]:
    """Recommended labels of an object; `instance`: name of its job."""
    values = {
        "name": "d2plm",
        "instance": instance,
        "component": component,
        "part-of": "d2plm",
        "version": __version__,
        "managed-by": "d2plm",
    }
    return {f"app.kubernetes.io/{key}": value for key, value in values.items() if value}


def _pod(job: TrainingJob) -> Manifest:
    """Build the pod without the container that trains."""
    near = {
        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    together = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
    preparation = _container(
        job,
        PREPARATION_CONTAINER,
        command=list(job.preparation),
        env=_environment(job),
        resources=_resources(job, gpus=0),
    )
    return _present(
        automountServiceAccountToken=False,
        terminationGracePeriodSeconds=GRACE_SECONDS + SHUTDOWN_MARGIN_SECONDS,
        securityContext={
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        volumes=[
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": str(job.shared_memory)},
            },
            *({"name": name, "persistentVolumeClaim": {"claimName": name}} for name in job.claims),
        ],
        serviceAccountName=job.service_account,
        priorityClassName=job.priority_class,
        nodeSelector=dict(job.node_selector),
        tolerations=[dict(toleration) for toleration in job.tolerations],
        affinity=together if job.same_node else None,
        initContainers=[preparation] if job.preparation else None,
    )


def _container(job: TrainingJob, name: str, **fields: Any) -> Manifest:
    return {
        "name": name,
        "image": job.image,
        **fields,
        "envFrom": [
            *({"configMapRef": {"name": name, "optional": True}} for name in job.config_maps),
            *({"secretRef": {"name": name, "optional": True}} for name in job.secrets),
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  # the pod's own
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108
            *({"name": name, "mountPath": path} for name, path in job.claims.items()),
        ],
    }


def _environment(job: TrainingJob) -> list[dict[str, str]]:
    threads = max(int(quantity("cpu", job.cpu)) // job.processes_per_node, 1)
    variables = {
        "HOME": "/tmp",  # noqa: S108  # the root file system is read-only
        "OMP_NUM_THREADS": threads,  # torch counts the machine's cores, not the pod's
        **({} if job.gpus else ALLOCATOR),
        **job.environment,
    }
    return [{"name": name, "value": str(value)} for name, value in variables.items()]


def _resources(job: TrainingJob, *, gpus: int) -> Manifest:
    """Requests and limits; CPU has no limit, which would only slow down training."""
    limits = {"memory": str(job.memory), **({job.gpu_resource: gpus} if gpus else {})}
    return {"requests": {"cpu": str(job.cpu), **limits}, "limits": limits}
