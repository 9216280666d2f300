"""The one definition of the pipeline: prepare → train → evaluate → register → generate.

`run_here.py` executes it on this machine, `submit.py` compiles it for a cluster. The settings of
its pods are in `pod_settings.py`.
"""

from kfp import dsl

from pipelines import components
from pipelines.pod_settings import set_gpus, set_resources, set_surroundings
from pipelines.steps import PARAMETERS, WORKSPACE

NAME = "d2plm"
STEPS = ("configure", "prepare", "train", "evaluate", "register", "generate", "finish")
RETRIES = 2  # after a lost node, or a server that was away
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
    input: str = EXAMPLE,  # as in the configuration
    work_dir: str = f"{WORKSPACE}/demo",
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
        experiment: A file of configs/experiment, such as demo or debug; null for none.
        model: A file of configs/model: nano, 8m, 35m, 150m, 450m, 3b, esm2_8m … esm2_650m. Empty:
            the experiment's.
        trainer: A file of configs/trainer: cpu, single_gpu, multi_gpu, multi_node. Empty: the
            experiment's.
        max_steps: Optimizer steps. 0: the experiment's.
        input: FASTA file or raw store that is trained on, as the pods see it: on the volume, or the
            proteins in the images.
        work_dir: Folder of all outputs, on the volume. A run in the same folder
            continues with what is in it.
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
        trainer_image: Image of the steps from training on, and of the training pods.
        mmseqs2_image: Image of the first two steps, configure and prepare.
    """
    settings = {name: value for name, value in locals().items() if name in PARAMETERS}
    run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    finished = components.finish(run_id=run_id, work_dir=work_dir)
    with dsl.ExitHandler(finished, name="steps"):
        configured = components.configure(
            run_id=run_id,
            work_dir=work_dir,
            claim=claim,
            overrides=overrides,
            **settings,
        )
        config = configured.output
        prepared = components.prepare(config=config)
        trained = components.train(config=config, data_digest=prepared.output)
        model_dir = trained.output
        evaluated = components.evaluate(config=config, model_dir=model_dir)
        registered = components.register(
            config=config, model_dir=model_dir, perplexity=evaluated.output
        )
        generated = components.generate(
            config=config, model_dir=model_dir, version=registered.output
        )
    set_resources(configured, mmseqs2_image, "100m", "1Gi", hours=1)
    set_resources(prepared, mmseqs2_image, prepare_cpu, prepare_memory, hours=48)
    set_resources(trained, trainer_image, "100m", "2Gi", hours=None)  # it follows a job
    set_resources(registered, trainer_image, "500m", "4Gi", hours=2)
    set_resources(finished, trainer_image, "100m", "2Gi", hours=1)
    for step in (evaluated, generated):
        set_resources(step, trainer_image, evaluate_cpu, evaluate_memory, hours=48)
        set_gpus(step, gpu_resource, evaluate_gpus)
    steps = (configured, prepared, trained, evaluated, registered, generated)
    for step in (*steps, finished):
        set_surroundings(step, claim, tolerations, node_selector)
        # The results are on the volume and in the registry, which KFP's cache does not look at.
        # Steps that find results there for data of the same digest reuse them.
        step.set_caching_options(enable_caching=False)
    for step in steps:  # each finds what is done already, and training adopts its job by name
        step.set_retry(RETRIES, backoff_duration="60s", backoff_factor=2.0)
