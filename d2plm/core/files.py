"""Atomic file writes, suggestions for misspelt paths, and JSON files."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2plm.core.errors import DataError, nearest, require
from d2plm.core.locks import locked

RUN_CONFIG = "config.yaml"  # in the output_dir of every run
PROVENANCE = "provenance.json"  # in every exported model
SAVED_BY = "saved_by"  # in the provenance of a model that another library wrote


@contextmanager
def written_beside(path: str | Path) -> Iterator[Path]:
    """Yield a path next to `path`, in the same (possibly new) folder, and rename it to `path`.

    The block writes a file or a folder there; the name keeps the suffix of `path`. On success it is
    flushed to disk and replaces `path`, except that a file never replaces a folder; files in a
    folder get the folder's read and write permissions. On an exception it is removed and `path`
    stays as it was. Two processes that write the same path take turns. A kill while one folder
    replaces another leaves the old one as `previous.NAME`. Raises `DataError` if the path cannot be
    written.

        with written_beside(output) as partial:
            partial.write_text(text)
    """
    path = Path(path)
    try:
        if path.is_symlink():  # the link stays, and the file it leads to is replaced
            path = Path(os.path.realpath(path))
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DataError(f"{path}: is neither a file nor a folder; choose another path")
        partial = path.with_name(f"partial.{path.name}")
        lock = path.with_name(f"{partial.name}.lock")
        with locked(lock, f"{path}: another process is writing it", of=path):
            _remove(partial)  # left by a process that was killed
            try:
                yield partial
                shared = partial.stat().st_mode & 0o066
                for file in partial.rglob("*") if partial.is_dir() else [partial]:
                    if file.is_file():
                        if shared & ~file.stat().st_mode:  # save_file of safetensors: 0600
                            file.chmod(file.stat().st_mode | shared)
                        with file.open("rb") as stream:
                            os.fsync(stream.fileno())
                _replace(partial, path)
            finally:
                _remove(partial)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); check the folder, its "
            "permissions and the free space"
        ) from error


def is_writable(folder: Path) -> bool:
    """Whether files can be created in a folder, or in the nearest existing parent."""
    try:
        existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def require_other_output(
    key: str, output: Any, read: Iterable[Any], is_folder: bool = False
) -> None:
    """Raise `ConfigError` if an output path is one of the files to `read`, in any spelling.

    Args:
        key: key of the output, for the message.
        output, read: paths; None stands for no file.
        is_folder: whether the output is a folder; otherwise an existing folder is rejected, too.
    """
    real = None if output is None else Path(output).resolve()
    is_read = real in [Path(str(path)).resolve() for path in read if path is not None]
    require(not is_read, key, str(output), "another file than those that are read")
    is_file = is_folder or real is None or not real.is_dir()
    require(is_file, key, str(output), "a file, and this is a folder")


def write_text(file: str | Path, text: str, mode: int = 0o666) -> None:
    """Write a text file with `written_beside`; `mode` is reduced by the umask."""
    with written_beside(file) as partial:
        partial.touch(mode)
        partial.write_text(text, encoding="utf-8")


def _replace(source: Path, target: Path) -> None:
    """Rename; replacing a folder that is not empty takes a second rename."""
    previous = target.with_name(f"previous.{target.name}")
    if source.is_dir() and target.is_dir() and not target.is_symlink():
        _remove(previous)
        os.replace(target, previous)
        os.replace(source, target)
        _remove(previous)
    else:
        os.replace(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def nearest_path(path: str | Path) -> str:
    """` (did you mean 'x'?)` with the existing path most similar to a missing one, or ''.

    Each missing part is replaced by the most similar entry of its parent folder.
    """
    wrong = Path(os.path.expanduser(path))  # unchanged for an unknown user
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
    """The folder of the configurations: in an installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def is_hub_name(location: str) -> bool:
    """Whether `location` may be ORGANISATION/NAME on the Hub; false below an existing folder."""
    found = re.fullmatch(r"([\w-][\w.-]*)/[\w.-]+", location)
    return found is not None and not os.path.lexists(found[1])


def shipped(path: str | Path) -> Path:
    """The path, or for a missing `examples/…` the copy in the installed package."""
    here, installed = Path(path), config_dir().parent / path
    wanted = here.parts[:1] == ("examples",) and not os.path.lexists(here)
    return installed if wanted and installed.exists() else here


def read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if it does not exist; `DataError` if it is damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); create it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds no JSON object; create it again")
    return content


def files_digest(*files: Path) -> str:
    """SHA-256 of the concatenated contents of the files; `DataError` if one cannot be read."""
    digest = hashlib.sha256()
    for file in files:
        try:
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)  # continues the same digest
        except OSError as error:
            reason = f"cannot be read ({error.strerror}); check the path and its permissions"
            raise DataError(f"{file}: {reason}") from error
    return digest.hexdigest()
