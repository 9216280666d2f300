"""Deferring signals over a block, and unwinding the stack on SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Exit code of a process that ended because it lost another one. The training operator restarts pods
# with exit codes above 127; this code has no other meaning.
LOST = 128 + signal.SIGUSR1


@contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the end of the block.

    A process that is started inside the block is recorded before a handler can raise, so it can be
    ended. Python runs handlers in the main thread only; in other threads this does nothing.
    """
    held: list[int] = []
    with handled(lambda number, _: held.append(number), signal.SIGINT, signal.SIGTERM):
        yield
    for received in held:
        signal.raise_signal(received)


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that child processes end and temporary files are removed.

    Raises:
        SystemExit: with 143, on the signal; in the main thread only.
    """

    def unwind(_signal: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    with handled(unwind, signal.SIGTERM):
        yield


@contextmanager
def handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Handle signals over the block, in the main thread only."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
