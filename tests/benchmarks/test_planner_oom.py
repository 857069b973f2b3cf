"""The verdicts of the memory trials, without a GPU."""

from typing import Any

import meshwright  # noqa: F401

import pytest
from planner_oom import ABOVE, BELOW, Search, Setting, Trial, summary, table


def trial(share: float, outcome: str = "", **changes: Any) -> Trial:
    """One that needs a share of 1000 bytes; a hundredth more is kept spare."""
    fields: dict[str, Any] = {
        "setting": "net",
        "model": "net",
        "levers": {},
        "batch": 8,
        "step_bytes": 500,
        "trial_bytes": 0,
        "bytes_to_run": round(share * 1000 / 0.99),
        "limit": 1000,
        "by_kind": {},
        "outcome": outcome,
    }
    return Trial(**{**fields, **changes})


def test_a_verdict_is_right_if_it_comes_as_it_was_said() -> None:
    assert trial(0.98, "ran").is_right
    assert not trial(0.98, "out of memory").is_right
    assert not trial(0.98, "ended with status 1").is_right
    assert trial(1.01, "out of memory").is_right
    assert not trial(1.01, "ran").is_right
    assert not trial(0.995).is_said_to_fit, "something is kept spare"


def test_what_was_said_to_fit_and_did_not_is_counted_apart() -> None:
    trials = [
        trial(0.9, "ran", peak=900),
        trial(0.9, "out of memory"),
        trial(1.1, "ran"),
        trial(1.1, "out of memory"),
    ]
    assert summary(trials) == (
        "2 of 4 verdicts were right; 1 were said to fit and did not, 1 ran although "
        "they were said not to. Those that ran used 99% to 99% of what they were said "
        "to need."
    )
    rows = table(trials).splitlines()[2:]
    assert ["**" in row for row in rows] == [False, True, True, False]


class _Line(Search):
    """A model that needs 100 bytes, and 3 more for each sample."""

    def __init__(self) -> None:
        self._setting = Setting(model="line", guess=4)
        self._limit = 1000
        self._found: dict[int, Trial] = {}

    def _measure(self, batch: int) -> None:
        needed = 100 + 3 * batch
        self._found[batch] = trial(needed / 1000, batch=batch)


@pytest.mark.parametrize(
    ("target", "band"), [(0.9, BELOW), (0.98, BELOW), (1.01, ABOVE), (1.1, ABOVE)]
)
def test_a_batch_is_found_with_few_guesses(
    target: float, band: tuple[float, float]
) -> None:
    search = _Line()
    found = search.find(target, band)
    assert band[0] <= found.share <= band[1]
    assert len(search._found) <= 4
    assert search.find(target, band) is found, "it is known now"
