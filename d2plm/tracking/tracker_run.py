"""What the runs of all trackers have in common: their interface, and the file that keeps their id.

A run belongs to an output folder, where a small file holds its id: every step of a pipeline, and a
resumed training, continues the run that it finds there.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2plm.core.errors import D2PLMError, TrackingError
from d2plm.core.redaction import redacted_line


class Run:
    """A run of one tracker; methods raise whatever the tracker's client raises.

    A tracker without a place for something ignores it. `runs.Runs` removes passwords from what it
    passes on, and turns failures into `TrackingError`.

    Attributes:
        id: of the run; None where the tracker has no ids.
        name: as the tracker shows it; empty where runs have no names.
    """

    id: str | None = None
    name: str = ""

    def log_params(self, params: dict[str, Any]) -> None:
        """Log settings of the whole run; the first value of a name counts."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log metrics of an optimizer step or, without one, of the whole run."""

    def log_dataset(
        self, name: str, digest: str, context: str, source: Path, profile: dict[str, Any]
    ) -> None:
        """Log a data set that the run reads.

        Args:
            context: what the run uses it for: train, validation or test.
            profile: its size: numbers of sequences, residues, clusters.
        """

    def log_file(self, file: Path, folder: str | None = None) -> None:
        """Copy a file, as it is now, into a folder of the run's files."""

    def set_tags(self, tags: dict[str, str]) -> None:
        """Set tags; the last value of a name counts."""

    def describe(self, text: str) -> None:
        """Set the run's description, Markdown."""

    def rename(self, name: str) -> None:
        """Change the run's name."""

    def flush(self) -> None:
        """Send pending metrics."""

    def end(self, status: str) -> None:
        """Send pending metrics and mark the run FINISHED, FAILED or KILLED."""


def read_run_file(file: Path) -> dict[str, str] | None:
    """What `file` keeps of a run, None if there is no such file.

    It is the `run_id`, perhaps with a `name`, or the `key` of a run that is being begun.

    Raises:
        TrackingError: if the file holds no id.
    """
    try:
        kept: dict[str, str] | None = json.loads(file.read_text()) if file.is_file() else None
        if kept is not None and "run_id" not in kept:
            kept["key"]  # raises where there is none
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{file}: holds no run id ({error!r}); delete it to begin another run"
        ) from error
    return kept


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn a failure of a tracker's client into a `TrackingError`: one line, without passwords.

    `what` is being done, completing "cannot …"; hold only calls of the client inside.
    """
    try:
        yield
    except D2PLMError:
        raise
    except Exception as error:  # every client raises its libraries' own exceptions
        raise TrackingError(
            f"cannot {what}: {redacted_line(error)}; check the tracker and its address, then run "
            "the same command again"
        ) from error
