"""d2plm job: training as a cluster job, without the pipeline.

The job's pods compose the same settings and run `d2plm train` on shared volumes. With
`launcher.prepare`, each pod first makes sure that the prepared data exist.
"""

import shlex

from d2plm.assembly.training_job import launch, training_job
from d2plm.core.errors import require, within
from d2plm.core.terminal import result
from d2plm.launch.client import JOB_KINDS, OBJECTS
from d2plm.launch.job_spec import Manifest, TrainingJob, persistent_volume_claim
from d2plm.settings.commands import PipelineSettings
from d2plm.settings.registry import module_words


def run_show(config: PipelineSettings, words: list[str]) -> list[Manifest]:
    """Print all objects of the job as YAML documents.

    `words` are the settings as written on the command line; the pods compose them again.
    """
    import yaml

    job, size = _job(config, words), config.launcher.claim_size
    shared = job.nodes > 1 and not job.same_node
    claims = job.claims if size is not None else ()
    with within("launcher"):
        documents = [persistent_volume_claim(job, name, str(size), shared) for name in claims]
    documents += [make(job) for _, make in OBJECTS[JOB_KINDS[_job_kind(config)]]]
    text = yaml.safe_dump_all(documents, sort_keys=False).rstrip("\n")
    result(f"# {shlex.join(['d2plm', 'job', 'show', *words])}\n{text}")
    return documents


def run_run(config: PipelineSettings, words: list[str]) -> None:
    """Run the job in the cluster and exit with its exit code."""
    launch(config.launcher, _job_kind(config), _job(config, words))


def _job(config: PipelineSettings, words: list[str]) -> TrainingJob:
    launcher = config.launcher
    require(bool(launcher.name), "launcher.name", launcher.name, "the name of the job")
    settings = [word for word in words if not word.lstrip("+").startswith("launcher")]
    preparation: list[str] = []
    if launcher.prepare:
        given = config.data.input
        require(bool(given), "data.input", given, "proteins to prepare, or launcher.prepare=false")
        # Not tracked: several pods opening an empty SQLite store at once corrupt it.
        own = ["data.keep_prepared=true", "tracking.trackers=[]"]
        preparation = ["d2plm", "prepare", *module_words(), *settings, *own]
    return training_job(
        config, ["-m", "d2plm", "train", *module_words(), *settings], preparation=preparation
    )


def _job_kind(config: PipelineSettings) -> str:
    kind: str = config.launcher.kind
    require(kind in JOB_KINDS, "launcher.kind", kind, "pytorchjob or trainjob")
    return kind
