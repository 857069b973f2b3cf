"""Figures as people read them, and tables of them."""

import shutil
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of the widest line that is printed; narrower terminals have less."""

_NARROWEST = 40
_LEAST = 8
"""A column that is wrapped has at least so many, or the table becomes paragraphs."""

UNKNOWN = "-"

_UNITS = (
    *((365 * 86400.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min")),
    *((1.0, "s"), (1e-3, "ms")),
)


def format_seconds(seconds: float | None) -> str:
    """Writes a time in the unit that suits it.

    >>> format_seconds(0.0613), format_seconds(5400), format_seconds(None)
    ('61.3 ms', '1.5 h', '-')
    """
    if seconds is None:
        return UNKNOWN
    for size, unit in _UNITS:
        # Two minutes are 120 s, and two hours 120 min: one unit is too coarse.
        least = size if size <= 1 else 1.5 * size
        if seconds >= least:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def format_dollars(dollars: float | None) -> str:
    """Writes a price, with as many digits as tell something.

    >>> format_dollars(63.296), format_dollars(0.00123), format_dollars(12345.6)
    ('$63.30', '$0.0012', '$12,346')
    >>> format_dollars(12_345_678)
    '$12.3M'
    """
    if dollars is None:
        return UNKNOWN
    if dollars >= 1e6:
        return f"${_digits(dollars / 1e6)}M"
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.2g}"


def format_share(share: float | None) -> str:
    """Writes a share in percent.

    >>> format_share(0.4286), format_share(None)
    ('43 %', '-')
    """
    return UNKNOWN if share is None else f"{100 * share:.0f} %"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "plan"), count(1200, "plan")
    ('1 plan', '1,200 plans')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def draw_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], wide: int = 0
) -> list[str]:
    """The lines of a table that is no wider than the terminal; one column is wrapped.

    Where there is no room for a table, each row becomes a paragraph.

    Arguments:
        head: Names of the columns.
        rows: Their texts; what follows the last column is a note below its row.
        wide: The column that is wrapped and set flush left; others are flush right.

    >>> for line in draw_table(["plan", "step"], [["data=8", "61 ms", "the best"]]):
    ...     print(line)
    plan     step
    data=8  61 ms
      the best
    """
    number = len(head)
    columns = list(zip(head, *(row[:number] for row in rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    others = sum(widths) - widths[wide] + 2 * (number - 1)
    widths[wide] = min(widths[wide], line_width() - others)
    if widths[wide] < min(_LEAST, max(map(len, columns[wide]))):
        return [line for row in rows for line in _paragraph(head, row, wide)]
    lines = []
    for row in (head, *rows):
        wrapped = textwrap.wrap(row[wide], widths[wide]) or [""]
        for i, text in enumerate(wrapped):
            cells = ["" if i else cell for cell in row[:number]]
            cells[wide] = text
            lines.append(
                "  ".join(
                    cell.ljust(width) if column == wide else cell.rjust(width)
                    for column, (cell, width) in enumerate(
                        zip(cells, widths, strict=True)
                    )
                ).rstrip()
            )
        for note in row[number:]:
            lines += indent(note)
    return lines


def _paragraph(head: Sequence[str], row: Sequence[str], wide: int) -> list[str]:
    """A row without columns: what it is of, and what is known of that."""
    pairs = [
        f"{name} {cell}".strip()
        for number, (name, cell) in enumerate(zip(head, row, strict=False))
        if number != wide and cell not in ("", UNKNOWN)
    ]
    notes = [line for note in row[len(head) :] for line in indent(note)]
    return [*textwrap.wrap(row[wide], line_width()), *indent(", ".join(pairs)), *notes]


def indent(text: str, depth: int = 1) -> list[str]:
    """The lines of a paragraph that is set in, no wider than the terminal."""
    margin = "  " * depth
    return textwrap.wrap(
        text, line_width(), initial_indent=margin, subsequent_indent=margin + "  "
    )


def line_width() -> int:
    """Columns of the widest line here: those of the terminal, if there is one."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    return min(max(columns, _NARROWEST), WIDTH)


def _digits(number: float) -> str:
    if number >= 1e5:
        return f"{number:.1e}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"
