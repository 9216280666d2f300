"""The interface of all trackers' runs, and the file with a run's id.

A run belongs to an output folder, where a small file stores its id. Every step of a pipeline, and a
resumed training run, continues the run that it finds there.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2plm.core.errors import D2PLMError, TrackingError
from d2plm.core.redaction import redacted_line
from d2plm.core.waiting import waiting

# Causes in the texts of clients, servers and proxies, and what to do; the first found counts.
REMEDIES = (
    (
        r"\b413 Client Error|error code 413|(Entity|Content|Payload) Too Large",
        "a proxy limits the size of requests: raise its limit (nginx: client_max_body_size, in an "
        "Ingress the annotation nginx.ingress.kubernetes.io/proxy-body-size)",
    ),
    (
        r"\b504 Server Error|error code 504|too many 504|Gateway Time-?out",
        "a proxy ends long requests: raise its time limit (nginx: proxy_read_timeout, in an "
        "Ingress the annotation nginx.ingress.kubernetes.io/proxy-read-timeout)",
    ),
    (
        r"(?P<kind>run|experiment) (?P<id>\S+) must be in the 'active' state",
        "it was deleted: restore it with mlflow {kind}s restore --{kind}-id {id} (and the store's "
        "address in MLFLOW_TRACKING_URI), or use another experiment and output_dir",
    ),
    (
        r"[Cc]redentials|No module named '(boto3|botocore|google|azure)",
        "clients of this server write to its object store themselves: give this process its client "
        "and credentials, or start the server with --serve-artifacts and use a new experiment",
    ),
    (
        r"\b50[23] Server Error|error code 50[23]|too many 50[23]|Bad Gateway|Service Unavailable",
        "the server, or its proxy, is overloaded or starting: run the same command again later",
    ),
    (
        r"[Nn]o Experiment with id|Could not find experiment with ID",
        "there is none with this id: correct or unset MLFLOW_EXPERIMENT_ID",
    ),
    (
        r"\bRun (with id=)?\S+ not found",
        "there is none with this id: correct or unset MLFLOW_RUN_ID (or tracking.parent_run_id)",
    ),
    (
        r"INVALID_PARAMETER_VALUE|BAD_REQUEST|Invalid project name",
        "it does not take this name or value: change it, as the same command would fail again",
    ),
    ("", "check the tracker and its address, then run the same command again"),
)


class Run:
    """A run of one tracker; methods raise the errors of the tracker's client.

    A tracker ignores calls that it does not support. `runs.Runs` removes passwords from the
    arguments, and converts errors to `TrackingError`.

    Attributes:
        id: id of the run; None if the tracker has no ids.
        name: name that the tracker shows; empty if runs have no names.
    """

    id: str | None = None
    name: str = ""

    def log_params(self, params: dict[str, Any]) -> None:
        """Log settings of the whole run; the first value of a name is kept."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics of an optimizer step or, without one, of the whole run."""

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """Log a data set that the run reads.

        Args:
            context: purpose: train, validation or test.
            profile: numbers of sequences, residues and clusters.
        """

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """Copy a file in its current state into a folder of the run's files."""

    def set_tags(self, tags: dict[str, str]) -> None:
        """Set tags; the last value of a name is kept."""

    def describe(self, text: str) -> None:
        """Set the run's description, Markdown."""

    def flush(self) -> None:
        """Send pending metrics."""

    def end(self, status: str) -> None:
        """Send pending metrics and mark the run FINISHED, FAILED or KILLED."""


def read_run_file(file: Path) -> dict[str, str] | None:
    """Read the file of a run; None if it does not exist.

    It contains the `run_id`, optionally with a `name`, or the `key` of a run that is being created.

    Raises:
        TrackingError: if the file contains no id.
    """
    try:
        kept: dict[str, str] | None = json.loads(file.read_text()) if file.is_file() else None
        if kept is not None and "run_id" not in kept:
            kept["key"]  # raises KeyError if missing
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{file}: contains no run id ({error!r}); delete it to begin a new run"
        ) from error
    return kept


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Convert errors of a tracker's client to a `TrackingError` "cannot {what}", without passwords.

    The block should contain only calls of the client.
    """
    try:
        with waiting(f"the tracker, to {what}"):
            yield
    except D2PLMError:
        raise
    except Exception as error:  # clients raise the exceptions of their libraries
        raise TrackingError(f"cannot {what}: {_said(error)}; {remedy(error)}") from error


def remedy(error: Exception) -> str:
    """Advice on an error of a tracker's client."""
    return next(
        fix.format(**found.groupdict())
        for cause, fix in REMEDIES
        if (found := re.search(cause, str(error)))
    )


def _said(error: Exception) -> str:
    """The first line of an error, without the page that a proxy has sent."""
    line = redacted_line(error)
    return re.split(r"[\s.]*(?:Response \w+: *)?['\"]?<(?:!DOCTYPE|html)", line)[0] or line
