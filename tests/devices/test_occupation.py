"""What devices did, from profiles: made up ones, and one of a real training."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import meshwright as mw
from meshwright.devices import occupation
from meshwright.devices.occupation import Look, Occupation, Sample, sample_of

import jax
import keras
import numpy as np
import pytest

CPUS = ["/device:CPU:0", "/device:CPU:1"]


def event(name: str, start: float, end: float, **facts: Any) -> Any:
    return SimpleNamespace(
        name=name, start_ns=start, end_ns=end, stats=list(facts.items())
    )


def on_cpu(ordinal: int, operation: str, start: float, end: float) -> Any:
    facts = {"hlo_op": operation, "device_ordinal": ordinal}
    return event(operation, start, end, **facts)


def plane(name: str, **lines: list[Any]) -> Any:
    found = [SimpleNamespace(name=n, events=events) for n, events in lines.items()]
    return SimpleNamespace(name=name, lines=found)


def host(*events: Any) -> Any:
    return plane("/host:CPU", some_thread=list(events))


def test_time_counts_once_however_many_operations_run_at_a_time() -> None:
    found = sample_of(
        [
            host(on_cpu(0, "dot.1", 0, 60), on_cpu(0, "fusion.2", 40, 80)),
            host(on_cpu(1, "dot.1", 0, 100)),
        ],
        CPUS,
    )
    assert found == Sample(
        100 / 1e9, {CPUS[0]: Occupation(0.8, 0), CPUS[1]: Occupation(1, 0)}
    )


def test_an_exchange_that_hides_behind_computing_costs_nothing() -> None:
    found = sample_of(
        [host(on_cpu(0, "dot.1", 0, 50), on_cpu(0, "all-reduce.7", 25, 100))], CPUS[:1]
    )
    assert found is not None
    assert found.devices == {CPUS[0]: Occupation(0.5, 0.5)}


def test_loops_and_what_threads_do_for_themselves_are_no_work_of_devices() -> None:
    found = sample_of(
        [
            host(
                on_cpu(0, "while.3", 0, 100),
                on_cpu(0, "call", 0, 100),
                event("ThunkExecutor::Execute", 0, 100),
                on_cpu(0, "dot.1", 0, 10),
                on_cpu(0, "dot.2", 90, 100),
            )
        ],
        CPUS[:1],
    )
    assert found is not None
    assert found.devices[CPUS[0]].idle == pytest.approx(0.8)


def test_a_device_of_which_nothing_was_seen_stood_idle() -> None:
    found = sample_of([host(on_cpu(0, "dot.1", 0, 10))], CPUS)
    assert found is not None
    assert found.devices[CPUS[1]] == Occupation(0, 0)
    assert sample_of([host()], CPUS) is None
    assert sample_of([host(on_cpu(0, "dot.1", 5, 5))], CPUS) is None, "no time passed"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = {
        f"/device:GPU:{i}": SimpleNamespace(platform="gpu", local_hardware_id=i)
        for i in (0, 1)
    }
    monkeypatch.setattr(occupation, "jax_devices", lambda: names)
    by_device = {id(device): name for name, device in names.items()}
    monkeypatch.setattr(occupation, "name_of", lambda device: by_device[id(device)])
    return [*names]


def test_gpus_are_read_by_their_streams(gpus: list[str]) -> None:
    kernels = {
        "Stream #1(compute)": [
            event("gemm", 0, 40, hlo_op="dot.1"),
            event("loop_fusion", 40, 60, hlo_op="fusion.2"),
        ],
        "Stream #2(nccl)": [
            event("ncclDevKernel_AllReduce", 50, 90, hlo_op="wrapped_fusion")
        ],
        "Stream #3(copy)": [event("MemcpyP2P", 90, 100)],
        "XLA Ops": [event("all of it again", 0, 1000, hlo_op="dot.1")],
    }
    found = sample_of([plane("/device:GPU:1", **kernels), host()], gpus)
    assert found is not None
    assert found.devices == {gpus[0]: Occupation(0, 0), gpus[1]: Occupation(0.6, 0.4)}


@pytest.mark.parametrize("number", [1, 2])
def test_a_training_is_seen_to_compute_and_to_exchange(number: int) -> None:
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
    model.compile("sgd", "mse")
    mw.distribute(model, mw.Mirrored(CPUS[:number]))
    x, y = np.zeros((256, 64), "float32"), np.zeros((256, 512), "float32")
    model.fit(x, y, batch_size=64, verbose=0)
    look = Look()
    model.fit(x, y, batch_size=64, epochs=3, verbose=0)
    look.end()
    sample = look.sample(CPUS[:number])
    assert sample is not None
    assert list(sample.devices) == CPUS[:number]
    for each in sample.devices.values():
        assert each.computing > 0
        assert (each.communicating > 0) == (number > 1)
        assert each.computing + each.communicating + each.idle == pytest.approx(1)


def test_it_is_read_again_as_it_was_written() -> None:
    sample = Sample(0.25, {"/device:GPU:0": Occupation(0.5, 0.125)})
    assert Sample.from_json(sample.to_json()) == sample
    assert Sample.from_json({}) is None


def test_a_profile_of_the_user_s_own_is_left_alone(tmp_path: Path) -> None:
    jax.profiler.start_trace(str(tmp_path))
    try:
        with pytest.raises(RuntimeError, match=r"[Pp]rofile"):
            Look()
    finally:
        jax.profiler.stop_trace()
    assert [*tmp_path.rglob("*.xplane.pb")]


def test_parts_of_the_work_add_up_to_it() -> None:
    each = Sample(1.0, {"a": Occupation(0.6, 0.2), "b": Occupation(0.4, 0.0)})
    assert each.split(0.8) == pytest.approx(
        {"computing": 0.5, "communicating": 0.1, "pausing": 0.2}
    )
    # Half of the time went into compiling, and nothing into waiting.
    assert each.split(0.5, compiling=0.5) == pytest.approx(
        {"computing": 0.25, "communicating": 0.05, "pausing": 0.2}
    )
    # The devices had less to do than when they were looked at.
    assert each.split(0.3) == pytest.approx(
        {"computing": 0.25, "communicating": 0.05, "pausing": 0}
    )
