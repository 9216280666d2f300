"""Progress on standard error: a bar on a terminal, otherwise a line every 15 seconds.

Both show the rate and the remaining time. With `--quiet` there is neither.
"""

import os
import sys
import time
from typing import Any, Self

from d2plm.core.number_text import duration, short_number
from d2plm.core.terminal import QUIET, output_modes

LINE_EVERY_SECONDS = 15.0


class Progress:
    """Progress of `total` units of work; updates may be as frequent as is convenient.

    Args:
        what: name of the work.
        total: number of units; None until `update` sets it.
        start: units already done, which do not count towards the rate.
        unit: plural name of the units, or `%`.
    """

    def __init__(self, what: str, total: int | None = None, start: int = 0, unit: str = "") -> None:
        self.what, self.total, self.start, self.unit = what, total, start, unit
        self.done = start
        self.began = self.last_line = time.monotonic()
        self._bar: Any = None
        self._is_quiet = QUIET in output_modes()
        on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._wants_bar = on_terminal and not self._is_quiet

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._wants_bar = False
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # keeps files and pipes unchanged
        )
        self._bar.add_task(self.what, total=self.total, figures="")
        self._bar.start()

    def update(self, done: int, total: int | None = None, *, note: str = "") -> None:
        """Set the completed units; a `total` replaces the earlier one, a `note` the rate."""
        self.done = done
        self.total = self.total if total is None else total
        if self._wants_bar:  # wait until there is something to show
            self._start_bar()
        now = time.monotonic()
        if self._bar is not None:
            figures = self._figures(note, now)
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=done, total=self.total, figures=figures)
        elif now - self.last_line >= LINE_EVERY_SECONDS:
            self.last_line = now
            self.say(f"{self.what}  {self._figures(note, now)}")

    def advance(self, units: int) -> None:
        self.update(self.done + units)

    def update_share(self, done: float, note: str = "") -> None:
        """Set the completed fraction, 0 … 1, of a `total` of 100. The bar disappears at the end."""
        self.update(int(100 * done), note=note)
        if done >= 1:
            self.close()

    def _figures(self, note: str, now: float) -> str:
        """`120/500 proteins  12/s  note  1 min 10 s left`, without unknown parts."""
        seconds = now - self.began
        rate = (self.done - self.start) / seconds if seconds > 0 else 0.0
        if self.unit == "%":
            parts = [f"{self.done}%", note]
        else:
            total = "" if self.total is None else f"/{self.total:,}"
            per_second = f"{short_number(rate)} {self.unit}".strip() + "/s" if rate > 0 else ""
            parts = [f"{self.done:,}{total} {self.unit}".strip(), note or per_second]
        if self.total is not None and rate > 0:
            parts.append(f"{duration(max(self.total - self.done, 0) / rate)} left")
        return "  ".join(part for part in parts if part)

    def say(self, line: str) -> None:
        """Print a line that is not overwritten."""
        if self._is_quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
