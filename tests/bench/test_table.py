"""Tables of figures: as text, as Markdown, as JSON."""

import json

from meshwright.bench.table import Column, Table

COLUMNS = (
    Column("plan", "plan"),
    Column("seconds", "measured step", "{:.1f} s".format),
    Column("guess", "predicted step", "{:.1f} s".format),
)


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    table = Table("t", COLUMNS, ({"plan": "data=2", "seconds": 1.25},))
    assert str(table).splitlines() == [
        "t",
        "plan    measured step",
        "data=2          1.2 s",
    ]


def test_a_single_unknown_value_is_a_dash() -> None:
    rows = ({"plan": "a", "seconds": 1.0, "guess": 2.0}, {"plan": "b", "guess": 3.0})
    last = str(Table("t", COLUMNS, rows)).splitlines()[-1]
    assert last.split() == ["b", "-", "3.0", "s"]


def test_markdown_keeps_its_columns_whatever_stands_in_a_cell() -> None:
    rows = ({"plan": "a|b\nc", "seconds": 1.0},)
    lines = Table("t", COLUMNS, rows, ("A note.",)).to_markdown().splitlines()
    assert lines == [
        "### t",
        "",
        "| plan | measured step |",
        "| --- | --- |",
        "| a\\|b c | 1.0 s |",
        "",
        "A note.",
    ]


def test_json_has_all_figures_unrounded() -> None:
    rows = ({"plan": "a", "seconds": 0.123456, "guess": None},)
    found = json.loads(json.dumps(Table("t", COLUMNS, rows).to_json()))
    assert found["rows"] == [{"plan": "a", "seconds": 0.123456, "guess": None}]
