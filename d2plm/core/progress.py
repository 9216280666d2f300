"""Progress on long work: a bar on a terminal, one line every so often elsewhere; on standard error.

Both say how fast it goes and how long it will take yet. With `--quiet` there is neither.
"""

import os
import sys
import time
from contextlib import suppress
from typing import Any, Self

from d2plm.core.terminal import QUIET, manner

LINE_EVERY_SECONDS = 15.0
PERCENT = "%"


class Progress:
    """Shows `total` units of work; `update` may be called as often as one likes.

    Args:
        what: the name of the work.
        total: units of it; None until `update_of` tells.
        start: units already done, which do not count towards the rate.
        unit: their name, in the plural.
    """

    def __init__(self, what: str, total: int | None = None, start: int = 0, unit: str = "") -> None:
        self.what, self.total, self.start, self.unit = what, total, start, unit.strip()
        self.began = self.last_line = time.monotonic()
        self._bar: Any = None
        self._is_quiet = QUIET in manner()
        on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._wants_bar = on_terminal and not self._is_quiet

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe is to get what is printed
        )
        self._task = self._bar.add_task(self.what, total=self.total, figures="")
        self._bar.start()

    def update(self, done: int, note: str = "") -> None:
        """`done` units are done."""
        if self._wants_bar:  # not before there is something to show
            self._wants_bar = False
            self._start_bar()
        now = time.monotonic()
        if self._bar is not None:
            figures = self._figures(done, note, now)
            self._bar.update(self._task, completed=done, figures=figures)
        elif now - self.last_line >= LINE_EVERY_SECONDS:
            self.last_line = now
            self.say(f"{self.what}  {self._figures(done, note, now)}")

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

    def _figures(self, done: int, note: str, now: float) -> str:
        """`120/500 proteins  12/s  note  0:01:10 left`, as far as it is known."""
        seconds = now - self.began
        rate = (done - self.start) / seconds if seconds > 0 else 0.0
        if self.unit == PERCENT:
            parts = [f"{done}%", note]
        else:
            total = "" if self.total is None else f"/{self.total:,}"
            per_second = f"{compact(rate)} {self.unit}".strip() + "/s" if rate > 0 else ""
            parts = [f"{done:,}{total} {self.unit}".strip(), note or per_second]
        if self.total is not None and rate > 0:
            parts.append(f"{clock((self.total - done) / rate)} left")
        return "  ".join(part for part in parts if part)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._is_quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
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


def clock(seconds: float) -> str:
    """Seconds as `h:mm:ss`, of days as `2 d 3:04:05`."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hour}:{minute:02}:{second:02}"


def compact(number: float) -> str:
    """A number in three figures: `0.52`, `12`, `14.4 k`, `3.2 M`."""
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.9995 * size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
