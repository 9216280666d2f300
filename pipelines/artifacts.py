"""The artifacts of the steps: what Kubeflow Pipelines lists, shows and compares.

Each function fills one output of a step from the run's files. An artifact is KFP's own object, with
a `path` for a small document and `metadata`; the data themselves stay on the volume.
"""

import os
import shutil
from base64 import b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from d2plm.config import read
from d2plm.core.redaction import redacted
from d2plm.data.manifest import MANIFEST, read_manifest
from d2plm.settings.commands import PipelineSettings

MOST_BYTES = 10_000_000  # maximum size of a document in KFP's store


def fill(config: Path, outputs: Mapping[str, Any], result: Any) -> None:
    """Fill the output artifacts of a step that returned `result`."""
    for name, artifact in outputs.items():
        FILLED[name](read("pipeline", config), artifact, result)


def dataset(config: PipelineSettings, artifact: Any, _: Any) -> None:
    """Describe prepared data: digests, counts, dropped records; the document is its manifest."""
    folder = Path(config.data.prepared_dir)
    manifest = read_manifest(folder) or {}
    counts = dict(manifest["counts"])
    dropped = {f"dropped_{reason}": number for reason, number in counts.pop("dropped").items()}
    digests = {f"{split}_digest": digest for split, digest in manifest["digests"].items()}
    artifact.metadata.update(folder=str(folder), **digests, **counts, **dropped)
    _copy(folder / MANIFEST, artifact)


def model(config: PipelineSettings, artifact: Any, _: Any) -> None:
    """Describe the trained model: folder, size and speed; the document is its model card."""
    from d2plm.export.exported_model import parameters_of, read_provenance
    from d2plm.tracking.mlflow_run import RUN_FILE
    from d2plm.tracking.tracker_run import read_run_file
    from d2plm.training.callbacks.metric_logger import METRICS_FILE, read_metrics

    folder, output_dir = Path(config.model_dir), Path(config.output_dir)
    rates = [row.get("tokens_per_second") for row in read_metrics(output_dir / METRICS_FILE)]
    run = read_run_file(output_dir / RUN_FILE) or {}
    found = {
        "folder": str(folder),
        "parameters": parameters_of(folder),
        "steps": (read_provenance(folder) or {}).get("step"),
        "tokens_per_second": next((rate for rate in reversed(rates) if rate is not None), None),
        "mlflow_run": _in_mlflow(
            config, f"experiments/{run.get('experiment_id')}/runs/{run.get('run_id')}"
        ),
    }
    artifact.metadata.update({name: value for name, value in found.items() if value is not None})
    _copy(folder / "README.md", artifact)


def metrics(config: PipelineSettings, artifact: Any, _: Any) -> None:
    """Log the evaluation's figures under their MLflow names."""
    from d2plm.commands.evaluate import metrics_of
    from d2plm.evaluation.result import read_evaluation

    evaluation = read_evaluation(Path(config.output_dir))
    assert evaluation is not None, "the step has written it"
    for name, value in metrics_of(evaluation).items():
        artifact.log_metric(name.removeprefix("evaluation/"), value)


def report(config: PipelineSettings, artifact: Any, _: Any) -> None:
    _copy(Path(config.output_dir) / "report.html", artifact)


def registered(config: PipelineSettings, artifact: Any, registration: Any) -> None:
    """Describe the registered version and its alias; the document is its address."""
    name, version = registration.name, registration.version
    address = f"models:/{name}/{version}"
    alias = "champion" if registration.is_champion else "candidate"
    artifact.metadata.update(model=address, alias=alias)
    if page := _in_mlflow(config, f"models/{name}/versions/{version}"):
        artifact.metadata["mlflow_version"] = page
    Path(artifact.path).write_text(f"{address}\n", encoding="utf-8")


def sequences(config: PipelineSettings, artifact: Any, file: str) -> None:
    artifact.metadata["file"] = file
    _copy(Path(file), artifact)


def designs(config: PipelineSettings, artifact: Any, _: Any) -> None:
    from d2plm.export.designs import DESIGNS

    _copy(Path(config.output_dir) / DESIGNS, artifact)


def table(_: PipelineSettings, artifact: Any, file: str) -> None:
    _copy(Path(file), artifact)


def figure(_: PipelineSettings, artifact: Any, file: str) -> None:
    """Embed the figure of a sweep in an HTML page, because the UI shows no images."""
    picture = Path(file).with_suffix(".png")
    if picture.is_file():
        data = b64encode(picture.read_bytes()).decode()
        page = f'<html><img style="max-width: 100%" src="data:image/png;base64,{data}"></html>'
        Path(artifact.path).write_text(page, encoding="utf-8")


FILLED: dict[str, Callable[[PipelineSettings, Any, Any], None]] = {
    one.__name__: one
    for one in (dataset, model, metrics, report, registered, sequences, designs, table, figure)
}


def _copy(file: Path, artifact: Any) -> None:
    """Copy a document unless it is absent or too large for KFP's store; it stays on the volume."""
    if file.is_file() and file.stat().st_size <= MOST_BYTES:
        shutil.copyfile(file, artifact.path)


def _in_mlflow(config: PipelineSettings, page: str) -> str | None:
    """Address of a page of MLflow's UI; None without a server."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or config.tracking.uri or ""
    return f"{redacted(uri).rstrip('/')}/#/{page}" if uri.startswith("http") else None
