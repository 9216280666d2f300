"""Runs: one MLflow run from preparation to registry, or none at all.

The run's id is kept beside the outputs, so that every step of a pipeline, and a resumed training,
writes into the same run. Metrics are sent in batches, and a resumed run sends the steps after its
checkpoint again: MLflow keeps both points, which are equal up to rates. MLflow is imported only
where it is used.
"""

import json
import logging
import os
import re
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

# What stands between `://` and the host. The second form is a password that itself holds a slash,
# as database addresses may, and not a port with an `@` later in the path.
_USER_INFO = re.compile(r"://(?:[^\s/?#]*|[^\s:/@]*:(?!\d+/)[^\s@]*)@")
_NO_SUCH_RUN = "RESOURCE_DOES_NOT_EXIST"

log = logging.getLogger(__name__)


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
    """An MLflow run, written to in batches; every method raises TrackingError if the store refuses.

    Args:
        client: of the store that holds the run.
        run_id: the run.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.client, self.id = client, run_id
        self._pending: list[Any] = []

    def log_params(self, params: dict[str, Any]) -> None:
        """Parameters, without passwords; those that are already there stay as they are."""
        from mlflow.entities import Param

        with reaching(self.client, f"log parameters of run {self.id}"):
            known = self.client.get_run(self.id).data.params
            fresh = [
                Param(key, redacted(str(value))[:6000])
                for key, value in params.items()
                if key not in known
            ]
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
        with reaching(self.client, f"log data set {name} of run {self.id}"):
            self.client.log_inputs(self.id, [DatasetInput(dataset=dataset, tags=[tag])])

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """A file, as an artifact."""
        with reaching(self.client, f"log {file} to run {self.id}"):
            self.client.log_artifact(self.id, str(file), folder)

    def set_tags(self, tags: dict[str, str]) -> None:
        """Tags; these may change during a run."""
        with reaching(self.client, f"set tags of run {self.id}"):
            for key, value in tags.items():
                self.client.set_tag(self.id, key, value)

    def flush(self) -> None:
        """Send what is pending; what cannot be sent stays pending."""
        while self._pending:
            with reaching(self.client, f"log metrics of run {self.id}"):
                self.client.log_batch(self.id, metrics=self._pending[:1000])
            del self._pending[:1000]


@contextmanager
def tracking_run(
    output_dir: Path,
    *,
    tracker: str = "mlflow",
    uri: str | None = None,
    experiment: str = "d2plm",
    run_name: str | None = None,
    parent_run_id: str | None = None,
    final: bool = False,
) -> Iterator[Run]:
    """The run that belongs to `output_dir`, begun if it has none.

    `MLFLOW_TRACKING_URI` wins over `uri`, and `MLFLOW_RUN_ID` over the run on file. An exception
    marks the run FAILED, an interrupt or SIGTERM KILLED; `final` marks it FINISHED at the end.
    `parent_run_id` is the run that it is nested under.

    Raises:
        TrackingError: if the store cannot be reached or refuses, or `output_dir` cannot be written.
    """
    require_choice("tracking.tracker", tracker, TRACKERS)
    if tracker == "none":
        yield NoRun()
        return
    client = open_client(uri)
    run = MLflowRun(client, _find_or_begin(client, output_dir, experiment, run_name))
    if parent_run_id is not None:
        run.set_tags({"mlflow.parentRunId": parent_run_id})
    try:
        yield run
        run.flush()
    except (KeyboardInterrupt, SystemExit):
        _end_broken(run, "KILLED")
        raise
    except BaseException:
        _end_broken(run, "FAILED")
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
    try:
        if address and address.startswith("sqlite:///"):
            Path(address.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        mlflow.set_tracking_uri(address)
        client = mlflow.MlflowClient(tracking_uri=address)
        client.search_experiments(max_results=1)
    except (MlflowException, OSError, ImportError) as error:
        raise TrackingError(
            f"cannot reach the MLflow store {redacted(address or mlflow.get_tracking_uri())}: "
            f"{_first_line(error)}; start it, correct tracking.uri, or set tracking.tracker=none"
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
            f"{_first_line(error)}; check the store and its address, then run this again"
        ) from error


def redacted(text: str) -> str:
    """`text` with the user and password of every URI in it replaced by `***`."""
    return _USER_INFO.sub("://***@", text)


def _first_line(error: Exception) -> str:
    return redacted(next(iter(str(error).strip().splitlines()), type(error).__name__))


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
    on_file = _run_on_file(file)
    if on_file is not None:
        if _reopen(client, on_file):
            return on_file
        log.warning("%s: the store has no run %s; beginning another", file, on_file)
    partial = file.with_suffix(".partial")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # Opened first: a run whose id cannot be kept would be begun anew by every retry.
        with partial.open("w") as stream:
            experiment_id, run_id = _begin(client, experiment, run_name)
            json.dump({"run_id": run_id, "experiment_id": experiment_id}, stream)
        os.replace(partial, file)
    except OSError as error:
        raise TrackingError(
            f"output_dir={output_dir}: cannot keep the tracking run there ({error.strerror}); "
            "set it to a folder that can be written"
        ) from error
    return run_id


def _run_on_file(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["run_id"]) if file.is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{file}: names no run ({error!r}); delete it to begin another run"
        ) from error


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
    with reaching(client, f"begin a run of experiment {experiment}"):
        known = client.get_experiment_by_name(experiment)
        if known is None:
            artifacts = _artifact_location(experiment)
            experiment_id = client.create_experiment(experiment, artifact_location=artifacts)
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
