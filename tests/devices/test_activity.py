"""What devices do and hold at a moment."""

from pathlib import Path
from typing import Any

from meshwright.devices import activity
from meshwright.devices.activity import Activity, ActivityMeter

import jax
import pytest


def test_cpus_of_a_process_count_together() -> None:
    meter = ActivityMeter()
    sum(range(3_000_000))
    (found,) = meter.look()
    assert found.name.endswith("cores")
    assert found.busy is not None
    assert 0 < found.busy <= 1
    assert found.memory is not None
    assert found.memory > 2**24
    assert found.limit is None


def test_no_file_of_the_system_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_STATM", Path("/nowhere"))
    (found,) = ActivityMeter().look()
    assert found.memory is None


class Gpu:
    platform = "gpu"

    def __init__(self, number: int, stats: Any) -> None:
        self.id = self.local_hardware_id = number
        self.memory_stats = lambda: stats


def test_gpus_count_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(0, {"bytes_in_use": 5, "bytes_limit": 9}), Gpu(1, None)]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    monkeypatch.setattr(activity, "name_of", lambda gpu: f"/device:GPU:{gpu.id}")
    monkeypatch.setattr(activity, "read_utilisation", lambda: (0.75,))
    assert ActivityMeter().look() == [
        Activity(name="GPU:0", memory=5, limit=9, busy=0.75),
        Activity(name="GPU:1"),
    ]
