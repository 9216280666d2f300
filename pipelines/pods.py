"""What the steps' pods are given in a cluster. KFP's local runner passes over all of it.

What KFP has no word for stays with the cluster: a read-only root file system, and `fsGroup`, which
makes a new volume writable for our user.
"""

from typing import Any

from kfp import kubernetes
from kfp.dsl import PipelineTask
from kfp.dsl.pipeline_channel import PipelineChannel

from d2plm import __version__
from d2plm.launch.jobs import USER

WORKSPACE = "/workspace"
CONFIG_MAP, SECRET = "d2plm-config", "d2plm-secrets"
# KFP hands out single keys alone, so those that the steps understand have to be told one by one.
CONFIG_KEYS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_S3_ENDPOINT_URL",
    "AWS_ENDPOINT_URL",
    "AWS_DEFAULT_REGION",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
)
SECRET_KEYS = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "WANDB_API_KEY",
)
LABELS = {
    "app.kubernetes.io/name": "d2plm",
    "app.kubernetes.io/component": "pipeline",
    "app.kubernetes.io/part-of": "d2plm",
    "app.kubernetes.io/version": __version__,
    "app.kubernetes.io/managed-by": "d2plm",
}
RETRIES = 2


def give(
    task: PipelineTask,
    image: PipelineChannel,
    cpu: str | PipelineChannel,
    memory: str | PipelineChannel,
    *,
    hours: int | None,
) -> None:
    """An image, and what it may use.

    Args:
        task: the step.
        image: its image.
        cpu: requested; there is no limit, so that it may use what others leave.
        memory: requested, and the limit.
        hours: after which its pod is ended; None: never.
    """
    task.set_container_image(image)
    task.set_cpu_request(cpu).set_memory_request(memory).set_memory_limit(memory)
    _register(task, cpu, memory)
    if hours is not None:
        kubernetes.set_timeout(task, hours * 3600)


def give_gpus(task: PipelineTask, resource: PipelineChannel, number: PipelineChannel) -> None:
    """GPUs; "0" is none."""
    task.set_accelerator_type(resource).set_accelerator_limit(number)
    _register(task, resource, number)


def place(
    task: PipelineTask,
    claim: PipelineChannel,
    tolerations: PipelineChannel,
    node_selector: PipelineChannel,
) -> None:
    """The shared volume, the surroundings and the nodes; what Pod Security asks for."""
    kubernetes.mount_pvc(task, claim, WORKSPACE)
    kubernetes.empty_dir_mount(task, "tmp", "/tmp")  # noqa: S108  # of the pod alone
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, _same(CONFIG_KEYS), optional=True)
    kubernetes.use_secret_as_env(task, SECRET, _same(SECRET_KEYS), optional=True)
    kubernetes.add_toleration_json(task, tolerations)
    kubernetes.add_node_selector_json(task, node_selector)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")  # tags are versions: they do not move
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    for key, value in LABELS.items():
        kubernetes.add_pod_label(task, key, value)


def retry(task: PipelineTask) -> None:
    """Start it again after a lost node or a server that was away.

    All steps may be: they find what is done already, and training adopts its job by name.
    """
    task.set_retry(RETRIES, backoff_duration="60s", backoff_factor=2.0)


def _register(task: PipelineTask, *values: Any) -> None:
    """Carry the parameters behind resources into the exit handler, which KFP forgets to do."""
    task.register_pipeline_channels([v for v in values if isinstance(v, PipelineChannel)])


def _same(keys: tuple[str, ...]) -> dict[str, str]:
    return {key: key for key in keys}
