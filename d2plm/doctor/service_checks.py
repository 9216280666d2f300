"""Checks of MLflow and Kubeflow Pipelines from this machine."""

import os
from collections.abc import Sequence

from d2plm.core.redaction import redacted
from d2plm.doctor.verdicts import Verdict, ok, skipped, warning
from d2plm.launch.kfp_server import reach
from d2plm.tracking.sqlite_store import sqlite_file


def mlflow(
    trackers: Sequence[str], uri: str | None, experiment: str, timeout_seconds: float
) -> Verdict:
    """Whether the tracking store answers, and a server stores an empty file of the experiment.

    A missing SQLite store is not created, a missing experiment of a server is. The arguments are
    settings of `tracking`; `MLFLOW_TRACKING_URI` takes precedence over `uri`.

    Raises:
        TrackingError: if the store does not answer, or stores no files.
    """
    if "mlflow" not in trackers:
        return skipped("tracking.trackers does not include mlflow")
    address = os.environ.get("MLFLOW_TRACKING_URI") or uri or ""
    if (file := sqlite_file(address)) is not None and not file.exists():
        return ok(f"the first run will create {file}")
    from d2plm.tracking.mlflow_run import open_client, try_files

    # The client itself reads tokens, certificates and proxies from the environment.
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(round(timeout_seconds), 1))
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    client = open_client(uri)
    address = redacted(client.tracking_uri)
    if not address.startswith(("http://", "https://")):
        return ok(f"{address} answers")
    if (note := try_files(client, experiment)) is not None:
        return warning(f"{address} answers; {note}")
    return ok(f"{address} answers and stores files")


def kubeflow_pipelines(host: str | None, timeout_seconds: float) -> Verdict:
    """Whether the API at `KFP_HOST` answers, and not a login page; `ClusterError` if not."""
    if not host:
        return skipped("KFP_HOST is not set", "set it to submit pipelines from here")
    return ok(f"{redacted(reach(host, timeout_seconds)[0])} answers")
