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
