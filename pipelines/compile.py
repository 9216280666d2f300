"""Writing the pipeline as the YAML that Kubeflow Pipelines loads."""

from pathlib import Path
from typing import Any

from d2plm.core.errors import ConfigError
from pipelines.pipeline import pipeline


def compile_pipeline(output: Path, arguments: dict[str, Any]) -> None:
    """Write the pipeline, with `arguments` as the defaults of its parameters.

    Raises:
        ConfigError: if the file cannot be written.
    """
    from kfp import compiler

    partial = output.with_suffix(".partial.yaml")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        compiler.Compiler().compile(pipeline, str(partial), pipeline_parameters=arguments)
        partial.replace(output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror})") from error
