"""The pipeline compiled to a file, and its runs on a Kubeflow Pipelines server."""

import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from d2plm.core.errors import require
from d2plm.core.files import written_beside
from d2plm.launch.kfp_server import Server, reaching
from pipelines.pipeline import pipeline

CRON_FIELDS = 6  # KFP's begins with the second


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
        arguments: of the pipeline; `[[ScheduledTime]]` in them becomes a recurring run's time.
        experiment: that the run is shown under, created if it does not exist.
        name: of the run; a single run's also has the time.
        service_account: that its steps run as; None: the server's own choice.
        cron: second, minute, hour, day of the month, month, day of the week; in UTC.

    Raises:
        ConfigError: if `cron` has not six fields.
        ClusterError: if the server cannot be reached or refuses.
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
                return str(run.run_id)
            owner = server.client.create_experiment(experiment, namespace=server.namespace)
            recurring = server.client.create_recurring_run(
                owner.experiment_id,
                name,
                cron_expression=cron,
                pipeline_package_path=str(file),
                params=arguments,
                max_concurrency=1,  # two at once would write to the same folders
                no_catchup=True,
                service_account=service_account,
            )
            return str(recurring.recurring_run_id)
