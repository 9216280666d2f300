"""Deferring signals over a block, and unwinding the stack on SIGTERM."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block has ended.

    A process that is started inside the block is recorded before a handler can raise, so it can be
    ended. Python runs handlers in the main thread only; in other threads this does nothing.
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
    """Let SIGTERM unwind the stack, so that child processes are ended and files are removed.

    Raises:
        SystemExit: with 143, on the signal; in the main thread only.
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
        signal.signal(signal.SIGTERM, before)  # an exit is not unwound a second time
