"""Tables as text or Markdown; the report's template renders them as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

from d2plm.core.estimate import Estimate


@dataclass(frozen=True)
class Number:
    """A number or an estimate with its format; None is shown as a dash."""

    value: float | Estimate | None
    form: str

    def __str__(self) -> str:
        return "–" if self.value is None else format(self.value, self.form)


Cell = str | Number


@dataclass(frozen=True)
class Table:
    """Rows of cells under `heads`, `notes` below; the row with the first cell `marked` is bold."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    marked: str = ""
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Aligned columns: the first to the left, the others to the right."""
        cells = [[*map(str, row)] for row in (self.heads, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip()
            for first, *others in cells
        ]
        return "\n".join([*lines, *self.notes])

    def markdown(self) -> str:
        lines = [[*self.heads], [":---", *["---:"] * (len(self.heads) - 1)]]
        for row in self.rows:
            bold = "**" if self.marked and row[0] == self.marked else ""
            lines.append([f"{bold}{cell}{bold}" if str(cell) else "" for cell in row])
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([table, *(["\n".join(self.notes)] if self.notes else [])])
