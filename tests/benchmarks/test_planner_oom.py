"""The verdicts of the memory trials, without a GPU."""

from collections.abc import Callable
from typing import Any

import meshwright  # noqa: F401

import pytest
from planner_oom import (
    ABOVE,
    BELOW,
    TARGETS,
    Search,
    Setting,
    Trial,
    summary,
    table,
)


def trial(share: float, outcome: str = "", **changes: Any) -> Trial:
    """One that needs a share of 1000 bytes."""
    fields: dict[str, Any] = {
        "setting": "net",
        "model": "net",
        "levers": {},
        "batch": 8,
        "step_bytes": 500,
        "trial_bytes": 0,
        "bytes_to_run": round(share * 1000),
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


def test_what_was_said_to_fit_and_did_not_is_counted_apart() -> None:
    trials = [
        trial(0.9, "ran", peak=900),
        trial(0.9, "out of memory"),
        trial(1.1, "ran"),
        trial(1.1, "out of memory"),
    ]
    assert summary(trials) == (
        "2 of 4 verdicts were right; 1 were said to fit and did not, 1 ran although "
        "they were said not to. Those that ran used 100% to 100% of what they were "
        "said to need."
    )
    rows = table(trials).splitlines()[2:]
    assert ["**" in row for row in rows] == [False, True, True, False]


class _Known(Search):
    """A model of which it is known what it needs, in thousandths of the limit."""

    def __init__(self, needed: Callable[[int], float], guess: int) -> None:
        self._setting = Setting(model="known", guess=guess)
        self._limit = 1000
        self._needed = needed
        self._found: dict[int, Trial] = {}

    def _measure(self, batch: int) -> None:
        assert batch not in self._found, "it is known"
        kinds = {"parameters": round(self._needed(0))}
        share = self._needed(batch) / 1000
        self._found[batch] = trial(share, batch=batch, by_kind=kinds)


def line(batch: int) -> float:
    return 100 + 3 * batch


def with_a_jump(batch: int) -> float:
    return 100 + 3 * batch + (150 if batch > 200 else 0)


def with_a_step_down(batch: int) -> float:
    """The compiler saves memory, from some size on."""
    return 100 + 5 * batch if batch < 150 else 60 + 3 * batch


def in_leaps(batch: int) -> float:
    return 100 + 60 * batch


@pytest.mark.parametrize("guess", [4, 64, 2000])
@pytest.mark.parametrize("needed", [line, with_a_jump, with_a_step_down, in_leaps])
@pytest.mark.parametrize("targets", TARGETS)
def test_every_setting_gets_a_batch_in_each_band(
    needed: Callable[[int], float], guess: int, targets: tuple[float, float]
) -> None:
    search = _Known(needed, guess)
    for target, (low, high) in zip(targets, (BELOW, ABOVE), strict=True):
        found = search.find(target, (low, high))
        assert found is not None
        assert low <= found.share <= high
        assert search.find(target, (low, high)) is found, "it is known now"
    if needed is line:
        assert len(search._found) <= 4, "a line is known from one batch"


def test_batches_are_cut_into_microbatches_of_one_size() -> None:
    search = _Known(lambda n: 100 + 3 * n + 200 * (n % 2), guess=40)
    search._setting = Setting(model="known", levers={"accumulate": 2}, guess=40)
    for target, band in ((0.95, BELOW), (1.1, ABOVE)):
        found = search.find(target, band)
        assert found is not None
        assert found.batch % 2 == 0


def test_a_band_that_no_batch_reaches_has_no_trial() -> None:
    assert _Known(lambda batch: 100 + 800 * batch, 1).find(0.95, BELOW)
    assert _Known(lambda batch: 100 + 700 * batch, 1).find(0.95, BELOW) is None
    assert _Known(lambda n: min(100 + 3 * n, 400), 200).find(0.95, BELOW) is None
