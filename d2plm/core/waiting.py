"""Log a line every minute during a wait, so that no wait is silent."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from d2plm.core.number_text import duration

REPORT_SECONDS = 60.0

log = logging.getLogger(__name__)


@contextmanager
def waiting(what: str, progress: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Log every minute that the block waits for `what`; a new value of `progress` restarts it."""
    ended = threading.Event()

    def report() -> None:
        began, last = time.monotonic(), progress()
        while not ended.wait(REPORT_SECONDS):
            waited, now = time.monotonic() - began, progress()
            if now != last:
                began, last = time.monotonic(), now
            else:
                log.info("waiting for %s, %s so far", what, duration(waited))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
