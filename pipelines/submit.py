"""Compiling the pipeline to a file, and submitting it to a Kubeflow Pipelines server."""

import json
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from d2plm import __version__
from d2plm.core.errors import require
from d2plm.core.files import files_digest, written_beside
from d2plm.launch.kfp_server import Server, reaching
from pipelines.pipeline import BaseComponent

# Arguments that the form of an uploaded version shows as defaults: they belong to the cluster.
DEFAULTS = ("trainer_image", "mmseqs2_image", "claim", "tolerations", "node_selector")
CRON_FIELDS = 6  # the first field is the second


def compile_pipeline(output: Path, pipeline: BaseComponent, arguments: dict[str, Any]) -> None:
    """Write a pipeline as YAML with `arguments` as defaults; `DataError` if that is impossible."""
    from kfp import compiler

    with written_beside(output) as partial:
        compiler.Compiler().compile(pipeline, str(partial), pipeline_parameters=arguments)


def submit(
    server: Server,
    pipeline: BaseComponent,
    arguments: dict[str, Any],
    experiment: str,
    name: str,
    *,
    service_account: str | None = None,
    cron: str | None = None,
    once: bool = False,
) -> str:
    """Create a run of a pipeline, or with `cron` a recurring run, and return its id.

    Args:
        experiment: KFP experiment of the run, created if it does not exist.
        name: name of the run; the time is appended for a single run.
        service_account: service account of the steps; None: the server's default.
        cron: second, minute, hour, day of the month, month, day of the week; in UTC.
        once: whether the definition is only part of the run, and not uploaded as a pipeline.

    Raises:
        ConfigError: if `cron` does not have six fields.
        ClusterError: if the server cannot be reached or rejects the run.
    """
    wanted = "six fields (second minute hour day month weekday), such as '0 0 3 * * 1'"
    require(cron is None or len(cron.split()) == CRON_FIELDS, "cron", cron, wanted)
    client = server.client
    with tempfile.TemporaryDirectory(prefix="d2plm-") as folder, reaching(server.host):
        file = Path(folder) / "d2plm.yaml"
        defaults = {key: arguments[key] for key in DEFAULTS if key in arguments}
        compile_pipeline(file, pipeline, defaults)
        inline = {"pipeline_package_path": str(file)}
        source = inline if once else _upload(server, pipeline.name, file)
        how = {"params": arguments, "service_account": service_account, **source}
        owner = client.create_experiment(experiment, namespace=server.namespace).experiment_id
        if cron is None:
            run = client.run_pipeline(owner, f"{name} {datetime.now():%Y-%m-%d %H:%M:%S}", **how)
            return server.require_id(run.run_id)
        recurring = client.create_recurring_run(
            owner,
            name,
            cron_expression=cron,
            max_concurrency=1,  # concurrent runs would write to the same folders
            no_catchup=True,
            **how,
        )
        return server.require_id(recurring.recurring_run_id)


def _upload(server: Server, name: str, file: Path) -> dict[str, str]:
    """Upload a definition as a version named by its digest, unless it exists; return the ids."""
    client, version = server.client, f"{__version__}-{files_digest(file)[:12]}"
    known = client.list_pipelines(filter=_named(name), namespace=server.namespace).pipelines
    made = client.api_models.V2beta1Pipeline(display_name=name, namespace=server.namespace)
    one = known[0] if known else client.pipelines.pipeline_service_create_pipeline(made)
    pipeline_id = server.require_id(one.pipeline_id)
    found = client.list_pipeline_versions(pipeline_id, filter=_named(version)).pipeline_versions
    uploaded = (
        found[0]
        if found
        else client.upload_pipeline_version(str(file), version, pipeline_id=pipeline_id)
    )
    return {"pipeline_id": pipeline_id, "version_id": uploaded.pipeline_version_id}


def _named(name: str) -> str:
    predicate = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    return json.dumps({"predicates": [predicate]})
