"""All strategies side by side."""

import meshwright as mw
from meshwright.bench.comparison import compare_strategies, plans_to_compare
from meshwright.bench.fleet import fleet_of
from meshwright.errors import MachineError

import pytest

from toys import BATCH, make_model


def test_the_strategies_that_people_name_are_compared() -> None:
    names = [name for name, _ in plans_to_compare(2)]
    assert names[:2] == ["Single", "Mirrored"]
    assert {"FSDP", "TensorParallel", "Layerwise", "Pipeline"} <= set(names)
    assert all(plan.num_devices == 8 for _, plan in [*plans_to_compare(8)][1:])


def test_each_is_timed_and_weighed_beside_its_prediction_the_fastest_first() -> None:
    table = compare_strategies(make_model(), BATCH, fleet_of([2]))
    timed = [row["measured_seconds"] for row in table.rows]
    assert len(timed) == 6
    assert timed == sorted(timed)
    assert all(row["predicted_seconds"] for row in table.rows)
    mirrored = next(row for row in table.rows if row["strategy"] == "Mirrored")
    # Weights of 212 floats, whole on each device, and some batch.
    assert mirrored["compiled_bytes"] > 4 * 212


def test_what_cannot_be_trained_stands_there_with_its_reason() -> None:
    mw.configure(memory_limit="1KiB")
    table = compare_strategies(make_model(), BATCH, fleet_of([2]))
    for row in table.rows:
        assert row["measured_seconds"] is None
        assert row["because"].endswith("per device > 1.0 KiB")
    assert "why not" in str(table)


def test_devices_that_are_not_here_are_refused() -> None:
    with pytest.raises(MachineError) as caught:
        compare_strategies(make_model(), BATCH, fleet_of(machine="8xH200"))
    assert caught.value.received.startswith(
        "Strategies were to be compared on 8 x H200"
    )
    assert "have to be here" in caught.value.rule
    assert "meshwright plan" in caught.value.change
