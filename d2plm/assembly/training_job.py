"""The `launcher` section of a configuration → where training runs, its job and the job's launch."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from d2plm.config import Config
from d2plm.core.errors import ClusterError, as_keys, require, require_choice
from d2plm.launch.client import JOB_KINDS, connect
from d2plm.launch.job_spec import IMAGE, TrainingJob
from d2plm.launch.run_job import delete_job, train_in_cluster
from d2plm.targets import TRUSTED_VARIABLE

KINDS = ("auto", "local", *JOB_KINDS)
POD_VARIABLE = "KFP_POD_NAME"  # KFP sets it in a step's pod
# Variables of a pipeline's step that the pods of its job get too. Secrets: launcher.secrets.
PASSED_ON = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    TRUSTED_VARIABLE,
)


def where_to_train(config: Config) -> str:
    """`local`, `pytorchjob` or `trainjob`, by `launcher.kind`.

    `auto` is a job in a step of a pipeline that runs in a cluster, and `local` anywhere else.

    Raises:
        ConfigError: for an unknown kind.
        ClusterError: if the pipeline's cluster has no operator of training jobs.
    """
    kind: str = config["launcher"]["kind"]
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
        f"launcher=auto: the cluster has neither {controllers}; install one, or set "
        "launcher=local to train in the step's own pod"
    )


def training_job(config: Config, arguments: Sequence[str], **more: Any) -> TrainingJob:
    """The job that the `launcher` section describes.

    Args:
        config: with the sections launcher, distributed and trainer.
        arguments: of torchrun.
        more: further attributes of the job, in place of the section's.

    Raises:
        ConfigError: naming the key whose value is impossible.
    """
    launcher, device = config["launcher"], config["trainer"]["device"]
    gpus = launcher["gpus"]
    wanted = "≥ 1 for trainer.device=cuda" if device == "cuda" else "0, or set trainer=multi_gpu"
    require((device == "cuda") == bool(gpus), "launcher.gpus", gpus, wanted)
    names = {field.name for field in fields(TrainingJob)}
    section = {key: value for key, value in launcher.items() if key in names}
    section["image"] = launcher["image"] or IMAGE
    section["processes"] = None if gpus else config["distributed"]["processes"]
    with as_keys("launcher", {"processes": "distributed.processes"}):
        return TrainingJob(**{**section, "arguments": arguments, **more})


def launch(launcher: Mapping[str, Any], kind: str, job: TrainingJob) -> None:
    """Run `job` as the `launcher` section says, and end as it ends."""
    require_choice("launcher.on_cancel", launcher["on_cancel"], ("delete", "suspend"))
    train_in_cluster(
        connect(launcher["namespace"]),
        JOB_KINDS[kind],
        job,
        start_deadline_seconds=launcher["start_deadline_seconds"],
        on_cancel=launcher["on_cancel"],
    )


def launch_step(config: Config, kind: str, file: Path) -> None:
    """Train as a job on behalf of a pipeline's step; the pipeline's run owns the job.

    Args:
        file: the configuration, on a volume of the job's. A step that is tried again finds its job
            by the file's name.
    """
    launcher = config["launcher"]
    own, cluster = connect(), connect(launcher["namespace"])
    pod = os.environ.get(POD_VARIABLE)
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    job = training_job(
        config,
        ["-m", "d2plm", "train", f"--config-file={file}"],
        name=job_name(config, file),
        environment={**passed_on, **launcher["environment"]},
        # An owner has to be in the job's own namespace.
        owners=own.workflow_of(pod) if pod and own.namespace == cluster.namespace else [],
    )
    launch(launcher, kind, job)


def end_step(config: Config, file: Path) -> None:
    """Delete the job that `launch_step` has started, if it is still there."""
    launcher = config["launcher"]
    if POD_VARIABLE in os.environ and launcher["kind"] != "local":
        delete_job(connect(launcher["namespace"]), job_name(config, file))


def job_name(config: Config, file: Path) -> str:
    """The name of the job that trains with the configuration in `file`, the same in every try."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    return config["launcher"]["name"] or f"d2plm-{digest}"
