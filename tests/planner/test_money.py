"""What is wanted of a plan, which plan that is, and what more devices bring."""

from dataclasses import replace
from math import inf
from typing import Any

from meshwright.errors import ObjectiveError
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.machines import parse_machine
from meshwright.planner.money import (
    Wishes,
    band,
    choose,
    scaling_rows,
    scaling_table,
)

import pytest

from planned import BATCH, candidate, eight_h200, large_model

H200 = eight_h200()
PRICE = H200.price or 0.0


def plans(*seconds_by_devices: tuple[int, float]) -> list[Candidate]:
    return [
        candidate(H200, Plan(data=n), seconds, 10) for n, seconds in seconds_by_devices
    ]


def names(found: tuple[Candidate, ...]) -> list[str]:
    return [each.plan.describe() for each in found]


def test_the_objective_decides_the_order() -> None:
    made = [
        candidate(H200, Plan(), 1.0, 40),
        candidate(H200, Plan(data=8), 0.2, 40),
        candidate(H200, Plan(fsdp=8), 0.3, 5),
    ]
    for objective, order in {
        "fastest": ["data=8", "fsdp=8", "one device"],
        "cheapest": ["one device", "data=8", "fsdp=8"],  # 1.0, 1.6, 2.4 device-seconds
        "smallest": ["fsdp=8", "data=8", "one device"],
    }.items():
        choice = choose(made, Wishes(objective=objective), batch_size=BATCH)
        assert names(choice.candidates) == order
        assert choice.best is choice.candidates[0]
        assert choice.best.because == f"the {objective} of the plans that fit"


def test_of_equals_the_plainest_is_best() -> None:
    made = [
        candidate(H200, Plan(data=4, fsdp=2, remat=True), 0.2, 5),
        candidate(H200, Plan(data=4, fsdp=2), 0.2, 10),
        candidate(H200, Plan(data=8), 0.2, 20),
    ]
    choice = choose(made, Wishes(), batch_size=BATCH)
    assert names(choice.candidates) == [
        "data=8",
        "data=4 x fsdp=2",
        "data=4 x fsdp=2, remat",
    ]
    assert choice.candidates[1].because == "as fast, and less plain"


def test_what_is_too_close_to_tell_is_decided_by_plainness() -> None:
    made = [
        candidate(H200, Plan(fsdp=8), 0.198, 10),
        candidate(H200, Plan(data=8), 0.2, 20),
        candidate(H200, Plan(data=4), 0.21, 20),
    ]
    choice = choose(made, Wishes(), batch_size=BATCH)
    assert names(choice.candidates) == ["data=8", "fsdp=8", "data=4"]
    assert choice.best is not None
    assert choice.best.because == "the plainest of the fastest plans that fit"
    because = "predicted 1 % faster, too close to tell, and less plain"
    assert choice.candidates[1].because == because
    smallest = choose(made, Wishes(objective="smallest"), batch_size=BATCH)
    assert names(smallest.candidates)[0] == "fsdp=8"


def test_each_loser_says_by_how_much_and_what_makes_the_difference() -> None:
    fast = replace(
        candidate(H200, Plan(data=8), 0.20, 40),
        parts={"compute": 0.15, "communication": 0.05},
    )
    slow = replace(
        candidate(H200, Plan(fsdp=8), 0.25, 5, because="noted before"),
        parts={"compute": 0.15, "communication": 0.10},
    )
    made = [fast, slow, candidate(H200, Plan(tensor=8), 0.5, 30)]

    def lost(objective: str) -> list[str]:
        choice = choose(made, Wishes(objective=objective), batch_size=BATCH)
        return [each.because for each in choice.candidates[1:]]

    assert lost("fastest") == [
        "predicted 25 % slower: 50.0 ms more communication; noted before",
        "predicted 2.5 x the time: 225 ms more compute",
    ]
    assert lost("cheapest") == [
        "predicted 25 % dearer; noted before",
        "predicted 2.5 x as dear",
    ]
    assert lost("smallest") == [
        "predicted 25.0 GiB more per device",
        "predicted 35.0 GiB more per device",
    ]


def test_what_is_not_known_comes_last_and_says_so() -> None:
    made = [Candidate(plan=Plan(fsdp=8)), *plans((8, 0.2))]
    for objective, because in {
        "fastest": "its time is not known",
        "cheapest": "its time is not known",
        "smallest": "its memory is not known",
    }.items():
        choice = choose(made, Wishes(objective=objective), batch_size=BATCH)
        assert names(choice.candidates) == ["data=8", "fsdp=8"]
        assert choice.candidates[1].because == because


def test_a_measured_time_counts_more_than_a_predicted_one() -> None:
    made = plans((8, 0.2), (4, 0.3))
    made[0] = replace(made[0], measured_seconds=0.4)
    choice = choose(made, Wishes(), batch_size=BATCH)
    assert names(choice.candidates) == ["data=4", "data=8"]
    assert choice.candidates[1].because.startswith("measured 33 % slower")


def test_plans_that_do_not_fit_stay_out_with_their_reason() -> None:
    made = large_model(H200)
    choice = choose(made, Wishes(), batch_size=BATCH)
    assert [each for each in made if not each.fits] == list(choice.rejected)
    assert all(each.fits for each in choice.candidates)
    assert len(choice.rejected) + len(choice.candidates) == len(made)


def test_a_deadline_takes_the_cheapest_plan_that_keeps_it() -> None:
    # 100 steps of 9 s, 5 s, 4 s on 1, 2, 4 devices.
    made = plans((1, 9.0), (2, 5.0), (4, 4.0))
    wishes = Wishes(finish_by=600 / 3600, samples=100 * BATCH)
    choice = choose(made, wishes, batch_size=BATCH)
    assert wishes.objective == "cheapest"
    assert names(choice.candidates) == ["data=2", "data=4"]
    (late,) = choice.rejected
    assert (late.fits, late.reason) == (False, "deadline")
    assert late.because == "the training takes predicted 15.0 min > 10.0 min"


def test_a_budget_takes_the_fastest_plan_that_keeps_it() -> None:
    # 100 steps cost 900, 1000, 1600 device-seconds.
    made = plans((1, 9.0), (2, 5.0), (4, 4.0))
    wishes = Wishes(at_most=PRICE * 1200 / 3600, samples=50 * BATCH, epochs=2)
    choice = choose(made, wishes, batch_size=BATCH)
    assert names(choice.candidates) == ["data=2", "one device"]
    (dear,) = choice.rejected
    assert (dear.fits, dear.reason) == (False, "budget")
    assert dear.because == "the training costs predicted $3.52 > $2.64"


def test_a_deadline_that_no_plan_keeps_is_no_error() -> None:
    wishes = Wishes(finish_by=1e-6, samples=BATCH)
    choice = choose(plans((1, 9.0)), wishes, batch_size=BATCH)
    assert choice.best is None
    assert choice.candidates == ()
    assert [each.reason for each in choice.rejected] == ["deadline"]


def test_steps_are_rounded_up_in_every_epoch() -> None:
    assert Wishes(samples=1025, epochs=3).num_steps(1024) == 6
    assert Wishes(samples=1024).num_steps(1024) == 1
    assert Wishes().num_steps(1024) is None


def asked(text: str) -> str:
    return f"A plan was asked for with {text}."


BAD: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"objective": "fasted"},
        [
            "'fasted' is not an objective.",
            "The objectives are 'fastest', 'cheapest', 'smallest'; finish_by and "
            "at_most bound time and money.",
            "Did you mean 'fastest'?",
        ],
    ),
    (
        {"objective": 7},
        [
            "7 is not an objective.",
            "The objectives are 'fastest', 'cheapest', 'smallest'; finish_by and "
            "at_most bound time and money.",
            "Use 'fastest'.",
        ],
    ),
    *(
        (
            {name: value, "samples": 100},
            [
                asked(f"{name}={value!r} (a {type(value).__name__})"),
                f"It takes a number above zero of {unit}.",
                f"Write, for example, {name}=2.5, or leave it out.",
            ],
        )
        for name, value, unit in (
            ("finish_by", 0, "hours, from the start to the end"),
            ("finish_by", -1.5, "hours, from the start to the end"),
            ("finish_by", "2h", "hours, from the start to the end"),
            ("at_most", 0, "US dollars, for the whole training"),
            ("at_most", inf, "US dollars, for the whole training"),
            ("at_most", True, "US dollars, for the whole training"),
        )
    ),
    *(
        (
            {"samples": 100, name: value},
            [
                asked(f"{name}={value!r} (a {type(value).__name__})"),
                f"{having} a whole number of {name} from 1.",
                f"Use {name}=1 or more, or leave it out.",
            ],
        )
        for name, value, having in (
            ("samples", 0, "An epoch has"),
            ("samples", 1.5, "An epoch has"),
            ("epochs", -1, "A training has"),
            ("epochs", True, "A training has"),
        )
    ),
    *(
        (
            given,
            [
                asked(f"{' and '.join(given)} and without samples"),
                "How long a training takes depends on the samples of an epoch.",
                "Pass their number, for example samples=50_000.",
            ],
        )
        for given in ({"finish_by": 1.0}, {"at_most": 5.0, "epochs": 3})
    ),
]


@pytest.mark.parametrize(("wishes", "lines"), BAD)
def test_wishes_that_cannot_be_are_refused(
    wishes: dict[str, Any], lines: list[str]
) -> None:
    with pytest.raises(ObjectiveError) as caught:
        Wishes(**wishes)
    assert str(caught.value).split("\n") == lines
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 2


def test_a_budget_without_a_price_is_refused() -> None:
    cpus = parse_machine("2xCPU")
    made = [candidate(cpus, Plan(data=2), 1.0, 1)]
    with pytest.raises(ObjectiveError) as caught:
        choose(made, Wishes(at_most=5, samples=BATCH), batch_size=BATCH)
    assert str(caught.value).split("\n") == [
        "A budget of $5.00 was given for devices whose price is not known.",
        "The catalog has prices of accelerators, and none of this one.",
        "Leave at_most out, or write the price into a catalog of your own and set "
        "MESHWRIGHT_CATALOG to it.",
    ]


def by_devices(*given: tuple[int, float]) -> dict[int, Candidate]:
    return {each.num_devices: each for each in plans(*given)}


def test_strong_scaling_is_measured_against_the_fewest_devices() -> None:
    made = by_devices((1, 8.0), (2, 5.0), (4, 4.0))
    rows = scaling_rows(made, batch_size=BATCH, samples=10 * BATCH - 1, epochs=3)
    assert [row.speed_up for row in rows] == [1.0, 1.6, 2.0]
    assert [row.efficiency for row in rows] == [1.0, 0.8, 0.5]
    assert [row.epoch_seconds for row in rows] == [80.0, 50.0, 40.0]
    assert [row.job_seconds for row in rows] == [240.0, 150.0, 120.0]
    dollars = [PRICE * 80 / 3600, PRICE * 100 / 3600, PRICE * 160 / 3600]
    assert [row.epoch_dollars for row in rows] == pytest.approx(dollars)
    assert [row.job_dollars for row in rows] == pytest.approx([3 * d for d in dollars])
    # Speed-up times efficiency: 1.0, 1.28, 1.0.
    assert [row.is_best_return for row in rows] == [False, True, False]


def test_in_weak_scaling_the_batch_grows_with_the_devices() -> None:
    made = by_devices((1, 1.0), (4, 1.25))
    rows = scaling_rows(made, batch_size=32, samples=1280, is_weak=True)
    assert [row.batch_size for row in rows] == [32, 128]
    assert [row.speed_up for row in rows] == [1.0, 3.2]
    assert [row.efficiency for row in rows] == [1.0, 0.8]
    assert [row.epoch_seconds for row in rows] == [40.0, 12.5]


def test_a_number_of_devices_on_which_nothing_fits_has_no_figures() -> None:
    made = {1: candidate(H200, Plan(), 9.0, 112), **by_devices((2, 5.0), (4, 2.5))}
    first, second, third = scaling_rows(made, batch_size=BATCH, samples=BATCH)
    assert (first.speed_up, first.job_seconds, first.job_dollars) == (None, None, None)
    assert not first.is_best_return
    assert (second.speed_up, third.speed_up) == (1.0, 2.0)
    assert third.efficiency == 1.0
    table = scaling_table([first])
    assert table[-1] == "  one device: predicted 112.0 GiB per device > 80.0 GiB"


def test_nothing_is_the_best_return_if_nothing_fits_or_is_known() -> None:
    made = {1: candidate(H200, Plan(), 9.0, 112), 2: Candidate(plan=Plan(data=2))}
    rows = scaling_rows(made, batch_size=BATCH)
    assert not any(row.is_best_return for row in rows)
    assert scaling_rows({}, batch_size=BATCH) == ()


def test_the_band_holds_every_truth_that_is_off_by_less_than_the_error() -> None:
    low, high = band(2.0, 0.25)
    for truth in (low, high):
        assert abs(2.0 - truth) / truth == pytest.approx(0.25)
    assert band(2.0, 1.0) == (1.0, inf)


def test_the_table_shows_what_is_known_and_marks_the_best_return() -> None:
    made = by_devices((1, 8.0), (2, 5.0))
    rows = scaling_rows(made, batch_size=BATCH, samples=100 * BATCH, epochs=90)
    table = scaling_table(rows, 0.25)
    assert [" ".join(line.split()) for line in table] == [
        "devices batch step speed-up efficiency epoch $/epoch job $/job",
        "1 1,024 8.0 s 1.00 x 100 % 13.3 min $1.76 20.0 h $158.24",
        "one device: 6.4 s to 10.7 s a step",
        "2 1,024 5.0 s 1.60 x 80 % 8.3 min $2.20 12.5 h $197.80",
        "data=2: 4.0 s to 6.7 s a step; the best return, as speed-up times efficiency "
        "is the greatest",
    ]
    assert len(table[0]) == len(table[1]) == len(table[3]), "flush right"
    plain = scaling_table(scaling_rows(made, batch_size=BATCH))
    assert plain[0] == "devices  batch   step  speed-up  efficiency"
    assert plain[2] == "  one device"


def test_a_row_is_json_with_the_entry_of_its_plan() -> None:
    (row,) = scaling_rows(by_devices((2, 5.0)), batch_size=BATCH, is_weak=True)
    facts = row.to_json()
    assert facts["scaling"] == "weak"
    assert facts["num_devices"] == 2
    assert facts["plan"]["data"] == 2
    assert facts["epoch_seconds"] is None
