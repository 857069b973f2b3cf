"""What steps of plans take, checked against closed forms and common sense."""

from meshwright.models.profile import build_abstractly
from meshwright.parallel.plan import Plan
from meshwright.parallel.schedules import make_schedule
from meshwright.planner.machines import parse_machine
from meshwright.planner.prediction import HOST_LINK, Predictor, _length
from meshwright.planner.speeds import known_speed
from meshwright.planner.workload import Workload

import keras
import numpy as np
import pytest

L = keras.layers


def deep() -> keras.Model:
    layers = [L.Dense(4096, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((4096,)), *layers], name="deep")
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    machine = parse_machine("8xH200")
    work = Workload.of(build_abstractly(deep), "GPU")
    return Predictor(work, machine, known_speed(machine).speed)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_a_flushed_pipeline_takes_m_plus_p_minus_1_turns(
    schedule: str, stages: int, microbatches: int
) -> None:
    made = make_schedule(schedule, stages, microbatches)
    pieces = np.full(stages, 3.0)
    length = _length(made, pieces, share=1 / 3, send=0.0)
    assert length == pytest.approx(3.0 * (microbatches + stages - 1))


def test_chunks_shrink_the_bubble_by_their_number() -> None:
    stages, microbatches, chunks = 4, 8, 2
    made = make_schedule("interleaved", stages, microbatches, chunks)
    pieces = np.full(stages * chunks, 3.0 / chunks)
    length = _length(made, pieces, share=1 / 3, send=0.0)
    assert length == pytest.approx(3.0 * (microbatches + (stages - 1) / chunks))


def test_the_slowest_stage_sets_the_pace() -> None:
    made = make_schedule("1f1b", 2, 64)
    even = _length(made, np.array([2.0, 2.0]), 0.5, 0.0)
    uneven = _length(made, np.array([1.0, 3.0]), 0.5, 0.0)
    assert uneven / even == pytest.approx(1.5, rel=0.03)


def test_sending_takes_time_at_every_boundary() -> None:
    made = make_schedule("gpipe", 2, 1)
    pieces = np.array([2.0, 2.0])
    assert _length(made, pieces, 0.5, 0.25) == pytest.approx(4.0 + 2 * 0.25)


def test_more_devices_take_less_time_and_more_communication(
    predictor: Predictor,
) -> None:
    one = predictor.predict(Plan(), 65536)
    eight = predictor.predict(Plan(data=8), 65536)
    assert one.parts["communication"] == 0
    assert eight.parts["communication"] > 0
    assert 3 < one.seconds / eight.seconds < 8
    assert eight.parts["update"] == pytest.approx(one.parts["update"])


def test_sharded_state_is_updated_in_parts(predictor: Predictor) -> None:
    whole = predictor.predict(Plan(data=8), 8192).parts
    split = predictor.predict(Plan(fsdp=8), 8192).parts
    assert split["update"] == pytest.approx(whole["update"] / 8)
    assert split["communication"] == pytest.approx(whole["communication"], rel=0.05)


def test_state_in_the_memory_of_the_host_travels_both_ways(
    predictor: Predictor,
) -> None:
    here, away = (
        predictor.predict(Plan(data=8, offload=offload), 8192).parts
        for offload in (False, True)
    )
    two_slots = 2 * 4 * 8 * 4096 * 4097
    extra = away["update"] - here["update"]
    assert extra == pytest.approx(2 * two_slots / HOST_LINK, rel=0.01)


def test_a_pipeline_says_how_long_its_stages_wait(predictor: Predictor) -> None:
    found = predictor.predict(Plan(stages=4, microbatches=4), 8192)
    assert found.bubble == pytest.approx(3 / 7)
    assert found.parts["bubble"] > 0


@pytest.fixture(scope="module")
def on_cpu() -> Predictor:
    machine = parse_machine(["CPU:0", "CPU:1"])
    work = Workload.of(build_abstractly(deep), "CPU")
    return Predictor(work, machine, known_speed(machine).speed)


def test_cpus_compute_blocks_again(on_cpu: Predictor) -> None:
    plain, again = (on_cpu.predict(Plan(remat=r), 256) for r in (False, True))
    assert 1.1 < again.parts["compute"] / plain.parts["compute"] < 1.5


def test_gradients_of_parts_of_a_batch_are_added_up(predictor: Predictor) -> None:
    assert predictor._adding(Plan(), 1) == 0.0
    moved = 3 * 4 * 8 * 4096 * 4097
    taken = predictor._adding(Plan(accumulate=3), 3)
    assert 2 * moved / 4.8e12 < taken < 3 * moved / 4.8e12


def test_programs_of_stages_use_memory_for_the_first_time(on_cpu: Predictor) -> None:
    few, many = (
        on_cpu.predict(Plan(stages=2, microbatches=m), 256).parts["overhead"]
        for m in (2, 8)
    )
    gradients = 4 * 8 * 4096 * 4097
    assert many - few > 0.9 * 6 * gradients * on_cpu.speed.fresh
