"""Devices, or shares of them, are dealt out to trials."""

from collections.abc import Sequence
from typing import Any

from meshwright.devices.device import Device
from meshwright.devices.settings import Settings
from meshwright.errors import ConfigurationError
from meshwright.trials import slots
from meshwright.trials.slots import deal_slots

import pytest


def gpu(index: int) -> Device:
    return Device(
        name=f"/device:GPU:{index}",
        kind="GPU",
        index=index,
        host="here",
        memory=100 * 2**30,
        model="NVIDIA H200",
        uuid=f"GPU-{index}{index}",
    )


def cpu() -> Device:
    return Device(
        name="/device:CPU:0", kind="CPU", index=0, host="here", memory=None, model="x"
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "list_devices", lambda: [gpu(0), gpu(1), cpu()])
    monkeypatch.setattr(slots, "current_settings", Settings)


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "list_devices", lambda: [cpu()])
    monkeypatch.setattr(slots, "current_settings", Settings)
    monkeypatch.setattr(slots, "usable_cores", lambda: [0, 1, 4, 5])


def environments(found: Sequence[slots.Slot]) -> list[dict[str, str]]:
    return [dict(slot.environment) for slot in found]


@pytest.mark.usefixtures("two_gpus")
def test_every_gpu_shows_itself_and_no_other() -> None:
    deal = deal_slots()
    assert environments(deal.slots) == [
        {"CUDA_VISIBLE_DEVICES": "GPU-00"},
        {"CUDA_VISIBLE_DEVICES": "GPU-11"},
    ]
    assert [slot.device for slot in deal.slots] == ["GPU:0", "GPU:1"]
    assert [slot.cores for slot in deal.slots] == [(), ()]
    assert deal.because == "one trial for each of GPU:0, GPU:1"


@pytest.mark.usefixtures("two_gpus")
def test_shares_of_a_gpu_have_a_budget_each() -> None:
    deal = deal_slots(["GPU:1"], 4)
    assert [slot.device for slot in deal.slots] == [f"GPU:1/{i}" for i in range(4)]
    assert (
        environments(deal.slots)
        == [
            {
                "CUDA_VISIBLE_DEVICES": "GPU-11",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2250",
            }
        ]
        * 4
    )
    assert deal.because == "one trial for each of GPU:1, 4 on each"
    (slot,) = deal_slots(1, memory="25GiB").slots
    assert slot.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2500"


@pytest.mark.usefixtures("two_gpus")
def test_a_host_with_gpus_can_be_told_to_use_its_cores() -> None:
    deal = deal_slots("cpu")
    assert all(slot.environment["JAX_PLATFORMS"] == "cpu" for slot in deal.slots)
    assert all(s.environment["CUDA_VISIBLE_DEVICES"] == "" for s in deal.slots)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("devices", "per_device", "cores"),
    [
        ("auto", 1, [(0,), (1,), (4,), (5,)]),
        (2, 1, [(0, 1), (4, 5)]),
        (1, 2, [(0, 1), (4, 5)]),
        (1, 1, [()]),
        (8, 1, [()] * 8),
    ],
)
def test_without_gpus_cores_are_dealt_out(
    devices: Any, per_device: int, cores: list[tuple[int, ...]]
) -> None:
    assert [s.cores for s in deal_slots(devices, per_device).slots] == cores


@pytest.mark.usefixtures("four_cores")
def test_it_says_how_cores_are_dealt() -> None:
    assert deal_slots().because == (
        "4 trials at a time on 4 cores without a GPU; each has its own"
    )
    assert deal_slots(8).because == (
        "8 trials at a time on 4 cores without a GPU; they share them"
    )
    assert [slot.device for slot in deal_slots(2).slots] == ["cores 0,1", "cores 4,5"]


def test_virtual_devices_are_dealt_by_their_number() -> None:
    deal = deal_slots(["CPU:5", "CPU:7"])  # of the eight that tests have
    assert [slot.device for slot in deal.slots] == ["CPU:5", "CPU:7"]
    assert all(s.environment["MESHWRIGHT_VIRTUAL"] == "CPU:1" for s in deal.slots)
    assert len(deal_slots("auto").slots) == 8
    assert len(deal_slots(3).slots) == 3


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("wish", "lines"),
    [
        (
            {"devices": 3},
            [
                "devices received 3; there are 2: GPU:0, GPU:1.",
                "A number takes the first so many devices.",
                "Write a number from 1 to 2.",
            ],
        ),
        (
            {"devices": ["GPU:2"]},
            [
                "devices names GPU:2, which is not here.",
                "Trials run on devices of this host.",
                "Name some of: /device:GPU:0, /device:GPU:1, /device:CPU:0.",
            ],
        ),
        (
            {"devices": "GPU:0,GPU:0"},
            [
                "devices received 'GPU:0,GPU:0', which names a device twice.",
                "Each device gets trials of its own.",
                "Write devices='auto', devices=2 or devices=['GPU:0', 'GPU:1']. "
                "per_device=2 puts two trials on each.",
            ],
        ),
        (
            {"devices": []},
            [
                "devices received [], which names no device.",
                "Each device gets trials of its own.",
                "Write devices='auto', devices=2 or devices=['GPU:0', 'GPU:1']. "
                "per_device=2 puts two trials on each.",
            ],
        ),
        (
            {"devices": ["GPU:0", "CPU:0"]},
            [
                "devices received ['GPU:0', 'CPU:0'], devices of several kinds.",
                "The trials of a study are compared, so all run on one kind of device.",
                "Write devices='auto', devices=2 or devices=['GPU:0', 'GPU:1'].",
            ],
        ),
        (
            {"per_device": 0},
            [
                "per_device received 0.",
                "It is how many trials share a device, one at least.",
                "Write per_device=1, or 4 for four trials on each device.",
            ],
        ),
        (
            {"per_device": 4, "memory": "30GiB"},
            [
                "4 trials with 30.0 GiB each on /device:GPU:0, whose memory is "
                "100.0 GiB.",
                "The trials that share a device share its memory.",
                "Give each less memory, or put fewer on a device with per_device.",
            ],
        ),
        (
            {"devices": "cpu", "memory": "1GiB"},
            [
                "memory received '1GiB' for trials on cores.",
                "A budget is kept by the allocator of a GPU; a CPU has none.",
                "Leave memory out, and choose how many trials run at a time with "
                "devices.",
            ],
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(wish: Any, lines: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refused:
        deal_slots(**wish)
    assert str(refused.value).splitlines() == lines


@pytest.mark.usefixtures("four_cores")
def test_no_core_is_no_number_of_parts() -> None:
    with pytest.raises(ConfigurationError) as refused:
        deal_slots(0)
    assert str(refused.value).splitlines() == [
        "devices received 0.",
        "A number says into how many parts the cores of this host are dealt.",
        "Write a number from 1 to 4, the cores that are here.",
    ]
