"""MLflow: its store, and a run in it from preparation to registry.

Metrics are sent in batches, and a resumed run sends the steps after its checkpoint again: MLflow
keeps both points, which are equal up to rates. MLflow is imported only where it is used.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2plm.core.errors import TrackingError
from d2plm.core.redaction import redacted, redacted_line, redacted_value
from d2plm.tracking.names import with_size
from d2plm.tracking.run_file import keeping, run_on_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_FILE = "tracking_run.json"
PARENT_TAG = "mlflow.parentRunId"
DESCRIPTION_TAG = "mlflow.note.content"
VERSION_TAG = "registered_version"
GIT_TAG, SOURCE_TAG = "mlflow.source.git.commit", "mlflow.source.name"
# By which the UI takes an experiment for one of training, not of prompts and agents.
TRAINING_KIND = {"mlflow.experimentKind": "custom_model_development"}
BATCH = 200
MAX_PARAM, MAX_PARAM_KEY, MAX_TAG, MAX_DIGEST = 6000, 250, 8000, 36  # characters that MLflow takes
# MLflow's description of a column, for data sets of protein sequences.
_SCHEMA = {"mlflow_colspec": [{"name": "sequence", "type": "string", "required": True}]}
_NOT_IN_KEYS = re.compile(r"[^\w\-. /:]")

_NO_SUCH_RUN = "RESOURCE_DOES_NOT_EXIST"

log = logging.getLogger(__name__)


class MLflowRun:
    """An MLflow run, written to in batches; every method raises TrackingError if the store refuses.

    Args:
        client: of the store that holds the run.
        run_id: the run.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.client, self.id = client, run_id
        self._pending: list[Any] = []

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters, without secrets; those that are already there stay as they are."""
        from mlflow.entities import Param

        with reaching(self.client, f"log parameters of run {self.id}"):
            known = self.client.get_run(self.id).data.params
            named = {_NOT_IN_KEYS.sub("_", key)[:MAX_PARAM_KEY]: key for key in params}
            fresh = [
                Param(name, str(redacted_value(key, params[key]))[:MAX_PARAM])
                for name, key in named.items()
                if name not in known
            ]
            for first in range(0, len(fresh), 100):
                self.client.log_batch(self.id, params=fresh[first : first + 100])

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Metrics of a step; sent when enough have come together, or at `flush`.

        Without a step they are at step 0, and what the run says already is not said again.
        """
        from mlflow.entities import Metric

        if step is None:
            with reaching(self.client, f"read metrics of run {self.id}"):
                known = self.client.get_run(self.id).data.metrics
            metrics = {name: value for name, value in metrics.items() if known.get(name) != value}
        now = int(time.time() * 1000)
        self._pending += [
            Metric(name, float(value), now, step or 0) for name, value in metrics.items()
        ]
        if len(self._pending) >= BATCH:
            self.flush()

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """A data set that the run reads, as its input, by name and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=digest[:MAX_DIGEST],
            source_type="local",
            source=json.dumps({"uri": str(source)}),
            schema=json.dumps(_SCHEMA),
            profile=json.dumps(profile),
        )
        tag = InputTag(key="mlflow.data.context", value=context)
        with reaching(self.client, f"log data set {name} of run {self.id}"):
            self.client.log_inputs(self.id, [DatasetInput(dataset=dataset, tags=[tag])])

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """A file, as an artifact."""
        with reaching(self.client, f"log {file} to run {self.id}"):
            self.client.log_artifact(self.id, str(file), folder)

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags; these may change during a run."""
        from mlflow.entities import RunTag

        with reaching(self.client, f"set tags of run {self.id}"):
            told = [RunTag(key, value[:MAX_TAG]) for key, value in tags.items()]
            self.client.log_batch(self.id, tags=told)

    def describe(self, text: str) -> None:
        """The run's description, Markdown."""
        self.set_tags({DESCRIPTION_TAG: text})

    def show_size(self, title: str, size: str) -> None:
        """Put the size into the name of a run that nobody has named; see `names.with_size`."""
        with reaching(self.client, f"name run {self.id}"):
            name = with_size(self.client.get_run(self.id).info.run_name, title, size)
            if name is not None:
                self.client.update_run(self.id, name=name)

    def flush(self) -> None:
        """Send what is pending; what cannot be sent stays pending."""
        while self._pending:
            with reaching(self.client, f"log metrics of run {self.id}"):
                self.client.log_batch(self.id, metrics=self._pending[:1000])
            del self._pending[:1000]


@contextmanager
def system_metrics(run: MLflowRun, seconds: float | None) -> Iterator[None]:
    """MLflow's own watch of processors, memory, network and GPUs, while this is open.

    It is a thread, which has ended when this has. It needs psutil, and for NVIDIA's GPUs
    nvidia-ml-py: without the first nothing is watched, which is logged.

    Args:
        run: that is told, under `system/…`.
        seconds: between samples, which `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` wins over; None
            watches nothing.
    """
    if seconds is None:
        yield
        return
    if find_spec("psutil") is None:
        log.info("no system metrics: psutil is not installed; install d2plm[system-metrics]")
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
    with reaching(run.client, f"watch the machine for run {run.id}"):
        monitor = SystemMetricsMonitor(
            run.id,
            sampling_interval=seconds,
            resume_logging=True,
            tracking_uri=run.client.tracking_uri,
        )
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


@contextmanager
def mlflow_run(
    output_dir: Path,
    *,
    uri: str | None = None,
    experiment: str = "d2plm",
    run_name: str | None = None,
    parent_run_id: str | None = None,
) -> Iterator[MLflowRun]:
    """The MLflow run that belongs to `output_dir`; see `runs.tracking_run`.

    `MLFLOW_TRACKING_URI` wins over `uri`, `MLFLOW_RUN_ID` over the run on file and
    `MLFLOW_EXPERIMENT_ID` over `experiment`: Kubeflow Pipelines sets them. An exception
    marks the run FAILED, an interrupt or SIGTERM KILLED; otherwise it is FINISHED at the end, and
    RUNNING again when a further step goes on with it.

    Raises:
        TrackingError: if the store cannot be reached or refuses, or `output_dir` cannot be written.
    """
    client = open_client(uri)
    if parent_run_id is not None:
        _require_run(client, parent_run_id)
    run = MLflowRun(client, _find_or_begin(client, output_dir, experiment, run_name))
    if parent_run_id is not None:
        run.set_tags({PARENT_TAG: parent_run_id})
    try:
        yield run
        run.flush()
    except (KeyboardInterrupt, SystemExit):
        _end_broken(run, "KILLED")
        raise
    except BaseException:
        _end_broken(run, "FAILED")
        raise
    _end(run, "FINISHED")


def end_left_running(
    output_dir: Path, status: str, *, uri: str | None = None, tags: dict[str, str]
) -> str | None:
    """End the run of `output_dir` where whoever wrote to it could not, being killed.

    A run whose model is registered stays FINISHED. One that is not has been FINISHED by an earlier
    step alone.

    Args:
        output_dir: where a run's outputs are.
        status: FAILED or KILLED.
        uri: of the MLflow store; `MLFLOW_TRACKING_URI` wins.
        tags: why; also set on a run that has ended badly before, and knows less of it.

    Returns:
        The run's id; None where there is none that was left running.

    Raises:
        TrackingError: if the store cannot be reached or refuses.
    """
    run_id = os.environ.get("MLFLOW_RUN_ID") or run_on_file(output_dir / RUN_FILE)
    if run_id is None:
        return None
    run = MLflowRun(open_client(uri), run_id)
    with reaching(run.client, f"find run {run_id}"):
        found = run.client.get_run(run_id)
    standing = found.info.status
    if standing == "FINISHED" and VERSION_TAG in found.data.tags:
        return None
    run.set_tags({key: value for key, value in tags.items() if value})
    if standing not in ("RUNNING", "SCHEDULED", "FINISHED"):
        return None
    _end(run, status)
    return run_id


def open_client(uri: str | None) -> "MlflowClient":
    """A client of the tracking store; `MLFLOW_TRACKING_URI` wins over `uri`.

    Raises:
        TrackingError: if it cannot be opened.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        import mlflow
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise TrackingError(
            f"MLflow is not installed ({error}); install d2plm[tracking-server], or "
            "leave mlflow out of tracking.trackers"
        ) from error
    address = os.environ.get("MLFLOW_TRACKING_URI") or uri
    try:
        if address and address.startswith("sqlite:///"):
            Path(address.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(address)
        client = mlflow.MlflowClient(tracking_uri=address)
        client.search_experiments(max_results=1)
    except (MlflowException, OSError, ImportError) as error:
        raise TrackingError(
            f"cannot reach the MLflow store {redacted(address or mlflow.get_tracking_uri())}: "
            f"{redacted_line(error)}; start it, correct tracking.uri, or leave mlflow "
            "out of tracking.trackers"
        ) from error
    return client


@contextmanager
def reaching(client: "MlflowClient", what: str) -> Iterator[None]:
    """Turn a failure of the store into one line; hold nothing but calls of the client inside.

    Args:
        client: of the store.
        what: what is being done, completing "cannot …".

    Raises:
        TrackingError: if the store cannot be reached or refuses.
    """
    try:
        yield
    except Exception as error:  # stores of artifacts raise their own library's exceptions too
        raise TrackingError(
            f"cannot {what} in the MLflow store {redacted(client.tracking_uri)}: "
            f"{redacted_line(error)}; check the store and its address, then run this again"
        ) from error


def _find_or_begin(
    client: "MlflowClient", output_dir: Path, experiment: str, run_name: str | None
) -> str:
    given = os.environ.get("MLFLOW_RUN_ID")
    file = output_dir / RUN_FILE
    if given:
        if not _reopen(client, given):
            raise TrackingError(
                f"MLFLOW_RUN_ID={given}: the store {redacted(client.tracking_uri)} has no such "
                "run; correct it or unset it"
            )
        return given
    on_file = run_on_file(file)
    if on_file is not None:
        if _reopen(client, on_file):
            return on_file
        log.warning("%s: the store has no run %s; beginning another", file, on_file)
    with keeping(file) as run:
        run["experiment_id"], run["run_id"] = _begin(client, experiment, run_name)
    return run["run_id"]


def _require_run(client: "MlflowClient", parent_run_id: str) -> None:
    """Refuse a parent that the store does not have: MLflow would show its children nowhere."""
    from mlflow.exceptions import MlflowException

    with reaching(client, f"find tracking.parent_run_id={parent_run_id}"):
        try:
            client.get_run(parent_run_id)
            return
        except MlflowException as error:
            if error.error_code != _NO_SUCH_RUN:
                raise
    raise TrackingError(
        f"tracking.parent_run_id={parent_run_id}: the store {redacted(client.tracking_uri)} has no "
        "such run; begin it first, or set null"
    )


def _reopen(client: "MlflowClient", run_id: str) -> bool:
    """Set a run RUNNING again; False if the store says that there is none."""
    from mlflow.exceptions import MlflowException

    with reaching(client, f"reopen run {run_id}"):
        try:
            client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != _NO_SUCH_RUN:
                raise
            return False
    return True


def _begin(client: "MlflowClient", experiment: str, run_name: str | None) -> tuple[str, str]:
    """(experiment, run), by id."""
    given = os.environ.get("MLFLOW_EXPERIMENT_ID")
    with reaching(client, f"begin a run of experiment {given or experiment}"):
        if given:
            return given, client.create_run(given, run_name=run_name).info.run_id
        known = client.get_experiment_by_name(experiment)
        if known is None:
            artifacts = _artifact_location(experiment)
            experiment_id = client.create_experiment(experiment, artifacts, TRAINING_KIND)
        else:
            experiment_id = known.experiment_id
        return experiment_id, client.create_run(experiment_id, run_name=run_name).info.run_id


def _artifact_location(experiment: str) -> str | None:
    """Beside a local SQLite store; a server decides for itself."""
    import mlflow

    address = mlflow.get_tracking_uri()
    if not address.startswith("sqlite:///"):
        return None
    folder = Path(address.removeprefix("sqlite:///")).resolve().parent
    return (folder / "mlflow-artifacts" / experiment).as_uri()


def _end(run: MLflowRun, status: str) -> None:
    try:
        run.flush()
    finally:
        with reaching(run.client, f"mark run {run.id} {status}"):
            run.client.set_terminated(run.id, status=status)


def _end_broken(run: MLflowRun, status: str) -> None:
    """End a run that an exception broke off, without taking that exception's place."""
    try:
        _end(run, status)
    except TrackingError as error:
        log.warning("the tracking run is not marked %s: %s", status, error)
