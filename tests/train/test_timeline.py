"""Where the time of steps goes, by when they began and ended."""

import threading
from typing import Any

from meshwright.train.timeline import (
    Dispatch,
    Ledger,
    Spent,
    complaints,
    is_enough,
    spent_on,
)

import pytest


def dispatch(began: float, ended: float, **facts: Any) -> Dispatch:
    known: dict[str, Any] = {"steps": 1, "samples": 32, "entered": 0.0, "waited": 0.0}
    return Dispatch(began=began, ended=ended, **known | facts)


def test_devices_that_always_have_something_to_do_are_never_idle() -> None:
    given = [dispatch(0, 2), dispatch(0.1, 4), dispatch(0.2, 6)]
    found = spent_on(given, since=0)
    assert found == Spent(steps=3, samples=96, devices=6.0)


def test_what_is_waited_for_while_the_devices_work_costs_nothing() -> None:
    given = [dispatch(0, 5), dispatch(4, 7, waited=4)]
    assert spent_on(given, since=0).input == 0


def test_idle_time_goes_to_the_data_as_far_as_it_was_waited_for() -> None:
    given = [dispatch(0, 1), dispatch(4, 5, waited=2)]
    found = spent_on(given, since=0)
    assert (found.devices, found.input, found.host) == (2, 2, 1)


def test_compiling_counts_apart() -> None:
    given = [dispatch(0, 9, compiled=True), dispatch(9, 10)]
    found = spent_on(given, since=0)
    assert (found.compile, found.devices) == (9, 1)


def test_what_lies_between_epochs_counts_for_none() -> None:
    given = [dispatch(0, 1), dispatch(11, 12, entered=10.5)]
    found = spent_on(given, since=0)
    assert found.seconds == 2.5
    assert found.host == 0.5


def test_parts_add_up_to_the_time_since() -> None:
    given = [dispatch(1, 3, waited=0.5), dispatch(2, 8), dispatch(9, 9.5, waited=9)]
    found = spent_on(given, since=0)
    assert found.seconds == 9.5
    assert sum(map(found.share, ("devices", "input", "host", "compile"))) == 1


def test_a_while_without_steps_has_no_rates() -> None:
    nothing = spent_on([], since=3)
    assert nothing.samples_per_second is None
    assert nothing.step_seconds is None
    assert nothing.share("devices") == 0
    assert nothing.to_json()["step_seconds"] is None


def test_a_ledger_gives_each_step_once_and_goes_on_where_it_was() -> None:
    ledger = Ledger()
    ledger.add(dispatch(1, 2))
    assert ledger.take().host == 1
    ledger.add(dispatch(5, 6))
    assert ledger.take() == Spent(steps=1, samples=32, devices=1.0, host=3.0)
    assert ledger.take() == Spent()


def test_no_step_is_lost_while_somebody_asks() -> None:
    ledger, taken = Ledger(), 0

    def write() -> None:
        for _ in range(20_000):
            ledger.add(dispatch(0, 0))

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        taken += ledger.take().steps
    assert taken + ledger.take().steps == 20_000


@pytest.mark.parametrize(
    ("spent", "words"),
    [
        (
            Spent(devices=5.0, input=5.0),
            "the devices waited for data 50 % of the time",
        ),
        (
            Spent(devices=6.0, host=4.0),
            "the devices waited for Python 40 % of the time",
        ),
        (
            Spent(devices=7.0, compile=3.0),
            "steps were compiled anew for 30 % of the time",
        ),
    ],
)
def test_what_slows_down_is_said(spent: Spent, words: str) -> None:
    assert complaints(spent, is_first=False) == [words]


@pytest.mark.parametrize(
    ("spent", "is_first"),
    [
        (Spent(devices=9.0, input=1.0), False),  # too small a share
        (Spent(devices=1.0, compile=9.0), True),  # as it has to be
    ],
)
def test_nothing_is_said_without_need(spent: Spent, is_first: bool) -> None:
    assert complaints(spent, is_first) == []


def test_short_whiles_are_not_judged_but_add_up() -> None:
    short = Spent(steps=1, devices=2.0, input=1.0)
    assert not is_enough(short)
    assert is_enough(short + short)
    assert (short + short).steps == 2
