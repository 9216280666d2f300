"""The pipeline's steps as KFP components: each body imports d2plm and calls one function.

`settings` is the run's configuration as one line of words; see `pipelines.steps`. Big data move
by path, on storage that the steps share; what flows between the steps are digests, figures and
paths. The images are those of the pipeline's parameters.
"""

from functools import partial

from kfp import dsl

from d2plm import __version__

TRAINER_IMAGE = f"d2plm-trainer:{__version__}"
MMSEQS2_IMAGE = f"d2plm-mmseqs2:{__version__}"

# The images hold d2plm and kfp: nothing is installed when a step starts.
step = partial(dsl.component, packages_to_install=[], install_kfp_package=False)


@step(base_image=MMSEQS2_IMAGE)
def prepare(settings: str) -> str:
    """Deduplicate, cluster, split and drop leaking sequences; gives the data's digest.

    Args:
        settings: the run's configuration.
    """
    from pipelines import steps

    return steps.prepare(settings)


@step(base_image=TRAINER_IMAGE)
def train(settings: str, data_digest: str, run_id: str) -> str:
    """Train and export, in a job of its own in a cluster; gives the folder of the exported model.

    Args:
        settings: the run's configuration.
        data_digest: of the prepared training data.
        run_id: of the pipeline's run, which names the job: a retried step finds it by that.
    """
    from pipelines import steps

    return steps.train(settings, run_id)


@step(base_image=TRAINER_IMAGE)
def evaluate(settings: str, model_dir: str) -> float:
    """The likelihood bound beside the baselines; gives the perplexity.

    Args:
        settings: the run's configuration.
        model_dir: the exported model.
    """
    from pipelines import steps

    return steps.evaluate(f"{settings} 'model_dir=\"{model_dir}\"'")


@step(base_image=TRAINER_IMAGE)
def register(settings: str, model_dir: str, perplexity: float) -> str:
    """Register the evaluated model; gives the version.

    Args:
        settings: the run's configuration.
        model_dir: the exported model.
        perplexity: its evaluation's result.
    """
    from pipelines import steps

    return steps.register(f"{settings} 'model_dir=\"{model_dir}\"'")


@step(base_image=TRAINER_IMAGE)
def generate(settings: str, model_dir: str, version: str) -> str:
    """Sample proteins from the registered model; gives the FASTA file.

    Args:
        settings: the run's configuration.
        model_dir: the exported model.
        version: the registered version that these proteins come from.
    """
    from pipelines import steps

    return steps.generate(f"{settings} 'model_dir=\"{model_dir}\"'")


@step(base_image=TRAINER_IMAGE)
def finish(settings: str, run_id: str, status: dsl.PipelineTaskFinalStatus) -> None:  # type: ignore[valid-type]  # KFP's own
    """However the steps ended: leave no training job, and no MLflow run that seems to go on.

    Args:
        settings: the run's configuration.
        run_id: of the pipeline's run.
        status: how the steps ended, from KFP.
    """
    from pipelines import steps

    steps.finish(settings, status.state, status.error_message or "", run_id)
