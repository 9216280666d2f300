"""The one definition of the pipeline: prepare → train → evaluate → register → generate.

`run.py` executes it on this machine, `compile.py` writes it for a cluster; there is no second copy
of the steps. What only a cluster heeds is in `pods.py`.
"""

from kfp import dsl

from pipelines import components, pods

NAME = "d2plm"
STEPS = ("prepare", "train", "evaluate", "register", "generate", "finish")
EXAMPLE = "/opt/d2plm/examples/data/uniprot_20k.fasta.gz"  # in the images


@dsl.pipeline(
    name=NAME,
    description="A protein language model: prepare, train, evaluate, register, generate.",
)
def pipeline(
    paradigm: str = "diffusion",
    experiment: str = "demo",
    model: str = "",
    trainer: str = "",
    max_steps: int = 0,
    input: str = EXAMPLE,  # the user's word for it
    work_dir: str = f"{pods.WORKSPACE}/demo",
    registered_model: str = "",
    overrides: str = "",
    launcher: str = "auto",
    nodes: int = 0,
    gpus: int = 0,
    node_cpu: str = "",
    node_memory: str = "",
    gpu_resource: str = "nvidia.com/gpu",
    prepare_cpu: str = "4",
    prepare_memory: str = "16Gi",
    evaluate_cpu: str = "2",
    evaluate_memory: str = "8Gi",
    evaluate_gpus: str = "0",  # KFP's driver reads a resource from text alone
    claim: str = "d2plm-workspace",
    tolerations: list = [],  # noqa: B006  # type: ignore[type-arg]  # a parameter's default, for KFP
    node_selector: dict = {},  # noqa: B006  # type: ignore[type-arg]
    trainer_image: str = components.TRAINER_IMAGE,
    mmseqs2_image: str = components.MMSEQS2_IMAGE,
) -> None:
    """Train, evaluate and register a protein language model, and sample from it.

    Args:
        paradigm: diffusion, flow_matching or flow_matching_uniform.
        experiment: A file of configs/experiment, such as demo or debug; null is none.
        model: A file of configs/model: nano, 8m, 35m, 150m, 450m, 3b, esm2_8m … esm2_650m. Empty:
            the experiment's.
        trainer: A file of configs/trainer: cpu, single_gpu, multi_gpu, multi_node. Empty: the
            experiment's.
        max_steps: Optimizer steps. 0: the experiment's.
        input: FASTA file or raw store that is trained on, as the pods see it: on the volume, or the
            proteins in the images.
        work_dir: Folder of all outputs, on the volume. The same one again goes on with what is in
            it.
        registered_model: Name in the MLflow registry. Empty: d2plm- and the paradigm's name.
        overrides: Further settings as key=value, separated by spaces, such as
            optimizer.learning_rate=1e-3 data.max_length=512.
        launcher: Where training runs: pytorchjob, trainjob, local (in the step's own small pod) or
            auto, which takes what the cluster has.
        nodes: Pods that train together. 0: the launcher's, which is 1.
        gpus: GPUs of each of them. 0: the launcher's, which is none.
        node_cpu: CPUs of each of them, such as 8. Empty: the launcher's, which is 2.
        node_memory: Memory of each of them, such as 64Gi. Empty: the launcher's, which is 8Gi.
        gpu_resource: What a GPU is called in the cluster's resources.
        prepare_cpu: CPUs that the preparation of the data requests.
        prepare_memory: Memory of the preparation of the data, which MMseqs2 fills.
        evaluate_cpu: CPUs that evaluation and generation request.
        evaluate_memory: Memory of evaluation and of generation.
        evaluate_gpus: GPUs of evaluation and of generation, as text; with one, also set a trainer
            of GPUs.
        claim: PersistentVolumeClaim that all steps and the training pods see at /workspace.
        tolerations: Of the steps' pods, a list as in a pod, such as [{"key": "nvidia.com/gpu",
            "operator": "Exists"}].
        node_selector: Of the steps' pods, labels of nodes as in a pod.
        trainer_image: Image of all steps but the first, and of the training pods.
        mmseqs2_image: Image of the first step.
    """
    # Before `--` a parameter that is empty or 0 says nothing. Quoted twice, for the shell's rules
    # of the line and for Hydra's: paths may hold spaces. A claim is set after null: Hydra would add
    # it to the one that is there.
    settings = (
        f"experiment={experiment} paradigm={paradigm} model={model} trainer={trainer} "
        f"trainer.max_steps={max_steps} 'data.input=\"{input}\"' 'work_dir=\"{work_dir}\"' "
        f"'tracking.registered_model=\"{registered_model}\"' "
        f"launcher={launcher} launcher.nodes={nodes} launcher.gpus={gpus} "
        f"'launcher.cpu=\"{node_cpu}\"' 'launcher.memory=\"{node_memory}\"' "
        f"launcher.gpu_resource={gpu_resource} 'launcher.image=\"{trainer_image}\"' "
        f"launcher.claims=null 'launcher.claims={{ {claim}: {pods.WORKSPACE}}}' "
        f"-- {overrides}"
    )
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    finished = components.finish(settings=settings, run_id=run_id)
    with dsl.ExitHandler(finished, name="steps"):
        prepared = components.prepare(settings=settings)
        trained = components.train(
            settings=settings,
            data_digest=prepared.output,
            run_id=run_id,
        )
        evaluated = components.evaluate(settings=settings, model_dir=trained.output)
        registered = components.register(
            settings=settings, model_dir=trained.output, perplexity=evaluated.output
        )
        generated = components.generate(
            settings=settings, model_dir=trained.output, version=registered.output
        )
    pods.give(prepared, mmseqs2_image, prepare_cpu, prepare_memory, hours=48)
    pods.give(trained, trainer_image, "100m", "2Gi", hours=None)  # it follows a job
    pods.give(registered, trainer_image, "500m", "4Gi", hours=2)
    pods.give(finished, trainer_image, "100m", "2Gi", hours=1)
    for step in (evaluated, generated):
        pods.give(step, trainer_image, evaluate_cpu, evaluate_memory, hours=48)
        pods.give_gpus(step, gpu_resource, evaluate_gpus)
    for step in (prepared, trained, evaluated, registered, generated, finished):
        pods.place(step, claim, tolerations, node_selector)
        # A step's outcome lies on the volume and in the registry, where KFP's cache does not look.
        # Steps that find their outcome there, made of data of the same digest, reuse it.
        step.set_caching_options(enable_caching=False)
    for step in (prepared, trained, evaluated, registered, generated):
        pods.retry(step)
