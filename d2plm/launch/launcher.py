"""The `launcher` settings at work: which kind of place trains, the job they describe, its launch.

The section is taken as a mapping; which keys it has stands in configs/launcher/auto.yaml.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from d2plm.core.errors import ClusterError, require, require_choice
from d2plm.launch.cluster import Cluster, connect
from d2plm.launch.jobs import IMAGE, Claim, TrainingJob
from d2plm.launch.kubernetes import JOB_KINDS, delete_job, train_in_cluster

Settings = Mapping[str, Any]
KINDS = ("auto", "local", *JOB_KINDS)
POD_VARIABLE = "KFP_POD_NAME"  # KFP sets it in a step's pod
# Of a pipeline's step, for the pods of the job that it starts. Secrets come from launcher.secrets.
HANDED_ON = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
)


def where_to_train(kind: str) -> str:
    """`local`, `pytorchjob` or `trainjob`, by `launcher.kind`.

    `auto` is a job in a step of a pipeline that runs in a cluster, and here anywhere else.

    Raises:
        ConfigError: if it is none of them.
        ClusterError: if the pipeline's cluster has no operator of training jobs.
    """
    require_choice("launcher.kind", kind, KINDS)
    if kind != "auto":
        return kind
    if POD_VARIABLE not in os.environ:
        return "local"
    cluster = connect()
    for name, known in JOB_KINDS.items():
        if cluster.has(known):
            return name
    controllers = " nor ".join(known.controller for known in JOB_KINDS.values())
    raise ClusterError(
        f"launcher=auto: the cluster has neither {controllers}; install one, or say "
        "launcher=local to train in the step's own pod"
    )


def training_job(
    launcher: Settings, *, processes: int, device: str, arguments: Sequence[str], **more: Any
) -> TrainingJob:
    """The job that the `launcher` section describes.

    Args:
        launcher: the section.
        processes: of each node, where it has no GPUs.
        device: `trainer.device`, which must agree with the GPUs.
        arguments: what torchrun runs.
        more: further attributes of the job, in place of the section's.

    Raises:
        ConfigError: naming the key whose value is impossible.
    """
    gpus = launcher["gpus"]
    wanted = "≥ 1 for trainer.device=cuda" if device == "cuda" else "0, or say trainer=multi_gpu"
    require((device == "cuda") == bool(gpus), "launcher.gpus", gpus, wanted)
    taken = {field.name for field in fields(TrainingJob)}
    section = {key: value for key, value in launcher.items() if key in taken}
    section["claims"] = [Claim(name, path) for name, path in launcher["claims"].items()]
    section["image"] = launcher["image"] or IMAGE
    section["processes"] = None if gpus else processes
    return TrainingJob(**{**section, "arguments": arguments, **more})


def launch(launcher: Settings, kind: str, job: TrainingJob) -> None:
    """Run `job` as the `launcher` section says."""
    train_in_cluster(
        connect(launcher["namespace"]),
        JOB_KINDS[kind],
        job,
        start_deadline_seconds=launcher["start_deadline_seconds"],
        on_cancel=launcher["on_cancel"],
    )


def launch_step(
    launcher: Settings, kind: str, *, config_file: Path, run_id: str, **more: Any
) -> None:
    """Train as a job on behalf of a pipeline's step, whose run owns it.

    Args:
        launcher: the section.
        kind: `pytorchjob` or `trainjob`.
        config_file: the configuration to train with, on a volume of the job's.
        run_id: of the pipeline's run; a step that is tried again finds its job by it.
        more: of `training_job`.
    """
    handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    job = training_job(
        launcher,
        arguments=["-m", "d2plm", "train", f"--config-file={config_file}"],
        name=_name(launcher, config_file, run_id),
        environment={**handed_on, **launcher["environment"]},
        owners=_owners(connect(launcher["namespace"])),
        **more,
    )
    launch(launcher, kind, job)


def end_step(launcher: Settings, *, config_file: Path, run_id: str) -> None:
    """Delete the job that `launch_step` has started, if a cluster's pipeline has left it behind."""
    if POD_VARIABLE in os.environ and launcher["kind"] != "local":
        delete_job(connect(launcher["namespace"]), _name(launcher, config_file, run_id))


def _name(launcher: Settings, config_file: Path, run_id: str) -> str:
    digest = hashlib.sha256(f"{run_id} {config_file}".encode()).hexdigest()[:12]
    return launcher["name"] or f"d2plm-{digest}"


def _owners(jobs: Cluster) -> list[dict[str, Any]]:
    """The pipeline's run, if it is in the job's own namespace, as owners have to be."""
    pod, own = os.environ.get(POD_VARIABLE), connect()
    return own.workflow_of(pod) if pod and own.namespace == jobs.namespace else []
