"""Settings of where training runs: on this machine, or as a job in a cluster."""

from dataclasses import dataclass
from posixpath import normpath
from typing import Any, Literal

from d2plm.core.errors import ConfigError
from d2plm.settings.schema import Form, Settings, key

Kind = Literal["auto", "local", "pytorchjob", "trainjob"]
QUANTITY = Form(
    r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?",
    "a Kubernetes quantity, such as 500m, 4 or 16Gi",
)
LABEL = Form(
    r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
    "a name of up to 63 lower-case letters, digits and '-' inside",
)
QUEUE = Form(
    r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?",
    "a name of up to 63 lower-case letters, digits, and '-' and '.' inside",
)
VARIABLE = Form(r"[-._a-zA-Z][-._a-zA-Z0-9]*", "letters, digits, '_', '-' and '.', no digit first")
NODE_LABEL = Form(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    "a label, such as kubernetes.io/hostname",
)
NODE_VALUE = Form(
    r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
    "up to 63 letters, digits, and '-', '_' and '.' inside; numbers, true and false in quotes",
)
MOUNT_PATH = Form(r"/[^:]+", "an absolute path without ':'")
_OWN_VOLUMES = {"tmp": "/tmp", "shared-memory": "/dev/shm"}  # noqa: S108  # each pod's


@dataclass(frozen=True, kw_only=True)
class LauncherSettings(Settings):
    """Where the pipeline's train step trains; `d2plm job` uses the same settings."""

    kind: Kind = key("auto")
    """auto starts a job if a pipeline in a cluster runs the step"""
    name: str | None = key(None, form=LABEL)
    """name of the job; null: derived from the pipeline run's id"""
    namespace: str | None = key(None, form=LABEL)
    """namespace of the job; null: the pod's own, or kubectl's current one"""
    image: str | None = key(None)
    """image of the training pods; null: d2plm-trainer of this version; the pipeline sets it"""
    nodes: int = key(1, low=1)
    """number of pods that train together"""
    min_nodes: int | None = key(None, low=1)
    """fewest nodes that continue after others are lost (pytorchjob); null: all"""
    gpus: int = key(0, low=0)
    """GPUs per node; for CPUs set distributed.processes"""
    gpu_resource: str = key("nvidia.com/gpu")
    """resource name of a GPU"""
    cpu: str = key("2", form=QUANTITY)
    """CPUs per node"""
    memory: str = key("8Gi", form=QUANTITY)
    """memory per node"""
    shared_memory: str = key("1Gi", form=QUANTITY)
    """size of /dev/shm; part of memory"""
    claims: dict[str, str] = key({"d2plm-workspace": "/workspace"}, names=LABEL, form=MOUNT_PATH)
    """shared PersistentVolumeClaims and their mount paths"""
    claim_size: str | None = key(None, form=QUANTITY)
    """for d2plm job: size of claims to create, such as 10Gi; null: they exist"""
    prepare: bool = key(True)
    """for d2plm job: pods prepare data.input if data.prepared_dir is empty"""
    environment: dict[str, str | int | float | bool] = key({}, names=VARIABLE)
    """environment variables, {NAME: text}"""
    config_maps: list[str] = key(["d2plm-config"])
    """ConfigMaps read as environment variables; optional"""
    secrets: list[str] = key(["d2plm-secrets"])
    """Secrets read as environment variables; optional"""
    service_account: str | None = key(None)
    """service account of the pods; null: the namespace's default, without a token"""
    same_node: bool = key(False)
    """all pods on one machine, for a ReadWriteOnce volume"""
    node_selector: dict[str, str] = key({}, names=NODE_LABEL, form=NODE_VALUE)
    """labels of the pods' nodes"""
    tolerations: list[Any] = key([])
    """tolerations of the pods"""
    priority_class: str | None = key(None)
    """PriorityClass of the pods"""
    queue: str | None = key(None, form=QUEUE)
    """local queue of Kueue"""
    restarts: int = key(50, low=0)
    """restarts after pre-emptions and lost nodes"""
    deadline_seconds: int | None = key(None, low=1)
    """time limit of the whole job"""
    kept_seconds: int = key(604800, low=0)
    """seconds until a completed job is deleted"""
    start_deadline_seconds: float = key(1800, above=0)
    """time limit for the first pod to run"""
    queue_deadline_seconds: float = key(604800, above=0)
    """time limit for the job to leave its queue"""
    stall_deadline_seconds: float = key(3600, above=0)
    """time limit for a started job that lacks pods, such as a lost node's"""
    on_cancel: Literal["delete", "suspend"] = key("delete")
    """action when the launcher is interrupted, unless a pipeline in a cluster runs it"""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [*_OWN_VOLUMES, *self.claims]
        paths = [*map(normpath, (*_OWN_VOLUMES.values(), *self.claims.values()))]
        if len({*names}) < len(names) or len({*paths}) < len(paths):
            own = ", ".join(f"{name}: {path}" for name, path in _OWN_VOLUMES.items())
            raise ConfigError(
                f"must have a path of its own for each claim; the pods have {own}",
                {"claims": self.claims},
            )
