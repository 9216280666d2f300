"""Signals at moments that must not be split."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block has ended.

    A process that is started inside is known to whoever has to end it before the signal's handler
    can raise. The handlers run in the main thread alone; in another there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda n, _: held.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for received in held:
        signal.raise_signal(received)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind as an interrupt does, so that what the block holds is ended and removed.

    Raises:
        SystemExit: with 143, upon the signal; in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(_signal: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)  # an exit is not to be unwound a second time
