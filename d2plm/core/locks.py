"""Exclusive locks between processes, for folders that only one process may write at a time."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from d2plm.core.errors import DataError
from d2plm.core.waiting import waiting

WITHOUT_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # errors of such file systems
ATTEMPTS = 20  # to take a lock whose folder failing holders remove

log = logging.getLogger(__name__)


@contextmanager
def locked(
    file: Path,
    busy: str,
    *,
    of: Path | None = None,
    max_wait_seconds: float | None = None,
    limit_key: str = "max_wait_seconds",
) -> Iterator[None]:
    """Hold the lock `file`, which is created here and removed when the lock is released.

    Missing folders are created, and removed if they stay empty. The system releases the lock of a
    killed process. On a file system without locks, the block runs unlocked after a warning. A wait
    is logged when it begins and then every minute. Raises `DataError` if the file cannot be
    created, or the lock is held for too long.

    Args:
        busy: what the process that holds the lock is doing, for the log.
        of: the path to name if the lock cannot be created; None names the lock itself.
        max_wait_seconds: None waits until the holder releases the lock or ends.
        limit_key: name of the setting that limits the wait, for the error.
    """
    # A file whose existence is the lock would outlive its process.
    lock = FileLock(file, fallback_to_soft=False)
    made: list[Path] = []
    try:
        for attempt in range(ATTEMPTS):
            made += _make_folder_of(file)
            try:
                with suppress(Timeout):
                    lock.acquire(timeout=0)
                    break
                file.touch()  # to FileLock, a file that cannot be created, as in /proc, is locked
                _wait(lock, busy, max_wait_seconds, limit_key)
                break
            except FileNotFoundError:  # a holder has failed and has removed the folder
                if attempt == ATTEMPTS - 1:
                    raise
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise DataError(
                f"{of or file}: cannot be written ({error.strerror}); check the folder, its "
                "permissions and the free space"
            ) from error
        _warn_without_locks(file.parent, error.strerror)
    try:
        yield
    finally:
        # While the lock is held: a process that has opened the removed file notices it.
        file.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # it is in use
                folder.rmdir()
        lock.release()


def _wait(lock: FileLock, busy: str, max_wait_seconds: float | None, limit_key: str) -> None:
    log.warning("%s: waiting for it", busy)
    try:
        with waiting(f"the end of this: {busy}"):
            lock.acquire(timeout=-1 if max_wait_seconds is None else max_wait_seconds)
    except Timeout:
        raise DataError(
            f"{busy}: it has not ended within {limit_key}={max_wait_seconds:g}; wait longer, end "
            "it, or use another folder"
        ) from None


def _make_folder_of(file: Path) -> list[Path]:
    """Create the missing folders of a file; returns them, the innermost first."""
    missing = [folder for folder in file.parents if not folder.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    return missing


@cache
def _warn_without_locks(folder: Path, reason: str) -> None:
    log.warning(
        "%s is on a file system without locks (%s): let nothing else write there", folder, reason
    )
