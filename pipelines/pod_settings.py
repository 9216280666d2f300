"""Images, resources, volume and environment of the steps' pods.

KFP cannot set a read-only root file system, nor `fsGroup`, which makes a new volume writable for
our user; the cluster has to set them.
"""

from typing import Any

from kfp import kubernetes
from kfp.dsl import PipelineTask
from kfp.dsl.pipeline_channel import PipelineChannel

from d2plm.launch.job_spec import USER, labels
from pipelines.steps import WORKSPACE

CONFIG_MAP, SECRET = "d2plm-config", "d2plm-secrets"
# All keys that the steps read.
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


def set_resources(
    task: PipelineTask,
    image: PipelineChannel,
    cpu: str | PipelineChannel,
    memory: str | PipelineChannel,
    *,
    hours: int | None,
) -> None:
    """Set the image, the CPU request, the memory request and limit, and the time limit.

    CPUs have no limit, so that idle ones are used.
    """
    task.set_container_image(image)
    task.set_cpu_request(cpu).set_memory_request(memory).set_memory_limit(memory)
    _register(task, cpu, memory)
    if hours is not None:
        kubernetes.set_timeout(task, hours * 3600)


def set_gpus(task: PipelineTask, resource: PipelineChannel, number: PipelineChannel) -> None:
    """Set the number of GPUs; "0" requests none."""
    task.set_accelerator_type(resource).set_accelerator_limit(number)
    _register(task, resource, number)


def set_surroundings(
    task: PipelineTask,
    claim: PipelineChannel,
    tolerations: PipelineChannel,
    node_selector: PipelineChannel,
) -> None:
    """Set the shared volume, the environment, the nodes, the user and the labels."""
    kubernetes.mount_pvc(task, claim, WORKSPACE)
    kubernetes.empty_dir_mount(task, "tmp", "/tmp")  # noqa: S108  # private to the pod
    # KFP can pass only individual keys, each with a variable name.
    names, secrets = ({key: key for key in keys} for keys in (CONFIG_KEYS, SECRET_KEYS))
    kubernetes.use_config_map_as_env(task, CONFIG_MAP, names, optional=True)
    kubernetes.use_secret_as_env(task, SECRET, secrets, optional=True)
    kubernetes.add_toleration_json(task, tolerations)
    kubernetes.add_node_selector_json(task, node_selector)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")  # tags are versions and do not move
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    for key, value in labels("pipeline").items():
        kubernetes.add_pod_label(task, key, value)


def _register(task: PipelineTask, *values: Any) -> None:
    """Pass the parameters of resources to the exit handler, which KFP itself does not do."""
    task.register_pipeline_channels([v for v in values if isinstance(v, PipelineChannel)])
