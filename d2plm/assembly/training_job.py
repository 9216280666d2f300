"""Launching training, here or in a cluster, and sharded jobs, by the `launcher` section."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from d2plm.core.errors import require, require_number, within
from d2plm.core.shards import MAX_SHARDS
from d2plm.core.terminal import done
from d2plm.launch.client import JOB_KINDS, connect
from d2plm.launch.job_log import job_log, logged
from d2plm.launch.job_spec import IMAGE, ShardedJob, TrainingJob
from d2plm.launch.kfp_server import POD_VARIABLE
from d2plm.launch.run_job import delete_job, train_in_cluster
from d2plm.launch.workflow import is_ended
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.launcher import LauncherSettings
from d2plm.settings.registry import module_words

# Variables that a pipeline step passes on to the pods of its job. Secrets: launcher.secrets.
# MLFLOW_RUN_ID is the user's own: steps in a cluster have dropped the one that KFP sets.
FORWARDED_VARIABLES = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"),
)


def training_job(config: PipelineSettings, arguments: Sequence[str], **more: Any) -> TrainingJob:
    """Build the job that the `launcher` section describes.

    Args:
        arguments: arguments of torchrun; empty: the job is only tried, by `d2plm doctor`.
        more: attributes of the job that override the section's.

    Raises:
        ConfigError: if a value is invalid, or the processes of the job's nodes do not fit the
            parallel dimensions or cannot share the bins of a step evenly.
    """
    from d2plm.assembly.training_run import build_plan, trainer_keys
    from d2plm.training.plan import partition

    launcher, device, gpus = config.launcher, config.trainer.device, config.launcher.gpus
    wanted = "≥ 1 for trainer.device=cuda" if device == "cuda" else "0, or set trainer=multi_gpu"
    require((device == "cuda") == bool(gpus), "launcher.gpus", gpus, wanted)
    more = {"arguments": arguments, **more}
    processes = None if gpus else config.distributed.processes
    with within("launcher", {"processes": "distributed.processes"}):
        job = TrainingJob(**{**_section(launcher), "processes": processes, **more})
    plan = build_plan(config)
    with trainer_keys():
        for nodes in range(job.smallest, job.nodes + 1):
            processes = nodes * job.processes_per_node
            plan.resolved(processes)
            if arguments:  # training starts, with these settings
                ranks = processes // (plan.row_ranks * plan.pipeline)
                partition(ranks, config.data.token_budget, config.trainer)
    return job


def sharded_job(
    launcher: LauncherSettings, shards: int, parallel: int | None, arguments: Sequence[str]
) -> ShardedJob:
    """Build a job whose pods run d2plm on one shard each; `ConfigError` for an unusable value."""
    require_number("shards", shards, high=MAX_SHARDS)
    for key, wanted in (("kind", "auto"), ("nodes", 1), ("min_nodes", None)):
        value = getattr(launcher, key)
        require(value == wanted, f"launcher.{key}", value, f"{wanted} unless command=train")
    require_number("launcher.gpus", launcher.gpus, high=1)
    own = {"shards": range(shards), "count": shards, "parallel": parallel, "arguments": arguments}
    with within("launcher"):
        return ShardedJob(**{**_section(launcher), **own})


def _section(launcher: LauncherSettings) -> dict[str, Any]:
    names = {one.name for one in fields(TrainingJob)} & {*vars(launcher)}
    section = {name: getattr(launcher, name) for name in names}
    return section | {"image": launcher.image or IMAGE}


def launch_step(config: PipelineSettings, kind: str, file: Path) -> None:
    """Train as a job on behalf of a pipeline step; the pipeline's run owns the job.

    No job is created if training is complete, as it would have to wait for its resources. In a
    workflow, a signal deletes the job only if the run is being ended, because an evicted step is
    replaced. All reports are also written to `job_log(file)`.

    Args:
        file: the configuration, on a volume that the job mounts; it determines the job's name, by
            which a retried step finds its job.
    """
    from d2plm.assembly.training_run import is_trained

    launcher = config.launcher
    own, cluster = connect(), connect(launcher.namespace)
    name, pod = job_name(config, file), os.environ.get(POD_VARIABLE)
    if cluster.read(JOB_KINDS[kind], name) is None and is_trained(config):
        done(f"training is complete: reusing {config.model_dir}; no job is created")
        return
    workflow = own.workflow_of(pod) if pod else []
    forwarded = {name: os.environ[name] for name in FORWARDED_VARIABLES if name in os.environ}
    job = training_job(
        config,
        ["-m", "d2plm", "train", f"--config-file={file}", *module_words()],
        name=name,
        environment={**forwarded, **launcher.environment},
        # Kubernetes requires owners to be in the same namespace.
        owners=workflow if own.namespace == cluster.namespace else [],
    )
    # Outside a pipeline in a cluster nothing replaces the step, so a signal is a cancellation.
    cancelled = {"is_cancelled": partial(is_ended, own, workflow)} if workflow else {}
    on_cancel = "delete" if workflow else launcher.on_cancel
    with logged(job_log(file)) as say:
        train_in_cluster(cluster, JOB_KINDS[kind], job, on_cancel=on_cancel, say=say, **cancelled)


def end_step(config: PipelineSettings, file: Path) -> None:
    """Delete the job that `launch_step` created, if it exists."""
    launcher = config.launcher
    if POD_VARIABLE in os.environ and launcher.kind != "local":
        delete_job(connect(launcher.namespace), job_name(config, file))


def job_name(config: PipelineSettings, file: Path) -> str:
    """Name of the job for the configuration in `file`, identical in every retry."""
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    return config.launcher.name or f"d2plm-{digest}"
