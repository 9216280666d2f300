"""Runs on a Kubeflow Pipelines server: submitted once, or again and again by a schedule."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from d2plm.core.errors import require
from pipelines.compile import compile_pipeline
from pipelines.server import Server, reaching

CRON_FIELDS = 6  # KFP's begins with the second


def submit(
    server: Server,
    arguments: dict[str, Any],
    experiment: str,
    name: str,
    service_account: str | None = None,
) -> str:
    """Create a run of the pipeline and give its id.

    Args:
        server: where.
        arguments: of the pipeline.
        experiment: that the run is shown under; it is created where there is none.
        name: what the run is called, beside the time.
        service_account: that its steps run as; None: the server's own choice.

    Raises:
        ClusterError: if the server cannot be reached or refuses.
    """
    with _compiled(arguments) as file, reaching(server.host):
        run = server.client.create_run_from_pipeline_package(
            str(file),
            arguments=arguments,
            run_name=f"{name} {datetime.now():%Y-%m-%d %H:%M:%S}",
            experiment_name=experiment,
            namespace=server.namespace,
            service_account=service_account,
        )
    return str(run.run_id)


def schedule(
    server: Server,
    arguments: dict[str, Any],
    experiment: str,
    name: str,
    cron: str,
    service_account: str | None = None,
) -> str:
    """Create a recurring run of the pipeline and give its id.

    Args:
        server: where.
        arguments: of the pipeline; `[[ScheduledTime]]` in them becomes a run's own time.
        experiment: that its runs are shown under; it is created where there is none.
        name: what it is called.
        cron: second, minute, hour, day of the month, month, day of the week; in UTC.
        service_account: that their steps run as; None: the server's own choice.

    Raises:
        ConfigError: if `cron` has not six fields.
        ClusterError: if the server cannot be reached or refuses.
    """
    wanted = "six fields (second minute hour day month weekday), such as '0 0 3 * * 1'"
    require(len(cron.split()) == CRON_FIELDS, "cron", cron, wanted)
    with _compiled(arguments) as file, reaching(server.host):
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


def cancel(server: Server, run_id: str) -> None:
    """End a run; its train step then deletes its job.

    Raises:
        ClusterError: if the server cannot be reached or refuses.
    """
    with reaching(server.host):
        server.client.terminate_run(run_id)


@contextmanager
def _compiled(arguments: dict[str, Any]) -> Iterator[Path]:
    """The pipeline as a file, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="d2plm-") as folder:
        file = Path(folder) / "d2plm.yaml"
        compile_pipeline(file, arguments)
        yield file
