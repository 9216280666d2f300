"""Writing small files whole or not at all, and guessing which file a wrong path means."""

import os
from pathlib import Path

from d2plm.core.errors import DataError, nearest


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


def nearest_path(path: str | Path) -> str:
    """` (did you mean 'x'?)` for a path that is there and much like one that is not, or nothing.

    Each part that does not exist stands for the most similar entry of the folder before it.
    """
    wrong = Path(path).expanduser()
    found = Path(wrong.anchor)
    for part in wrong.parts[1:] if wrong.anchor else wrong.parts:
        if not os.path.lexists(found / part):
            near = nearest(part, _entries(found))
            if near is None:
                return ""
            part = near
        found /= part
    return "" if found == wrong else f" (did you mean '{found}'?)"


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def config_dir() -> Path:
    """Where the configurations are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
