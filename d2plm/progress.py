"""Progress on long work: a rich bar on a terminal, one line every so often elsewhere."""

import sys
import time
from contextlib import suppress
from typing import Any, Self

LINE_EVERY_SECONDS = 15.0


class Progress:
    """Shows `total` units of work; `update` may be called as often as one likes.

    Args:
        what: the name of the work.
        total: units of it; None until `update_of` tells.
        start: units already done, which do not count towards the rate.
        unit: shown after the numbers.
    """

    def __init__(self, what: str, total: int | None = None, start: int = 0, unit: str = "") -> None:
        self.what, self.total, self.start, self.unit = what, total, start, unit
        self.began = self.last_line = time.monotonic()
        self._bar: Any = None
        self._wants_bar = sys.stderr.isatty()

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(self.unit),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self.what, total=self.total, completed=self.start, note="")
        self._bar.start()

    def update(self, done: int, note: str = "") -> None:
        """`done` units are done."""
        if self._wants_bar:  # not before there is something to show
            self._wants_bar = False
            self._start_bar()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self.last_line >= LINE_EVERY_SECONDS:
            self.last_line = now
            rate = (done - self.start) / (now - self.began)
            left = ((self.total or done) - done) / rate if rate > 0 else float("inf")
            self.say(f"{self.what} {done}/{self.total}{self.unit}  {note}  {left:.0f} s left")

    def update_share(self, done: float, note: str = "") -> None:
        """A share of the work, 0 … 1, is done; `total` is 100. At the end the bar goes away."""
        self.update(int(100 * done), note)
        if done >= 1:
            self.close()

    def update_of(self, done: int, total: int) -> None:
        """`done` of `total` units are done."""
        if self.total != total:
            self.total = total
            if self._bar is not None:
                self._bar.update(self._task, total=total)
        self.update(done)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            with suppress(BrokenPipeError):  # whoever listened has gone; the work goes on
                print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
