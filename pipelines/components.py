"""The pipeline's steps as KFP components: each body imports d2plm and calls one function.

`config` is the path of the configuration that the first step composes; `modules` register the
user's own parts. Data are passed by path on shared storage. The value that a step returns is an
argument of the next step, which orders them; the UI shows it and the artifacts.
"""

from functools import partial
from typing import NamedTuple

from kfp import dsl

from d2plm import __version__

TRAINER_IMAGE = f"d2plm-trainer:{__version__}"
MMSEQS2_IMAGE = f"d2plm-mmseqs2:{__version__}"

# The images contain d2plm and kfp, so nothing is installed when a step starts.
step = partial(dsl.component, packages_to_install=[], install_kfp_package=False)


@step(base_image=MMSEQS2_IMAGE)
def configure(
    run_id: str,
    time: str,
    work_dir: str,
    claim: str,
    overrides: str,
    modules: str,
    sweep: str,
    paradigm: str,
    experiment: str,
    model: str,
    trainer: str,
    max_steps: int,
    input: str,
    registered_model: str,
    launcher: str,
    nodes: int,
    gpus: int,
    node_cpu: str,
    node_memory: str,
    gpu_resource: str,
    trainer_image: str,
) -> NamedTuple("Configured", [("config", str)]):  # type: ignore[valid-type]  # KFP's own form
    """Compose the run's configuration from the pipeline's parameters; returns its path."""
    parameters = dict(locals())
    from pipelines import steps

    return (steps.configure(**parameters),)


@step(base_image=MMSEQS2_IMAGE)
def prepare(
    config: str,
    modules: str,
    dataset: dsl.Output[dsl.Dataset],
) -> NamedTuple("Prepared", [("digest", str)]):  # type: ignore[valid-type]
    """Deduplicate, cluster and split the proteins, and remove leaks; returns the data's digest."""
    from pipelines import steps

    steps.load(modules)
    return (steps.prepare(config, dataset=dataset),)


@step(base_image=TRAINER_IMAGE)
def plan(config: str, modules: str, data_digest: str) -> list:  # type: ignore[type-arg]  # KFP's
    """List the runs of a sweep that have not finished; returns their configurations' paths."""
    from pipelines import steps, sweep

    steps.load(modules)
    return sweep.plan(config)


@step(base_image=TRAINER_IMAGE)
def train(
    config: str,
    modules: str,
    data_digest: str,
    model: dsl.Output[dsl.Model],
) -> NamedTuple("Trained", [("model_dir", str)]):  # type: ignore[valid-type]
    """Train and export, in a cluster as a separate job; returns the exported model's folder."""
    from pipelines import steps

    steps.load(modules)
    return (steps.train(config, model=model),)


@step(base_image=TRAINER_IMAGE)
def evaluate(
    config: str,
    modules: str,
    model_dir: str,
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
) -> NamedTuple("Evaluated", [("perplexity", float)]):  # type: ignore[valid-type]
    """Compare the likelihood bound with the baselines; returns the perplexity."""
    from pipelines import steps

    steps.load(modules)
    return (steps.evaluate(config, metrics=metrics, report=report),)


@step(base_image=TRAINER_IMAGE)
def register(
    config: str, modules: str, model_dir: str, perplexity: float, registered: dsl.Output[dsl.Model]
) -> NamedTuple("Registered", [("version", str)]):  # type: ignore[valid-type]
    """Register the evaluated model; returns its version."""
    from pipelines import steps

    steps.load(modules)
    return (steps.register(config, registered=registered).version,)


@step(base_image=TRAINER_IMAGE)
def generate(
    config: str,
    modules: str,
    model_dir: str,
    version: str,
    sequences: dsl.Output[dsl.Artifact],
    designs: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
) -> NamedTuple("Generated", [("file", str)]):  # type: ignore[valid-type]
    """Generate proteins with the registered model; returns the path of the FASTA file."""
    from pipelines import steps

    steps.load(modules)
    return (steps.generate(config, sequences=sequences, designs=designs, report=report),)


@step(base_image=TRAINER_IMAGE)
def reduce(
    config: str,
    modules: str,
    perplexities: list,
    table: dsl.Output[dsl.Markdown],
    figure: dsl.Output[dsl.HTML],
) -> NamedTuple("Reduced", [("file", str)]):  # type: ignore[valid-type]
    """Reduce the finished runs of a sweep to a table and a figure; returns the table's path."""
    from pipelines import steps, sweep

    steps.load(modules)
    return (sweep.reduce(config, table=table, figure=figure),)


@step(base_image=TRAINER_IMAGE)
def finish(
    run_id: str,
    time: str,
    work_dir: str,
    modules: str,
    status: dsl.PipelineTaskFinalStatus,  # type: ignore[valid-type]  # KFP's own
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """End the training job and the MLflow run that failed or cancelled steps left behind."""
    from pipelines import steps

    folder = steps.dated(work_dir, time)
    steps.finish(run_id, folder, status.state, summary=summary, modules=modules)
