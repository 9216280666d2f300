"""Checks of MLflow and Kubeflow Pipelines from this machine."""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from d2plm.core.errors import TrackingError, first_line, root_cause
from d2plm.core.redaction import redacted
from d2plm.doctor.verdicts import Verdict, failed, ok, skipped
from d2plm.launch.kfp_server import reach
from d2plm.tracking.sqlite_store import sqlite_file


def mlflow(trackers: Sequence[str], uri: str | None, timeout_seconds: float) -> Verdict:
    """Whether the tracking store answers; a missing SQLite store is not created.

    Args:
        trackers: `tracking.trackers`.
        uri: `tracking.uri`; `MLFLOW_TRACKING_URI` takes precedence.
    """
    if "mlflow" not in trackers:
        return skipped("tracking.trackers does not include mlflow")
    address = os.environ.get("MLFLOW_TRACKING_URI") or uri
    if (file := sqlite_file(address or "")) is not None:
        return _sqlite(file)
    from d2plm.tracking.mlflow_run import open_client

    # The client itself reads tokens, certificates and proxies from the environment.
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(round(timeout_seconds), 1))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    try:
        client = open_client(uri)
    except TrackingError as error:
        reason = redacted(first_line(root_cause(error)))
        fix = (
            "start the server (with this host in --allowed-hosts), correct tracking.uri or the "
            "account (MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN), or choose tracking=none"
        )
        return failed(f"{redacted(address or 'the default store')}: {reason}", fix)
    return ok(f"{redacted(client.tracking_uri)} answers")


def _sqlite(file: Path) -> Verdict:
    if not file.exists():
        return ok(f"the first run will create {file}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True)) as store:
            [(runs,)] = store.execute("SELECT count(*) FROM runs")
    except sqlite3.Error as error:
        return failed(
            f"{file}: {first_line(error)}",
            "restore it from a backup, or move it away so that the next run creates a new one",
        )
    return ok(f"{file}, {runs:,} runs")


def kubeflow_pipelines(host: str | None, timeout_seconds: float) -> Verdict:
    """Whether the API at `KFP_HOST` answers, and not a login page.

    Raises:
        ClusterError: if the API does not answer.
    """
    if not host:
        return skipped("KFP_HOST is not set", "set it to submit pipelines from here")
    address, _ = reach(host, timeout_seconds)
    return ok(f"{redacted(address)} answers")
