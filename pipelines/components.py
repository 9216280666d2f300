"""The pipeline's steps as KFP components: each body imports d2plm and calls one function.

`settings` is the run's configuration as one line of Hydra overrides. Big data move by path, on
storage that the steps share; what flows between the steps are digests, figures and paths. The
images' names hold the word python, which KFP's local runner wants to see.
"""

from kfp import dsl

from d2plm import __version__

TRAINER_IMAGE = f"d2plm-trainer-python:{__version__}"
MMSEQS2_IMAGE = f"d2plm-mmseqs2-python:{__version__}"


@dsl.component(base_image=MMSEQS2_IMAGE, packages_to_install=[], install_kfp_package=False)
def prepare(settings: str) -> str:
    """Deduplicate, cluster, split and drop leaking sequences; gives the data's digest.

    Args:
        settings: Hydra overrides.
    """
    from d2plm.launch import steps

    return steps.prepare(settings)


@dsl.component(base_image=TRAINER_IMAGE, packages_to_install=[], install_kfp_package=False)
def train(settings: str, data_digest: str) -> str:
    """Train and export; gives the folder of the exported model.

    Args:
        settings: Hydra overrides.
        data_digest: of the prepared training data.
    """
    from d2plm.launch import steps

    return steps.train(settings)


@dsl.component(base_image=TRAINER_IMAGE, packages_to_install=[], install_kfp_package=False)
def evaluate(settings: str, model_dir: str) -> float:
    """The likelihood bound beside the baselines; gives the perplexity.

    Args:
        settings: Hydra overrides.
        model_dir: the exported model.
    """
    from d2plm.launch import steps

    return steps.evaluate(f"{settings} 'model_dir=\"{model_dir}\"'")


@dsl.component(base_image=TRAINER_IMAGE, packages_to_install=[], install_kfp_package=False)
def register(settings: str, model_dir: str, perplexity: float) -> str:
    """Register the evaluated model; gives the version.

    Args:
        settings: Hydra overrides.
        model_dir: the exported model.
        perplexity: its evaluation's result.
    """
    from d2plm.launch import steps

    return steps.register(f"{settings} 'model_dir=\"{model_dir}\"'")


@dsl.component(base_image=TRAINER_IMAGE, packages_to_install=[], install_kfp_package=False)
def generate(settings: str, model_dir: str, version: str) -> str:
    """Sample proteins from the registered model; gives the FASTA file.

    Args:
        settings: Hydra overrides.
        model_dir: the exported model.
        version: the registered version that these proteins come from.
    """
    from d2plm.launch import steps

    return steps.generate(f"{settings} 'model_dir=\"{model_dir}\"'")
