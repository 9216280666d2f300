"""Runs: one MLflow run from preparation to registry, or none at all.

The run's id is kept beside the outputs, so that every step of a pipeline, and a resumed training,
writes into the same run. Metrics are sent in batches. MLflow is imported only where it is used.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from d2plm.errors import TrackingError, require_choice

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRACKERS = ("mlflow", "none")
RUN_FILE = "tracking_run.json"
BATCH = 200


class Run(Protocol):
    """What a command may say to its tracking run."""

    @property
    def id(self) -> str | None: ...

    def log_params(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int = 0) -> None: ...
    def log_dataset(
        self, name: str, digest: str, context: str, profile: dict[str, Any]
    ) -> None: ...
    def log_file(self, file: Path, folder: str | None = None) -> None: ...
    def set_tags(self, tags: dict[str, str]) -> None: ...
    def flush(self) -> None: ...


class NoRun:
    """Tracking switched off."""

    id: str | None = None

    def log_params(self, params: dict[str, Any]) -> None: ...
    def log_metrics(self, metrics: dict[str, float], step: int = 0) -> None: ...
    def log_dataset(
        self, name: str, digest: str, context: str, profile: dict[str, Any]
    ) -> None: ...
    def log_file(self, file: Path, folder: str | None = None) -> None: ...
    def set_tags(self, tags: dict[str, str]) -> None: ...
    def flush(self) -> None: ...


class MLflowRun:
    """An MLflow run, written to in batches.

    Args:
        client: of the store that holds the run.
        run_id: the run.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.client, self.id = client, run_id
        self._pending: list[Any] = []

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters; those that are already there stay as they are."""
        from mlflow.entities import Param

        known = self.client.get_run(self.id).data.params
        fresh = [Param(key, str(value)[:6000]) for key, value in params.items() if key not in known]
        for first in range(0, len(fresh), 100):
            self.client.log_batch(self.id, params=fresh[first : first + 100])

    def log_metrics(self, metrics: dict[str, float], step: int = 0) -> None:
        """Metrics of a step; sent when enough have come together, or at `flush`."""
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._pending += [Metric(name, float(value), now, step) for name, value in metrics.items()]
        if len(self._pending) >= BATCH:
            self.flush()

    def log_dataset(self, name: str, digest: str, context: str, profile: dict[str, Any]) -> None:
        """A data set that the run reads, by name and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:36],
            source_type="local",
            source=json.dumps({"name": name}),
            profile=json.dumps(profile),
        )
        tag = InputTag(key="mlflow.data.context", value=context)
        self.client.log_inputs(self.id, [DatasetInput(dataset=dataset, tags=[tag])])

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """A file, as an artifact."""
        self.client.log_artifact(self.id, str(file), folder)

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags; these may change during a run."""
        for key, value in tags.items():
            self.client.set_tag(self.id, key, value)

    def flush(self) -> None:
        """Send what is pending."""
        pending, self._pending = self._pending, []
        for first in range(0, len(pending), 1000):
            self.client.log_batch(self.id, metrics=pending[first : first + 1000])


@contextmanager
def tracking_run(
    output_dir: Path,
    *,
    tracker: str = "mlflow",
    uri: str | None = None,
    experiment: str = "d2plm",
    run_name: str | None = None,
    final: bool = False,
) -> Iterator[Run]:
    """The run that belongs to `output_dir`, begun if it has none.

    `MLFLOW_TRACKING_URI` wins over `uri`, and `MLFLOW_RUN_ID` over the run on file. An exception
    marks the run FAILED, an interrupt or SIGTERM KILLED; `final` marks it FINISHED at the end.

    Raises:
        TrackingError: if the store cannot be opened.
    """
    require_choice("tracking.tracker", tracker, TRACKERS)
    if tracker == "none":
        yield NoRun()
        return
    client = open_client(uri)
    run = MLflowRun(client, _find_or_begin(client, output_dir, experiment, run_name))
    try:
        yield run
        run.flush()
    except (KeyboardInterrupt, SystemExit):
        _end(run, "KILLED")
        raise
    except BaseException:
        _end(run, "FAILED")
        raise
    if final:
        _end(run, "FINISHED")


def open_client(uri: str | None) -> "MlflowClient":
    """A client of the tracking store; `MLFLOW_TRACKING_URI` wins over `uri`.

    Raises:
        TrackingError: if it cannot be opened.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        import mlflow
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise TrackingError(
            f"MLflow is not installed ({error}); install d2plm[tracking-server], or set "
            "tracking.tracker=none"
        ) from error
    address = os.environ.get("MLFLOW_TRACKING_URI") or uri
    if address and address.startswith("sqlite:///"):
        Path(address.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    try:
        mlflow.set_tracking_uri(address)
        client = mlflow.MlflowClient(tracking_uri=address)
        client.search_experiments(max_results=1)
    except (MlflowException, OSError, ImportError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise TrackingError(
            f"cannot reach the MLflow store {address}: {first_line}; start it, correct "
            "tracking.uri, or set tracking.tracker=none"
        ) from error
    return client


def _find_or_begin(
    client: "MlflowClient", output_dir: Path, experiment: str, run_name: str | None
) -> str:
    from mlflow.exceptions import MlflowException

    given = os.environ.get("MLFLOW_RUN_ID")
    file = output_dir / RUN_FILE
    on_file = json.loads(file.read_text())["run_id"] if file.is_file() else None
    for run_id in filter(None, (given, on_file)):
        try:
            client.update_run(run_id, status="RUNNING")
        except MlflowException:
            if run_id == given:
                raise TrackingError(f"MLFLOW_RUN_ID={run_id}: the store has no such run") from None
        else:
            return run_id
    known = client.get_experiment_by_name(experiment)
    if known is None:
        artifacts = _artifact_location(experiment)
        experiment_id = client.create_experiment(experiment, artifact_location=artifacts)
    else:
        experiment_id = known.experiment_id
    run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
    output_dir.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"run_id": run_id, "experiment_id": experiment_id}))
    os.replace(partial, file)
    return run_id


def _artifact_location(experiment: str) -> str | None:
    """Beside a local SQLite store; a server decides for itself."""
    import mlflow

    address = mlflow.get_tracking_uri()
    if not address.startswith("sqlite:///"):
        return None
    folder = Path(address.removeprefix("sqlite:///")).resolve().parent
    return (folder / "mlflow-artifacts" / experiment).as_uri()


def _end(run: MLflowRun, status: str) -> None:
    run.flush()
    run.client.set_terminated(run.id, status=status)
