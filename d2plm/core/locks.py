"""Exclusive locks between processes, for folders that only one of them may write at a time."""

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from d2plm.core.errors import DataError

log = logging.getLogger(__name__)


@contextmanager
def locked(
    file: Path, busy: str, *, waiting: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Hold the lock of the file `file`, which is made, and removed when the lock is released.

    The system releases the lock of a process that is killed. On a file system without locks, the
    block runs unlocked after a warning.

    Args:
        file: its folder is made where it is missing.
        busy: what the error says if another process holds the lock.
        waiting: called with `busy` before waiting for the lock; None raises instead.

    Raises:
        DataError: another process holds the lock, or the file cannot be made.
    """
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if waiting is None:
                raise DataError(f"{busy}; wait for it or choose another folder") from None
            waiting(f"{busy}: waiting for it")
            lock.acquire()
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK):
            raise DataError(
                f"{file}: cannot be written ({error.strerror}); check the folder, its permissions "
                "and the free space"
            ) from error
        log.warning(
            "%s is on a file system without locks (%s): let nothing else write there",
            file.parent,
            error.strerror,
        )
    try:
        yield
    finally:
        # While the lock is held: whoever has opened the removed file notices and makes a new one.
        file.unlink(missing_ok=True)
        lock.release()
