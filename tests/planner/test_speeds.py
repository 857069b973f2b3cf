"""Where the speed of a machine is known from, and that it is said."""

from pathlib import Path

from meshwright.planner.machines import parse_machine
from meshwright.planner.speed import (
    CollectivePoint,
    CrowdPoint,
    ProductPoint,
    Speed,
    StreamPoint,
)
from meshwright.planner.speeds import (
    fingerprint,
    known_speed,
    load_speed,
    speed_from_json,
    speed_to_json,
    store_speed,
)

import pytest

SPEED = Speed(
    products=(ProductPoint("product", "float32", "nn", 1, 2, 3, 4, 0.5),),
    streams=(StreamPoint(1.0, 2.0),),
    collectives=(CollectivePoint("all_reduce", 8, 1.0, 2.0),),
    crowding=(CrowdPoint("product", 8, 0.1, 1.5),),
    kernel=0.25,
    overlaps=False,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", str(tmp_path))


def test_a_speed_survives_being_written_down() -> None:
    again = speed_from_json(speed_to_json(SPEED))
    assert speed_to_json(again) == speed_to_json(SPEED)
    assert again.products == SPEED.products


def test_what_was_measured_here_is_used_here() -> None:
    machine = parse_machine(None)
    assert load_speed(machine) is None
    assert "not calibrated" in known_speed(machine).source
    assert known_speed(machine).error is None
    store_speed(machine, SPEED)
    found = known_speed(machine)
    assert found.source.startswith("calibrated on this machine on 20")
    assert found.speed.crowding == SPEED.crowding
    assert found.error is not None, "it was measured how good calibrated CPUs are"


def test_other_devices_have_another_fingerprint() -> None:
    store_speed(parse_machine(None), SPEED)
    fewer = parse_machine(["CPU:0", "CPU:1"])
    assert fingerprint(fewer) != fingerprint(parse_machine(None))
    assert load_speed(fewer) is None


def test_a_damaged_file_is_no_calibration(tmp_path: Path) -> None:
    file = store_speed(parse_machine(None), SPEED)
    file.write_text("{")
    assert load_speed(parse_machine(None)) is None


def test_accelerators_of_the_catalog_say_what_their_speed_rests_on() -> None:
    assert "measured on one NVIDIA H200" in known_speed(parse_machine("H200")).source
    said = known_speed(parse_machine("8xA100")).source
    assert said.startswith("catalog peaks of NVIDIA A100")


def test_a_slower_accelerator_takes_longer_by_the_ratios_of_its_peaks() -> None:
    fast = known_speed(parse_machine("H200")).speed.products
    slow = known_speed(parse_machine("A100")).speed.products
    for a, b in zip(fast, slow, strict=True):
        peaks = {"float32": (494.5, 156.0), "bfloat16": (989.5, 312.0)}[a.dtype]
        assert 1.0 < b.seconds / a.seconds <= 1.001 * peaks[0] / peaks[1]
    largest = max(fast, key=lambda point: point.seconds)
    assert slow[fast.index(largest)].seconds / largest.seconds > 2.9
