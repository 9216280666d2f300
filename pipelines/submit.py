"""Compiling the pipeline to a file, and submitting it to a Kubeflow Pipelines server."""

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from d2plm.core.errors import require
from d2plm.core.files import written_beside
from d2plm.launch.kfp_server import Server, reaching
from pipelines.pipeline import pipeline

CRON_FIELDS = 6  # the first field is the second


def compile_pipeline(output: Path, arguments: dict[str, Any]) -> None:
    """Write the pipeline as YAML, with `arguments` as the defaults of its parameters.

    Raises:
        DataError: if the file cannot be written.
    """
    from kfp import compiler

    with written_beside(output) as partial:
        compiler.Compiler().compile(pipeline, str(partial), pipeline_parameters=arguments)


def submit(
    server: Server,
    arguments: dict[str, Any],
    experiment: str,
    name: str,
    *,
    service_account: str | None = None,
    cron: str | None = None,
) -> str:
    """Create a run of the pipeline, or with `cron` a recurring run, and return its id.

    Args:
        arguments: the pipeline's arguments.
        experiment: KFP experiment of the run, created if it does not exist.
        name: name of the run; the time is appended for a single run.
        service_account: service account of the steps; None: the server's default.
        cron: second, minute, hour, day of the month, month, day of the week; in UTC.

    Raises:
        ConfigError: if `cron` does not have six fields.
        ClusterError: if the server cannot be reached or rejects the run.
    """
    wanted = "six fields (second minute hour day month weekday), such as '0 0 3 * * 1'"
    require(cron is None or len(cron.split()) == CRON_FIELDS, "cron", cron, wanted)
    with tempfile.TemporaryDirectory(prefix="d2plm-") as folder:
        file = Path(folder) / "d2plm.yaml"
        compile_pipeline(file, arguments)
        with reaching(server.host):
            if cron is None:
                run = server.client.create_run_from_pipeline_package(
                    str(file),
                    arguments=arguments,
                    run_name=f"{name} {datetime.now():%Y-%m-%d %H:%M:%S}",
                    experiment_name=experiment,
                    namespace=server.namespace,
                    service_account=service_account,
                )
                return server.require_id(run.run_id)
            owner = server.client.create_experiment(experiment, namespace=server.namespace)
            recurring = server.client.create_recurring_run(
                owner.experiment_id,
                name,
                cron_expression=cron,
                pipeline_package_path=str(file),
                params=arguments,
                max_concurrency=1,  # concurrent runs would write to the same folders
                no_catchup=True,
                service_account=service_account,
            )
            return server.require_id(recurring.recurring_run_id)
