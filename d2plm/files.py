"""Writing small files whole or not at all."""

import os
from pathlib import Path

from d2plm.errors import DataError


def write_text(file: Path, text: str) -> None:
    """Write `text` beside `file` and rename it, making the folder where it is missing.

    Raises:
        DataError: if it cannot be written; a file that was there stays as it was.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise DataError(
            f"{file}: cannot be written ({error.strerror}); choose a folder that you may write to, "
            "with space left"
        ) from error
