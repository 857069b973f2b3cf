"""What more devices bring and cost, measured and predicted apart."""

import json
from typing import Any

import meshwright as mw
from meshwright.bench.comparison import NAMED, plan_of
from meshwright.bench.fleet import fleet_of
from meshwright.bench.scaling import (
    MEASURED,
    PREDICTED,
    Scaling,
    bottleneck,
    measure_scaling,
)
from meshwright.errors import PlanError
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate

import numpy as np
import pytest

from toys import BATCH, make_model


@pytest.fixture(scope="module")
def here() -> Scaling:
    return measure_scaling(make_model(), BATCH, fleet_of([1, 2]), samples=1000)


@pytest.fixture(scope="module")
def elsewhere() -> Scaling:
    fleet = fleet_of(machine="4xH200", price=3.0)
    return measure_scaling(make_model(), 1024, fleet, samples=10_000, epochs=5)


def rows_of(found: Scaling, origin: str) -> list[Any]:
    return [table for table in found.tables() if table.title.endswith(origin)]


def test_every_number_of_devices_that_are_here_is_timed(here: Scaling) -> None:
    for table in rows_of(here, MEASURED):
        assert [row["devices"] for row in table.rows] == [1, 2]
        assert all(row["step_seconds"] > 0 for row in table.rows)
        assert table.rows[0]["speed_up"] == table.rows[0]["efficiency"] == 1.0


def test_what_is_measured_and_what_is_predicted_are_tables_of_their_own(
    here: Scaling,
) -> None:
    titles = [table.title for table in here.tables()]
    assert len(titles) == 4
    assert [t.rpartition(", ")[2] for t in titles] == 2 * [MEASURED, PREDICTED]
    strong = here.tables()[0].rows[1], here.tables()[1].rows[1]
    assert strong[0]["step_seconds"] != strong[1]["step_seconds"]


def test_speed_up_and_efficiency_follow_from_the_timed_steps(here: Scaling) -> None:
    strong, weak = rows_of(here, MEASURED)
    one, two = strong.rows
    gain = one["step_seconds"] / two["step_seconds"]
    assert two["speed_up"] == pytest.approx(gain)
    assert two["efficiency"] == pytest.approx(gain / 2)
    assert one["epoch_seconds"] == pytest.approx(63 * one["step_seconds"])
    one, two = weak.rows
    assert (one["global_batch"], two["global_batch"]) == (BATCH // 2, BATCH)
    gain = 2 * one["step_seconds"] / two["step_seconds"]
    assert two["speed_up"] == pytest.approx(gain)


def test_a_strategy_that_is_named_is_timed_for_every_number_of_devices() -> None:
    told: list[str] = []
    options: dict[str, Any] = {"weak": False, "strategy": "FSDP", "tell": told.append}
    found = measure_scaling(make_model(), BATCH, fleet_of([1, 2]), **options)
    for table in found.tables():
        assert [row["plan"] for row in table.rows] == ["one device", "fsdp=2"]
        assert "The plans are those of FSDP." in table.notes
    assert told == [
        f"timing one device, a batch of {BATCH}",
        f"timing fsdp=2, a batch of {BATCH}",
    ]


@pytest.mark.parametrize("name", NAMED)
def test_the_names_are_those_of_strategies(name: str) -> None:
    assert hasattr(mw, name)
    assert plan_of(name, 1) == Plan()
    assert plan_of(name, 4).num_devices == 4


def test_the_model_is_as_it_was(here: Scaling) -> None:
    model, twin = make_model(), make_model()
    measure_scaling(model, BATCH, fleet_of([2]), weak=False)
    for ours, theirs in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_cost_of_a_training_elsewhere_is_predicted(elsewhere: Scaling) -> None:
    (table,) = elsewhere.costs()
    assert table.title == "toy, the cost of 5 epochs of 10,000 samples, predicted"
    assert [row["devices"] for row in table.rows] == [1, 2, 4]
    for row in table.rows:
        hours = row["job_seconds"] / 3600
        assert row["job_dollars"] == pytest.approx(3.0 * hours * row["devices"])
        assert row["job_dollars"] == pytest.approx(5 * row["epoch_dollars"])
    assert [row["best_return"] for row in table.rows].count(True) == 1
    assert "$3.00 an hour" in table.notes[0]


def test_a_price_that_is_not_known_is_asked_for() -> None:
    found = measure_scaling(make_model(), BATCH, fleet_of([1]), weak=False)
    table = found.costs()[0]
    assert table.rows[0]["job_dollars"] is None
    assert "--price" in table.notes[0]


def test_all_figures_are_json(elsewhere: Scaling) -> None:
    for table in (*elsewhere.tables(), *elsewhere.costs()):
        json.dumps(table.to_json(), allow_nan=False)


def test_a_number_of_devices_that_nothing_fits_says_so() -> None:
    out = Candidate(plan=Plan(data=2), fits=False, because="9 GiB per device > 8 GiB")
    assert bottleneck(out) == "9 GiB per device > 8 GiB"
    assert bottleneck(Candidate(plan=Plan())) is None


def test_what_is_no_model_is_refused() -> None:
    not_a_model: Any = "model"
    with pytest.raises(PlanError, match="bench received 'model'"):
        measure_scaling(not_a_model, BATCH, fleet_of([1]))
