"""The devices of a benchmark."""

from pathlib import Path

from meshwright.bench.fleet import fleet_of
from meshwright.errors import MachineError

import pytest

from conftest import Run


def test_devices_that_are_here_are_taken_in_powers_of_two() -> None:
    fleet = fleet_of()
    assert fleet.counts == (1, 2, 4, 8)
    assert fleet.is_here(8)
    assert "share the cores" in fleet.notes[0]


def test_a_machine_that_is_not_here_is_not_measured() -> None:
    fleet = fleet_of([1, 16], "2x8xH100", price=2.0)
    assert fleet.counts == (1, 16)
    assert not fleet.is_here(1)
    assert fleet.part(16).dollars_per_hour() == 32.0
    assert fleet.notes == ()


@pytest.mark.parametrize("counts", [[], [0], [2, -1], [1.5]])
def test_numbers_that_are_none_are_refused(counts: list[int]) -> None:
    with pytest.raises(MachineError) as caught:
        fleet_of(counts)
    assert caught.value.received == f"The numbers of devices received are {counts!r}."
    assert "whole numbers from 1" in caught.value.rule
    assert "1,2,4,8" in caught.value.change


def test_more_cpus_than_are_here_are_refused() -> None:
    with pytest.raises(MachineError) as caught:
        fleet_of([1, 16])
    assert caught.value.received.startswith("16 devices were asked for, and 8 x CPU")
    assert "the catalog knows" in caught.value.rule
    assert "up to 8" in caught.value.change


def test_more_gpus_of_a_kind_that_is_here_are_predicted_for(run_script: Run) -> None:
    source = """
from meshwright.bench.fleet import fleet_of
fleet = fleet_of([1, 64], price=1.0)
print(fleet.is_here(1), fleet.is_here(64), fleet.all.num_devices, fleet.all.price)
"""
    fakes = str(Path(__file__).parents[1] / "fakes")
    shown = run_script(source, PYTHONPATH=fakes, CUDA_VISIBLE_DEVICES="2,3").stdout
    assert shown.split() == ["True", "False", "64", "1.0"]


def test_no_times_are_predicted_for_stand_ins(run_script: Run) -> None:
    source = """
import meshwright as mw
mw.configure(virtual="GPU:2")
from meshwright.bench.fleet import fleet_of
print(fleet_of().is_of_stand_ins, fleet_of().notes[1])
"""
    words = run_script(source).stdout
    assert words.startswith("True No times are predicted for stand-ins")
