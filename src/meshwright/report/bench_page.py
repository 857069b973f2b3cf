"""The page of a benchmark: its tables, each with its chart."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.bench.table import Table
from meshwright.report import charts
from meshwright.report.page import Section, command, figure, page, paragraph, table

from markupsafe import Markup


def bench_page(title: str, tables: Sequence[Table], words: Sequence[str]) -> str:
    """The page of a benchmark, as one file.

    Arguments:
        title: What was asked.
        tables: The answers.
        words: The command that asks again.

    >>> from meshwright.bench.table import Column
    >>> table = Table("Two devices", (Column("devices", "devices"),), ({"devices": 2},))
    >>> "<h2>Two devices</h2>" in bench_page("scaling", [table], ["meshwright"])
    True
    """
    sections = [Section(each.title, _parts(each)) for each in tables]
    again = Section("To do it again", (command(shlex.join(words)),))
    return page(title, "measured or predicted, as each table says", [*sections, again])


def _parts(shown: Table) -> tuple[Markup, ...]:
    figures = table(shown.head(), shown.cells())
    chart = _chart(shown)
    notes = map(paragraph, shown.notes)
    return (figures if chart is None else figure(chart, figures, is_open=True), *notes)


def _chart(shown: Table) -> Markup | None:
    """What suits the columns that are shown."""
    keys = {column.key for column in shown.columns}
    if "job_dollars" in keys:
        return _costs(shown) or _speed_up(shown)
    if "speed_up" in keys:
        return _speed_up(shown)
    if "compiled_bytes" in keys:
        return _steps(shown)
    if "samples_per_second" in keys:
        rates = _known(shown, "samples_per_second")
        return charts.bars("Samples a second", [(r["part"], v) for r, v in rates])
    return None


def _speed_up(shown: Table) -> Markup | None:
    found = [(float(r["devices"]), v) for r, v in _known(shown, "speed_up")]
    if not found:
        return None
    (first, gain), *_ = found
    ideal = [(number, number / first * gain) for number, _ in found]
    origin = "predicted" if shown.title.endswith("predicted") else "measured"
    lines = [charts.Series(origin, found, True), charts.Series("ideal", ideal, True)]
    return charts.plot("Speed-up by devices", lines, "devices", "speed-up")


def _costs(shown: Table) -> Markup | None:
    found = _known(shown, "job_dollars")
    if not found:
        return None
    bars = [(_devices(row["devices"]), dollars) for row, dollars in found]
    return charts.bars("Dollars for the whole training", bars, " US$")


def _steps(shown: Table) -> Markup | None:
    found = _known(shown, "measured_seconds")
    if not found:
        return None
    bars = [(f"{r['strategy']} ({r['plan']})", 1000 * s) for r, s in found]
    return charts.bars("A step of each strategy, measured", bars, " ms")


def _known(shown: Table, key: str) -> list[tuple[Mapping[str, Any], float]]:
    return [(row, row[key]) for row in shown.rows if row.get(key) is not None]


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"
