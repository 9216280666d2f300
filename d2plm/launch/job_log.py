"""All that the launcher reports about a job, in a file on the volume that outlives its pods.

Kubeflow Pipelines deletes a run's pods, and the job that they own, an hour after its end.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from d2plm.core.errors import D2PLMError
from d2plm.core.redaction import redacted
from d2plm.core.terminal import done

MOST_BYTES = 5_000_000  # maximum size of a file, which is then renamed to .1, .2 …
OLDER_FILES = 3
MOST_CHARACTERS = 4_000  # maximum length of a line
MOST_REDACTED = 2 * MOST_CHARACTERS  # so that secrets at the cut are recognised

log = logging.getLogger(__name__)


def job_log(config: Path) -> Path:
    """Path of the log of a run's training job, beside the run's configuration."""
    return config.with_suffix(".job.log")


@contextmanager
def logged(file: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line and appends it to `file`, without secrets.

    Each block begins a new file, since a step that adopts a job reads its log from the beginning.
    An error that ends the block is written, too. A file that cannot be written is reported once.
    """
    handler = _File(file)

    def write(text: str) -> None:
        for line in text.splitlines() or [""]:
            shown = redacted(line[:MOST_REDACTED])[:MOST_CHARACTERS]
            handler.handle(logging.makeLogRecord({"msg": shown}))

    def say(line: str) -> None:
        done(line)
        write(line)

    try:
        handler.begin()
        done(f"what follows is also in {file}")
        yield say
    except D2PLMError as error:
        write(str(error))
        raise
    finally:
        handler.addFilter(lambda _: False)  # a thread that still reads would open the file again
        with suppress(OSError):  # flushing the buffer fails on a full disk
            handler.close()


class _File(RotatingFileHandler):
    def __init__(self, file: Path) -> None:
        super().__init__(
            file, maxBytes=MOST_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True
        )
        self._is_reported = False

    def begin(self) -> None:
        """Rename the file of an earlier attempt."""
        try:
            if Path(self.baseFilename).exists():
                self.doRollover()
        except OSError as error:
            self._report(error)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        self._report(sys.exc_info()[1])

    def _report(self, error: BaseException | None) -> None:
        if not self._is_reported:
            self._is_reported = True
            log.warning("%s cannot be written: %s", self.baseFilename, error)
