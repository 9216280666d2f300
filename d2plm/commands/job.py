"""d2plm job: training as a cluster job, without the pipeline; or other commands, in shards.

The job's pods compose the same settings and run `d2plm train` on shared volumes. With
`launcher.prepare`, each pod first makes sure that the prepared data exist. With `command=embed`,
`score` or `generate`, each pod of an Indexed Job runs that command on its shard.
"""

import shlex
from pathlib import PurePosixPath
from typing import Any

from d2plm.assembly.training_job import sharded_job, training_job
from d2plm.config import parse_arguments, words_of_job
from d2plm.core.errors import require, within
from d2plm.core.terminal import result
from d2plm.launch.client import INDEXED_JOB, JOB_KINDS, OBJECTS, JobKind, connect
from d2plm.launch.job_spec import Manifest, ShardedJob, TrainingJob, persistent_volume_claim
from d2plm.launch.run_job import train_in_cluster
from d2plm.settings.commands import JobSettings
from d2plm.settings.registry import module_words


def run_show(config: JobSettings, words: list[str]) -> list[Manifest]:
    """Print the job's objects as YAML; the pods compose the overrides `words` again."""
    import yaml

    (kind, job), size = _job(config, words), config.launcher.claim_size
    shared = job.nodes > 1 and not job.same_node
    claims = job.claims if size is not None else ()
    with within("launcher"):
        documents = [persistent_volume_claim(job, name, str(size), shared) for name in claims]
    documents += [make(job) for _, make in OBJECTS[kind]]
    text = yaml.safe_dump_all(documents, sort_keys=False).rstrip("\n")
    result(f"# {shlex.join(['d2plm', 'job', 'show', *words])}\n{text}")
    return documents


def run_run(config: JobSettings, words: list[str]) -> None:
    """Run the job in the cluster and exit with its exit code."""
    cluster = connect(config.launcher.namespace)
    train_in_cluster(cluster, *_job(config, words), on_cancel=config.launcher.on_cancel)


def _job(config: JobSettings, words: list[str]) -> tuple[JobKind, TrainingJob]:
    launcher = config.launcher
    require(bool(launcher.name), "launcher.name", launcher.name, "the name of the job")
    settings = words_of_job(words)[1]
    if config.command != "train":
        return INDEXED_JOB, _sharded(config, settings)
    require(launcher.kind in JOB_KINDS, "launcher.kind", launcher.kind, "pytorchjob or trainjob")
    require(config.shards == 1, "shards", config.shards, "1 with command=train")
    preparation: list[str] = []
    if launcher.prepare:
        given = config.data.input
        require(bool(given), "data.input", given, "proteins to prepare, or launcher.prepare=false")
        # Not tracked: several pods opening an empty SQLite store at once corrupt it.
        own = ["data.keep_prepared=true", "tracking.trackers=[]"]
        preparation = ["d2plm", "prepare", *module_words(), *settings, *own]
    arguments = ["-m", "d2plm", "train", *module_words(), *settings]
    return JOB_KINDS[launcher.kind], training_job(config, arguments, preparation=preparation)


def _sharded(config: JobSettings, words: list[str]) -> ShardedJob:
    """Build the job that runs `config.command` with the settings `words` in shards."""
    command, launcher = config.command, config.launcher
    given: Any = parse_arguments(command, words).compose()
    require(given.shard is None, "shard", given.shard, "null: shards=N gives each pod its own")
    paths = ", ".join(launcher.claims.values())
    output = PurePosixPath(str(given.output))
    is_kept = any(output.parent.is_relative_to(path) for path in launcher.claims.values())
    wanted = f"in a volume of launcher.claims, without ..: {paths}"
    require(is_kept and ".." not in output.parts, "output", given.output, wanted)
    for key in ("input", "relatives"):
        value = getattr(given, key, None)
        require(value != "-", key, value, "a file or a folder, which every pod reads")
    if command == "score":
        require(given.mutations is None, "mutations", given.mutations, "null in shards")
    if command == "generate":
        family = given.generation.relatives
        require(family is None, "generation.relatives", family, "null in shards")
    fits = given.device != "cuda" or launcher.gpus > 0
    require(fits, "launcher.gpus", launcher.gpus, "1 for device=cuda")
    return sharded_job(launcher, config.shards, config.parallel, [command, *module_words(), *words])
