"""d2plm job: training as a job in a cluster, without the pipeline.

The job runs `d2plm train` with the settings that it was shown or run with, on volumes that its pods
share; with `prepare`, each of them first sees to it that there are prepared data.
"""

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from d2plm.config import Config
from d2plm.errors import ClusterError, require, require_choice
from d2plm.launch.cluster import connect
from d2plm.launch.jobs import (
    IMAGE,
    Claim,
    Manifest,
    TrainingJob,
    persistent_volume_claim,
    pytorchjob,
    training_runtime,
    trainjob,
)
from d2plm.launch.kubernetes import KINDS, train_in_cluster

# Of a pipeline's step, for the pods of the job that it starts. Secrets come from launcher.secrets.
HANDED_ON = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
)
POD_VARIABLE = "KFP_POD_NAME"  # KFP sets it in a step's pod


def run_show(config: Config, words: list[str]) -> None:
    """Print the job's manifest, as YAML documents."""
    import yaml

    documents = yaml.safe_dump_all(manifests(config, words), sort_keys=False)
    print(f"# {shlex.join(['d2plm', 'job', 'show', *words])}\n{documents}", end="")


def run_run(config: Config, words: list[str]) -> None:
    """Run the job in the cluster and end as it ends."""
    launch(config["launcher"], _job_kind(config), job_of(config, words))


def manifests(config: Config, words: list[str]) -> list[Manifest]:
    """Everything that is to be created for the job, as `job_of` has it."""
    job, size = job_of(config, words), config["launcher"]["claim_size"]
    shared = job.nodes > 1 and not job.same_node
    claims = job.claims if size is not None else ()
    documents = [persistent_volume_claim(job, claim, size, shared) for claim in claims]
    if _job_kind(config) == "pytorchjob":
        return [*documents, pytorchjob(job)]
    return [*documents, training_runtime(job), trainjob(job)]


def job_of(config: Config, words: list[str]) -> TrainingJob:
    """The job that trains with these settings.

    Args:
        config: what they compose to.
        words: the settings as they were written, which the job's pods compose anew.
    """
    launcher = config["launcher"]
    _require_device(config)
    require(bool(launcher["name"]), "launcher.name", launcher["name"], "the name of the job")
    settings = [word for word in words if not word.lstrip("+").startswith("launcher")]
    preparation: list[str] = []
    if launcher["prepare"]:
        given = config["data"]["input"]
        require(bool(given), "data.input", given, "proteins to prepare, or launcher.prepare=false")
        # Untracked: pods that open an empty SQLite store at once break it. Training tracks.
        own = ["data.keep_prepared=true", "tracking.trackers=[]"]
        preparation = ["d2plm", "prepare", *settings, *own]
    return training_job(
        launcher,
        processes=config["distributed"]["processes"],
        arguments=["-m", "d2plm", "train", *settings],
        preparation=preparation,
    )


def training_job(
    launcher: Mapping[str, Any],
    *,
    processes: int,
    arguments: Sequence[str],
    preparation: Sequence[str] = (),
    **more: Any,
) -> TrainingJob:
    """The job that the `launcher` section describes.

    Args:
        launcher: the section.
        processes: of each node, where it has no GPUs.
        arguments: what torchrun runs.
        preparation: command that every pod runs first.
        more: further attributes, in place of the section's.
    """
    taken = {field.name for field in fields(TrainingJob)}
    section = {key: value for key, value in launcher.items() if key in taken}
    section["claims"] = [Claim(name, path) for name, path in launcher["claims"].items()]
    section["image"] = launcher["image"] or IMAGE
    return TrainingJob(
        **{
            **section,
            "arguments": arguments,
            "preparation": preparation,
            "processes": None if launcher["gpus"] else processes,
            **more,
        }
    )


def launch(launcher: Mapping[str, Any], kind: str, job: TrainingJob) -> None:
    """Run `job` as the `launcher` section says."""
    train_in_cluster(
        connect(launcher["namespace"]),
        KINDS[kind],
        job,
        start_deadline_seconds=launcher["start_deadline_seconds"],
        on_cancel=launcher["on_cancel"],
    )


def where_to_train(kind: str) -> str:
    """`local`, `pytorchjob` or `trainjob`, by `launcher.kind`.

    `auto` is a job in a step of a pipeline that runs in a cluster with a training operator.

    Raises:
        ConfigError: if it is none of them.
        ClusterError: if the cluster has no such operator.
    """
    require_choice("launcher.kind", kind, ("auto", "local", "pytorchjob", "trainjob"))
    if kind != "auto":
        return kind
    if POD_VARIABLE not in os.environ:
        return "local"
    cluster = connect()
    for name, known in KINDS.items():
        if cluster.has(known):
            return name
    controllers = " nor ".join(known.controller for known in KINDS.values())
    raise ClusterError(
        f"launcher=auto: the cluster has neither {controllers}; install one, or say "
        "launcher=local to train in the step's own pod"
    )


def launch_step(config: Config, kind: str, config_file: Path, run_id: str) -> None:
    """Train as a job on behalf of a pipeline's step, which owns it.

    Args:
        config: the pipeline's.
        kind: `pytorchjob` or `trainjob`.
        config_file: the configuration to train with, on a volume of the job's.
        run_id: of the pipeline's run; a step that is tried again finds its job by it.
    """
    launcher = config["launcher"]
    _require_device(config)
    digest = hashlib.sha256(f"{run_id} {config_file}".encode()).hexdigest()[:12]
    handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    pod = os.environ.get(POD_VARIABLE)
    launch(
        launcher,
        kind,
        training_job(
            launcher,
            processes=config["distributed"]["processes"],
            arguments=["-m", "d2plm", "train", f"--config-file={config_file}"],
            name=launcher["name"] or f"d2plm-{digest}",
            environment={**handed_on, **launcher["environment"]},
            owners=connect(launcher["namespace"]).workflow_of(pod) if pod else (),
        ),
    )


def _require_device(config: Config) -> None:
    """Refuse GPUs that training would leave idle, and training that would find none."""
    gpus, device = config["launcher"]["gpus"], config["trainer"]["device"]
    wanted = (
        "above 0 for trainer.device=cuda" if device == "cuda" else "0, or say trainer=multi_gpu"
    )
    require((device == "cuda") == bool(gpus), "launcher.gpus", gpus, wanted)


def _job_kind(config: Config) -> str:
    kind: str = config["launcher"]["kind"]
    wanted = "pytorchjob or trainjob; say launcher=pytorchjob"
    require(kind in ("pytorchjob", "trainjob"), "launcher.kind", kind, wanted)
    return kind
