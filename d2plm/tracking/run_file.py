"""Which run of a tracker belongs to an output folder: its id, kept in a file there.

Its name is kept, too, where the tracker has to be told it anew by every process.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from d2plm.core.errors import TrackingError


def run_on_file(file: Path) -> str | None:
    """The id that `file` keeps, or None if there is no such file.

    Raises:
        TrackingError: if there is one, and it names no run.
    """
    try:
        return str(json.loads(file.read_text())["run_id"]) if file.is_file() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrackingError(
            f"{file}: names no run ({error!r}); delete it to begin another run"
        ) from error


def name_on_file(file: Path) -> str | None:
    """The name that `file` keeps beside a run's id, or None; call `run_on_file` before."""
    return json.loads(file.read_text()).get("name")  # type: ignore[no-any-return]  # of JSON


@contextmanager
def keeping(file: Path) -> Iterator[dict[str, str]]:
    """Give a dictionary to fill in with `run_id` and more, then keep it in `file`.

    The file is opened first: a run whose id cannot be kept would be begun anew by every retry.

    Raises:
        TrackingError: if the file cannot be written.
    """
    partial = file.with_suffix(".partial")
    run: dict[str, str] = {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as stream:
            yield run
            json.dump(run, stream)
        os.replace(partial, file)
    except OSError as error:
        raise TrackingError(
            f"output_dir={file.parent}: cannot keep the tracking run there ({error.strerror}); "
            "set it to a folder that can be written"
        ) from error
