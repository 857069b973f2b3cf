"""What a study gives back."""

import json
from pathlib import Path

from meshwright.errors import TrialError
from meshwright.trials.results import TrialRecord, TuneReport

import pytest


def report(*values: float | None) -> TuneReport:
    trials = [
        TrialRecord(
            number=number,
            state="failed" if value is None else "complete",
            value=value,
            params={"x": value} if number % 2 else {"y": None},
        )
        for number, value in enumerate(values)
    ]
    return TuneReport(
        study="one",
        direction="maximize",
        objective="a.py:f",
        trials=tuple(trials),
        n_trials=20,
        storage="sqlite://",
        folder=Path("runs/one"),
    )


def test_the_best_is_the_largest_if_that_was_wanted() -> None:
    found = report(1.0, 3.0, None, 2.0)
    assert (found.best_value, found.best_params) == (3.0, {"x": 3.0})
    assert [t.number for t in found.complete] == [1, 3, 0]


def test_there_is_no_best_without_a_value() -> None:
    with pytest.raises(TrialError) as none:
        _ = report(None, None).best_params
    assert str(none.value).splitlines() == [
        "None of the 2 trials of study 'one' has a value.",
        "The best trial is one of those that are complete.",
        f"See why they failed in {Path('runs/one/logs')}.",
    ]
    assert report(None).to_json()["best_value"] is None


def test_json_has_no_numbers_that_it_does_not_know() -> None:
    found = report(float("inf"), float("-inf"))
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [t["value"] for t in values["trials"]] == ["inf", "-inf"]
    assert values["trials"][1]["params"] == {"x": "-inf"}


def test_a_table_has_the_best_first_and_does_not_go_on_forever() -> None:
    lines = str(report(*map(float, range(15)), None)).splitlines()
    assert lines[0] == "study one (maximize): 15 complete, 1 failed"
    assert lines[1].split() == ["trial", "value", "y", "x", "state", "time", "where"]
    assert lines[2].split()[:4] == ["14", "14", "None", "-"]
    assert lines[3].split()[:4] == ["13", "13", "-", "13"]
    assert lines[-1] == "and 4 more"
