"""The one definition of the pipeline: prepare → train → evaluate → register → generate.

`run.py` executes it on this machine, `compile.py` writes it for a cluster; there is no second copy
of the steps.
"""

from kfp import dsl

from pipelines import components

NAME = "d2plm"


@dsl.pipeline(
    name=NAME,
    description="A protein language model: prepare, train, evaluate, register, generate.",
)
def pipeline(
    paradigm: str = "diffusion",
    experiment: str = "demo",
    work_dir: str = "/workspace/demo",
    input: str = "/workspace/uniprot_20k.fasta.gz",  # the user's word for it
    overrides: str = "",
) -> str:
    """Train, evaluate and register a protein language model, and sample from it.

    Args:
        paradigm: `diffusion` or `flow_matching`.
        experiment: a file of `configs/experiment`, or `null`.
        work_dir: folder of all outputs, on storage that the steps share.
        input: FASTA file or raw store, on storage that the steps share.
        overrides: further Hydra overrides, such as `model=35m trainer.max_steps=5000`.
    """
    # Quoted twice, for the shell's rules of the line and for Hydra's: paths may hold spaces.
    settings = (
        f"experiment={experiment} paradigm={paradigm} 'work_dir=\"{work_dir}\"' "
        f"'data.input=\"{input}\"' {overrides}"
    )
    prepared = components.prepare(settings=settings)
    trained = components.train(settings=settings, data_digest=prepared.output)
    evaluated = components.evaluate(settings=settings, model_dir=trained.output)
    registered = components.register(
        settings=settings, model_dir=trained.output, perplexity=evaluated.output
    )
    generated = components.generate(
        settings=settings, model_dir=trained.output, version=registered.output
    )
    # Every step reuses what is unchanged by itself, by digest, which KFP's cache cannot see.
    for step in (prepared, trained, evaluated, registered, generated):
        step.set_caching_options(enable_caching=False)
    return generated.output
