"""MLflow: opening its store, and a run from preparation to registration.

Metrics are sent in batches. A resumed run sends the steps after its checkpoint again; MLflow keeps
both points, which are equal except for rates. MLflow is imported only where it is used. Functions
raise `TrackingError` if the store cannot be reached or rejects a request.
"""

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from d2plm.core.errors import TrackingError, from_extra, require, root_cause
from d2plm.core.files import is_writable, write_text
from d2plm.core.locks import locked
from d2plm.core.redaction import redacted, redacted_line
from d2plm.tracking import tracker_run
from d2plm.tracking.sqlite_store import create_store, sqlite_file
from d2plm.tracking.tracker_run import Run, read_run_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as RunEntity

RUN_FILE = "tracking_run.json"
PARENT_TAG = "mlflow.parentRunId"
DESCRIPTION_TAG = "mlflow.note.content"
VERSION_TAG = "registered_version"
KEY_TAG = "d2plm.run_key"
GIT_TAG, SOURCE_TAG = "mlflow.source.git.commit", "mlflow.source.name"
# Makes the MLflow UI show the experiment as training, not as prompts and agents.
TRAINING_KIND = {"mlflow.experimentKind": "custom_model_development"}
BATCH = 200
MAX_PARAM, MAX_KEY, MAX_TAG, MAX_DIGEST = 6000, 250, 8000, 36  # MLflow's limits, characters
# MLflow's description of a column, for data sets of protein sequences.
_SCHEMA = {"mlflow_colspec": [{"name": "sequence", "type": "string", "required": True}]}
# The default timeouts of MLflow's client would block training for a quarter of an hour.
CLIENT_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",
}
ANSWER_SECONDS, START_SECONDS = 8, 30  # wait for a server's answer, and for its start
_NOT_IN_KEYS = re.compile(r"[^\w\-. /:]")

log = logging.getLogger(__name__)


class MLflowRun(Run):
    """An MLflow run. Metrics are sent in batches; if sending fails, they stay pending.

    Metrics of the whole run are at step 0, and are sent again only if they have changed.
    """

    def __init__(self, client: "MlflowClient", run_id: str) -> None:
        self.client = client
        self.id: str = run_id
        self._pending: list[Any] = []
        self._paused_until = 0.0

    def __str__(self) -> str:
        return f"run {self.id} of the MLflow store {self.client.tracking_uri}"

    @property
    def name(self) -> str:  # type: ignore[override]  # which the UI may have changed
        return str(self.client.get_run(self.id).info.run_name)

    def log_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        known = self.client.get_run(self.id).data.params
        named = {_key(key): _cut(str(value), MAX_PARAM) for key, value in params.items()}
        fresh = [Param(*one) for one in named.items() if one[0] not in known]
        self.client.log_batch(self.id, params=fresh)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric

        if step is None:
            known = self.client.get_run(self.id).data.metrics
            metrics = {name: value for name, value in metrics.items() if known.get(name) != value}
        now = int(time.time() * 1000)
        self._pending += [
            Metric(_key(name), float(value), now, step or 0) for name, value in metrics.items()
        ]
        if len(self._pending) >= BATCH and time.monotonic() >= self._paused_until:
            self.flush()

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
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
        self.client.log_inputs(self.id, [DatasetInput(dataset=dataset, tags=[tag])])

    def log_file(self, file: Path, folder: str | None = None) -> None:
        self.client.log_artifact(self.id, str(file), folder)

    def set_tags(self, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        cut = [RunTag(_key(name), _cut(value, MAX_TAG)) for name, value in tags.items()]
        self.client.log_batch(self.id, tags=cut)

    def describe(self, text: str) -> None:
        self.set_tags({DESCRIPTION_TAG: text})

    def flush(self) -> None:
        began = time.monotonic()
        try:
            self.client.log_batch(self.id, metrics=self._pending)
            self._pending.clear()
        finally:
            if self._pending:  # failed; limits the waiting for a silent server to 10 % of the time
                self._paused_until = time.monotonic() + 9 * (time.monotonic() - began)

    def end(self, status: str) -> None:
        try:
            self.flush()
        except Exception:
            status = "FAILED"
            raise
        finally:
            self.client.set_terminated(self.id, status=status)


def _key(name: str) -> str:
    """Replace characters that MLflow rejects in names."""
    return _NOT_IN_KEYS.sub("_", name)[:MAX_KEY] or "_"


def _cut(value: str, limit: int) -> str:
    """Shorten a value to `limit` characters, the last of which is then `…`."""
    return value if len(value) <= limit else f"{value[: limit - 1]}…"


@contextmanager
def system_metrics(run: MLflowRun, seconds: float) -> Iterator[None]:
    """Log processor, memory, network and GPU metrics (`system/…`) in a thread, inside the block.

    Needs psutil, otherwise it only logs a message, and nvidia-ml-py for NVIDIA GPUs.
    `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` takes precedence over the interval in `seconds`.
    """
    if find_spec("psutil") is None:
        log.info("no system metrics: psutil is not installed; install d2plm[system-metrics]")
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)
    with reaching(run.client, f"log system metrics to run {run.id}"):
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


def begin_mlflow_run(
    output_dir: Path,
    *,
    uri: str | None = None,
    experiment: str = "d2plm",
    name: str | None = None,
    parent_run_id: str | None = None,
) -> MLflowRun:
    """Begin or resume the MLflow run of `output_dir`, and set it RUNNING.

    `MLFLOW_TRACKING_URI` takes precedence over `uri`, `MLFLOW_RUN_ID` over the saved run id and
    `MLFLOW_EXPERIMENT_ID` over `experiment`. Kubeflow Pipelines sets these variables; a pipeline's
    steps, which share one run, drop its `MLFLOW_RUN_ID`.

    Raises:
        TrackingError: also if the store lacks the requested run or parent.
        DataError: if `output_dir` cannot be written.
    """
    client = open_client(uri, create=True)
    if parent_run_id is not None:
        with reaching(client, f"find parent_run_id={parent_run_id}"):
            client.get_run(parent_run_id)  # MLflow would hide the children of an unknown parent
    found = _find_or_begin(client, output_dir / RUN_FILE, experiment, name)
    if (note := written_here(client, found.info.artifact_uri)) is not None:
        log.warning("%s", note)
    run = MLflowRun(client, str(found.info.run_id))
    if parent_run_id is not None:
        with reaching(client, f"set the parent of run {run.id}"):
            run.set_tags({PARENT_TAG: parent_run_id})
    return run


def end_left_running(
    output_dir: Path,
    status: str,
    *,
    uri: str | None = None,
    owner: Mapping[str, str] = MappingProxyType({}),
    tags: Mapping[str, str],
) -> str | None:
    """End the run of `output_dir` that a killed process has left RUNNING.

    A run that an earlier step has set FINISHED is ended, too, unless its model is registered.
    Returns the run's id, or None if there was no run to end.

    Args:
        status: FAILED or KILLED.
        uri: URI of the MLflow store; `MLFLOW_TRACKING_URI` takes precedence.
        owner: tags of the process; a run without them belongs to another and is left alone.
        tags: the reason; also set on a run that has already failed.
    """
    kept = read_run_file(output_dir / RUN_FILE) or {}
    run_id = os.environ.get("MLFLOW_RUN_ID") or kept.get("run_id")
    if run_id is None:
        return None
    client = open_client(uri)
    with reaching(client, f"mark run {run_id} {status}"):
        run, found = MLflowRun(client, run_id), client.get_run(run_id)
        of_run, is_deleted = found.data.tags, found.info.lifecycle_stage == "deleted"
        if is_deleted or any(of_run.get(name) != value for name, value in owner.items()):
            return None
        if found.info.status == "FINISHED" and VERSION_TAG in of_run:
            return None
        run.set_tags({key: value for key, value in tags.items() if value})
        if found.info.status not in ("RUNNING", "SCHEDULED", "FINISHED"):
            return None
        run.end(status)
    return run_id


def parent_of(run_id: str, uri: str | None) -> str | None:
    """Id of the parent of a run that a scheduler created for a step; None if it has none."""
    client = open_client(uri)
    with reaching(client, f"find run {run_id}"):
        parent: str | None = client.get_run(run_id).data.tags.get(PARENT_TAG)
    return parent


def refer(run_id: str, output_dir: Path, uri: str | None) -> None:
    """Describe a run that a scheduler created for a step as a reference to that of `output_dir`."""
    if own := (read_run_file(output_dir / RUN_FILE) or {}).get("run_id"):
        client = open_client(uri)
        with reaching(client, f"describe run {run_id}"):
            MLflowRun(client, run_id).describe(f"The results of this step are in the run {own}.")


def open_client(uri: str | None, create: bool = False) -> "MlflowClient":
    """Open a client of the tracking store; `MLFLOW_TRACKING_URI` takes precedence over `uri`.

    With `create`, a missing SQLite store is created. Raises `ConfigError` if `uri` is not text.
    """
    require(uri is None or isinstance(uri, str), "tracking_uri", uri, "the address of a store")
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    with from_extra("MLflow", "tracking-server", TrackingError, ", or remove mlflow from trackers"):
        import mlflow
    given = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(given or uri)
    if not given:  # MLflow sets it, and it would take precedence over the `uri` of the next call
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    address = mlflow.get_tracking_uri()
    # The errors are raised as well; MLflow logs each with a traceback.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    fix = (
        "start it (with this host in --allowed-hosts), correct its address (uri) or the account "
        "(MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN)"
    )
    try:
        if (file := sqlite_file(address)) is not None:
            if not create and not file.exists():
                raise FileNotFoundError(f"there is no file {file}")
            fix = f"free space, wait for its users, or move {file} away if it is damaged"
            if create:
                create_store(file)
        elif address.startswith(("http://", "https://")):
            _require_answer(address)
        client = mlflow.MlflowClient(tracking_uri=address)
        client.search_experiments(max_results=1)
    except Exception as error:  # MLflow's stores raise the errors of their libraries
        raise TrackingError(
            f"cannot reach the MLflow store {redacted(address)}: {redacted_line(error)}; {fix}, or "
            "remove mlflow from trackers"
        ) from error
    return client


def _require_answer(address: str) -> None:
    """Raise `OSError` if a server refuses connections or does not answer.

    A server that is starting has `START_SECONDS`. MLflow's own client would silently retry for a
    quarter of an hour, or print a warning of urllib3 at each attempt.
    """
    import requests

    seconds = min(ANSWER_SECONDS, float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]))
    waits = int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"]) > 0
    last = time.monotonic() + (START_SECONDS if waits else 0)
    for attempt in count():
        try:
            requests.head(f"{address.rstrip('/')}/health", timeout=seconds, stream=True).close()
            return
        except requests.Timeout:
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        except requests.RequestException as error:
            # MLflow's client handles credentials and certificates, and reports other errors.
            if not isinstance(root_cause(error), ConnectionRefusedError):
                return
        if time.monotonic() >= last:
            raise ConnectionRefusedError("it refuses connections")
        if attempt == 0:
            wait = "the MLflow store %s refuses connections; trying again for %g seconds"
            log.warning(wait, redacted(address), START_SECONDS)
        time.sleep(1)


def reaching(client: "MlflowClient", what: str) -> AbstractContextManager[None]:
    """Call `tracker_run.reaching` with the store's address."""
    return tracker_run.reaching(f"{what} in the MLflow store {redacted(client.tracking_uri)}")


def written_here(client: "MlflowClient", location: str) -> str | None:
    """Return a note if clients of a server write files to a folder themselves; None otherwise.

    Raises:
        TrackingError: if that folder cannot be written on this machine.
    """
    parts, address = urlsplit(location), redacted(client.tracking_uri)
    if parts.scheme not in ("", "file") or not address.startswith(("http://", "https://")):
        return None
    folder = Path(url2pathname(parts.path))
    fix = "start the server with --serve-artifacts and use a new experiment"
    if not is_writable(folder):
        raise TrackingError(
            f"the MLflow server {address} has clients write files to {folder}, a folder of its own "
            f"machine, which cannot be written here; {fix}"
        )
    return f"files of runs are written to {folder}; unless {address} has it, too, {fix}"


def try_files(client: "MlflowClient", experiment: str) -> str | None:
    """Store an empty file as runs of the experiment do, and remove it; returns `written_here`."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with reaching(client, f"store a file of experiment {experiment}"), TemporaryDirectory() as here:
        location = client.get_experiment(_experiment(client, experiment)).artifact_location
        note = written_here(client, location)
        files = get_artifact_repository(f"{location}/d2plm-doctor")
        (empty := Path(here, "empty")).touch()
        files.log_artifact(str(empty))
        files.delete_artifacts()
    return note


def _find_or_begin(
    client: "MlflowClient", file: Path, experiment: str, name: str | None
) -> "RunEntity":
    """Return the run to write to, after setting it RUNNING.

    A new run begins in three steps: its key is written to `file`, the run is created with the key
    as a tag, and its id is written to `file`. After a kill, the next process finds it by the key.
    """
    given = os.environ.get("MLFLOW_RUN_ID")
    if given:
        with reaching(client, f"reopen run {given}"):
            client.update_run(given, status="RUNNING")
            return client.get_run(given)
    busy = f"another process is beginning the run of {file.parent}"
    with locked(file.with_name(f".{file.name}.lock"), busy, of=file):
        kept = read_run_file(file) or {}
        if "run_id" in kept and (found := _reopened(client, kept["run_id"], file)) is not None:
            return found
        if "run_id" in kept or "key" not in kept:
            kept = {"key": secrets.token_hex(16)}
            write_text(file, json.dumps(kept))
        with reaching(client, f"begin a run of experiment {experiment}"):
            kept["experiment_id"] = experiment_id = str(
                os.environ.get("MLFLOW_EXPERIMENT_ID") or _experiment(client, experiment)
            )
            tags = {KEY_TAG: kept["key"]}
            search = partial(
                client.search_runs, [experiment_id], f"tags.`{KEY_TAG}` = '{kept['key']}'"
            )
            if not (begun := search()):
                created = client.create_run(experiment_id, run_name=name, tags=tags)
                begun = search() or [created]  # a search may lag behind
            run, *copies = begun
            for copy in copies:  # the client repeats a request whose answer a proxy has lost
                client.delete_run(copy.info.run_id)
        kept["run_id"] = str(run.info.run_id)
        write_text(file, json.dumps(kept))
    return run


def _reopened(client: "MlflowClient", run_id: str, file: Path) -> "RunEntity | None":
    """Set a run RUNNING; None, with a warning, if the store does not have it."""
    from mlflow.exceptions import MlflowException

    why = f"does not have run {run_id}"
    with reaching(client, f"reopen run {run_id}"):
        try:
            found = client.get_run(run_id)
            if found.info.lifecycle_stage != "deleted":
                client.update_run(run_id, status="RUNNING")
                return found
            why = f"has run {run_id} deleted (mlflow runs restore --run-id {run_id} restores it)"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    address = client.tracking_uri
    store = sqlite_file(address)  # a relative one is another file in another working directory
    where = redacted(address) if store is None else store.resolve()
    log.warning("%s: the MLflow store %s %s; beginning a new run", file, where, why)
    return None


def _experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    known = client.get_experiment_by_name(name)
    if known is not None and known.lifecycle_stage == "deleted":
        raise MlflowException(f"the experiment {known.experiment_id} must be in the 'active' state")
    if known is not None:
        return str(known.experiment_id)
    artifacts = None  # chosen by a server; a local store keeps them beside its file
    if (file := sqlite_file(client.tracking_uri)) is not None:
        folder = file.resolve().parent
        artifacts = (folder / "mlflow-artifacts" / re.sub(r"[^\w-]", "_", name)[:60]).as_uri()
    try:
        return str(client.create_experiment(name, artifacts, TRAINING_KIND))
    except MlflowException as error:
        made = client.get_experiment_by_name(name)
        if error.error_code != "RESOURCE_ALREADY_EXISTS" or made is None:
            raise
        return str(made.experiment_id)  # created by another process
