"""Exclusive locks between processes, for folders that only one of them may write at a time."""

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from d2plm.core.errors import DataError

# Error numbers of file systems without locks.
WITHOUT_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)

log = logging.getLogger(__name__)


@contextmanager
def locked(
    file: Path, busy: str, *, waiting: Callable[[str], None] | None = None, of: Path | None = None
) -> Iterator[None]:
    """Hold the lock `file`, which is created here and removed when the lock is released.

    The system releases the lock of a process that is killed. On a file system without locks, the
    block runs unlocked after a warning.

    Args:
        file: the lock file, whose folder is created if it is missing.
        busy: the error message if another process holds the lock.
        waiting: called with `busy` before waiting for the lock; None raises instead.
        of: the path to name if the lock cannot be created; None names the lock itself.

    Raises:
        DataError: if another process holds the lock, or the file cannot be created.
    """
    # A file whose existence is the lock would outlive its process.
    lock = FileLock(file, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            file.touch()  # FileLock takes a file that cannot be made, as in /proc, for a held lock
            if waiting is None:
                raise DataError(f"{busy}; wait for it or choose another folder") from None
            waiting(f"{busy}: waiting for it")
            lock.acquire()
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
        # While the lock is held: whoever has opened the removed file notices and makes a new one.
        file.unlink(missing_ok=True)
        lock.release()


@cache
def _warn_without_locks(folder: Path, reason: str) -> None:
    """Once for a folder."""
    log.warning(
        "%s is on a file system without locks (%s): let nothing else write there", folder, reason
    )
