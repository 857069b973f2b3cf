"""A table of figures, each column measured or predicted and never both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.planner.figures import UNKNOWN, draw_table, indent


@dataclass(frozen=True, slots=True)
class Column:
    """What stands in one place of every row.

    Attributes:
        key: Its name in the rows and in JSON.
        title: Its heading.
        show: Writes a value that is known.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str

    def text(self, row: Mapping[str, Any]) -> str:
        """The value of a row as people read it."""
        value = row.get(self.key)
        return UNKNOWN if value is None else self.show(value)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of figures under columns; None is unknown.

    >>> table = Table("Two rows", (Column("devices", "devices"),
    ...               Column("step", "step", "{:.1f} ms".format)),
    ...               ({"devices": 1, "step": 2.0}, {"devices": 2, "step": None}))
    >>> print(table)
    Two rows
    devices    step
    1        2.0 ms
    2             -
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()
    wide: str = ""
    """The key of the column whose texts may be long; the first one if left out."""

    def __str__(self) -> str:
        keys = [column.key for column in self._shown()]
        wide = keys.index(self.wide) if self.wide in keys else 0
        lines = [self.title, *draw_table(self.head(), self.cells(), wide)]
        for note in self.notes:
            lines += indent(note)
        return "\n".join(lines)

    def head(self) -> list[str]:
        """The headings of columns of which something is known."""
        return [column.title for column in self._shown()]

    def cells(self) -> list[list[str]]:
        """What stands beneath them, as people read it."""
        shown = self._shown()
        return [[column.text(row) for column in shown] for row in self.rows]

    def to_markdown(self) -> str:
        """The table for a page of text."""
        head = self.head()
        lines = [_row(head), _row(["---"] * len(head)), *map(_row, self.cells())]
        notes = [line for note in self.notes for line in ("", note)]
        return "\n".join([f"### {self.title}", "", *lines, *notes])

    def to_json(self) -> dict[str, Any]:
        """All figures, unrounded, also those that no column shows."""
        return {
            "title": self.title,
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def _shown(self) -> list[Column]:
        """Columns of which something is known."""
        return [
            column
            for column in self.columns
            if any(row.get(column.key) is not None for row in self.rows)
        ]


def _row(cells: list[str]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"
