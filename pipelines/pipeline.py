"""The definition of the pipeline: prepare → train → evaluate → register → generate.

The pipeline of a sweep has the same parameters: prepare → plan → train, evaluate each run → reduce.
`local.py` runs the steps on this machine, `submit.py` compiles both for a cluster.
"""

from functools import partial
from typing import Any

from kfp import dsl
from kfp.dsl import PipelineTask
from kfp.dsl.base_component import BaseComponent
from kfp.dsl.pipeline_channel import PipelineChannel

from pipelines import components
from pipelines.pod_settings import set_gpus, set_resources, set_surroundings
from pipelines.steps import PARAMETERS, WORKSPACE

NAME = "d2plm"
RETRIES = 2  # after lost pods; the step itself retries temporary failures
EXAMPLE = "/opt/d2plm/examples/data/uniprot_20k.fasta.gz"  # in the images


def define(sweep: str | None = None, parallel: int = 0) -> BaseComponent:
    """Define the pipeline of one run, or with `sweep` of a command's runs, `parallel` at a time."""
    name, what = NAME, "prepare, train, evaluate, register, generate"
    if sweep is not None:
        name, what = f"{NAME}-sweep-{sweep}", f"the runs of d2plm {sweep}, and their table"
    function: Any = partial(_steps, sweep, parallel)
    function.__name__, function.__doc__ = name, _steps.__doc__  # which KFP reads
    return dsl.pipeline(function, name=name, description=f"A protein language model: {what}.")


def _steps(
    sweep: str | None,
    parallel: int,
    paradigm: str = "diffusion",
    experiment: str = "demo",
    model: str = "",
    trainer: str = "",
    max_steps: int = 0,
    input: str = EXAMPLE,  # as in the configuration
    work_dir: str = f"{WORKSPACE}/demo",
    registered_model: str = "",
    overrides: str = "",
    modules: str = "",
    launcher: str = "auto",
    nodes: int = 0,
    gpus: int = 0,
    node_cpu: str = "",
    node_memory: str = "",
    gpu_resource: str = "nvidia.com/gpu",
    prepare_cpu: str = "1",
    prepare_memory: str = "4Gi",
    evaluate_cpu: str = "1",
    evaluate_memory: str = "4Gi",
    evaluate_gpus: str = "0",  # KFP's driver accepts resources only as text
    claim: str = "d2plm-workspace",
    tolerations: list = [],  # noqa: B006  # type: ignore[type-arg]  # a parameter's default, for KFP
    node_selector: dict = {},  # noqa: B006  # type: ignore[type-arg]
    trainer_image: str = components.TRAINER_IMAGE,
    mmseqs2_image: str = components.MMSEQS2_IMAGE,
) -> None:
    """Train, evaluate and register a protein language model, and generate proteins with it.

    Args:
        paradigm: diffusion, flow_matching or flow_matching_uniform.
        experiment: A file of configs/experiment, such as demo or debug; null for none.
        model: A file of configs/model: nano, 8m, 35m, 150m, 450m, 3b, esm2_8m … esm2_650m. Empty:
            the experiment's.
        trainer: A file of configs/trainer: cpu, single_gpu, multi_gpu, multi_node. Empty: the
            experiment's.
        max_steps: Optimizer steps. 0: the experiment's.
        input: FASTA file or raw store of training proteins, on the volume or in the images.
        work_dir: Folder of all outputs, on the volume. A run in the same folder reuses its files;
            codes such as %Y-%m-%d become the scheduled time of the run, in UTC.
        registered_model: Name in the MLflow registry. Empty: d2plm- and the paradigm's name.
        overrides: Further settings as key=value, separated by spaces, such as
            optimizer.learning_rate=1e-3 data.max_length=512.
        modules: Modules of your own in the images that register paradigms, callbacks, …, separated
            by spaces. The first steps' image has no torch, so they import it inside functions.
        launcher: Where training runs: pytorchjob, trainjob, local (in the step's own small pod) or
            auto, which uses the kind of job that the cluster supports.
        nodes: Number of pods that train together. 0: the launcher's default, 1.
        gpus: GPUs per training pod. 0: the launcher's default, none.
        node_cpu: CPUs per training pod, such as 8. Empty: the launcher's default, 2.
        node_memory: Memory per training pod, such as 64Gi. Empty: the launcher's default, 8Gi.
        gpu_resource: Name of a GPU in the cluster's resources.
        prepare_cpu: CPUs for data preparation; beyond the demo, 4 or more.
        prepare_memory: Memory for data preparation, all of which MMseqs2 uses; beyond the demo,
            16Gi or more.
        evaluate_cpu: CPUs for evaluation and for generation; beyond the demo, 2 or more.
        evaluate_memory: Memory for evaluation and for generation; beyond the demo, 8Gi or more.
        evaluate_gpus: GPUs for evaluation and generation, as text; requires a trainer with GPUs.
        claim: PersistentVolumeClaim that all steps and the training pods mount at /workspace.
        tolerations: Tolerations of the steps' pods, such as [{"key": "nvidia.com/gpu",
            "operator": "Exists"}].
        node_selector: Node labels that the steps' pods require.
        trainer_image: Image of the training pods, all steps from train on, and a sweep's first.
        mmseqs2_image: Image of the first two steps, configure and prepare.
    """
    settings = {name: value for name, value in locals().items() if name in PARAMETERS}
    run_id, time = dsl.PIPELINE_JOB_ID_PLACEHOLDER, dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER
    finished = components.finish(run_id=run_id, time=time, work_dir=work_dir, modules=modules)
    with dsl.ExitHandler(finished, name="steps"):
        configured = components.configure(
            run_id=run_id,
            time=time,
            work_dir=work_dir,
            claim=claim,
            overrides=overrides,
            modules=modules,
            sweep=sweep or "",
            **settings,
        )
        config = configured.outputs["config"]
        prepared = components.prepare(config=config, modules=modules)
        digest = prepared.outputs["digest"]
        if sweep:
            planned = components.plan(config=config, modules=modules, data_digest=digest)
            with dsl.ParallelFor(planned.output, name="runs", parallelism=parallel) as run:
                trained, evaluated = _train_and_evaluate(run, modules, digest)
            perplexities = dsl.Collected(evaluated.outputs["perplexity"])
            reduced = components.reduce(config=config, modules=modules, perplexities=perplexities)
            small, large = [planned, reduced], [evaluated]
        else:
            trained, evaluated = _train_and_evaluate(config, modules, digest)
            model_dir = trained.outputs["model_dir"]
            of_model = {"config": config, "modules": modules, "model_dir": model_dir}
            perplexity = evaluated.outputs["perplexity"]
            registered = components.register(**of_model, perplexity=perplexity)
            version = registered.outputs["version"]
            generated = components.generate(**of_model, version=version)
            small, large = [registered], [evaluated, generated]
    # Listing the runs of a sweep needs torch.
    configure_image, memory = (trainer_image, "2Gi") if sweep else (mmseqs2_image, "1Gi")
    set_resources(configured, configure_image, "100m", memory, hours=1)
    set_resources(prepared, mmseqs2_image, prepare_cpu, prepare_memory, hours=48)
    set_resources(trained, trainer_image, "100m", "2Gi", hours=None)  # it follows a job
    set_resources(finished, trainer_image, "100m", "2Gi", hours=1)
    for step in small:
        set_resources(step, trainer_image, "500m", "4Gi", hours=2)
    for step in large:
        set_resources(step, trainer_image, evaluate_cpu, evaluate_memory, hours=48)
        set_gpus(step, gpu_resource, evaluate_gpus)
    steps = (configured, prepared, trained, *small, *large)
    for step in (*steps, finished):
        set_surroundings(step, claim, tolerations, node_selector)
        # The results are on the volume and in the registry, which KFP's cache does not check. The
        # steps themselves reuse results for data with the same digest.
        step.set_caching_options(enable_caching=False)
    for step in steps:  # retries reuse finished work, and training adopts its job by name
        step.set_retry(RETRIES, backoff_duration="5s", backoff_factor=2.0)


def _train_and_evaluate(
    config: PipelineChannel, modules: str, digest: PipelineChannel
) -> tuple[PipelineTask, PipelineTask]:
    of_run = {"config": config, "modules": modules}
    trained = components.train(**of_run, data_digest=digest)
    return trained, components.evaluate(**of_run, model_dir=trained.outputs["model_dir"])
