"""The search goes through all plans, and has a reason for every one it rejects."""

from dataclasses import replace
from math import prod

from meshwright.models.profile import build_abstractly
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.machines import parse_machine
from meshwright.planner.memory import MemoryEstimate
from meshwright.planner.prediction import Prediction
from meshwright.planner.search import Search, changes, with_ways_out
from meshwright.planner.workload import Workload

import keras
import pytest

L = keras.layers


def attentive() -> keras.Model:
    inputs = keras.Input((16, 48))
    x = L.MultiHeadAttention(6, 8)(inputs, inputs)
    for _ in range(3):
        x = L.Dense(48)(L.Dense(192, activation="relu")(x))
    model = keras.Model(inputs, x, name="attentive")
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload.of(build_abstractly(attentive), "GPU")


class Times:
    """A step takes as long as its samples on a device, and remat a third more."""

    def predict(self, plan: Plan, batch_size: int) -> Prediction:
        seconds = batch_size / plan.num_devices * (4 / 3 if plan.remat else 1)
        return Prediction(parts={"compute": seconds}, bubble=None)


class Memory:
    """1024 bytes, divided by whatever divides state, halved by remat."""

    def estimate(self, plan: Plan, batch_size: int) -> MemoryEstimate:
        state = 1024 // (plan.fsdp * plan.tensor * plan.stages * (1 + plan.remat))
        nothing = dict.fromkeys(
            ("optimizer", "gradients", "activations", "temporaries", "batch", "other"),
            0,
        )
        return MemoryEstimate(parameters=state, **nothing)


def search(work: Workload, memory: int | None = None, batch: int = 64) -> Search:
    machine = parse_machine("8xH200", memory=memory)
    return Search(work, machine, batch, Times(), Memory())


def by_degrees(found: list[Candidate], **degrees: int) -> list[Candidate]:
    wanted = {"data": 1, "fsdp": 1, "tensor": 1, "stages": 1} | degrees
    return [
        each
        for each in found
        if all(getattr(each.plan, axis) == n for axis, n in wanted.items())
    ]


def test_all_ways_to_use_eight_devices_are_looked_at(work: Workload) -> None:
    found = search(work).candidates(8)
    degrees = {(c.plan.data, c.plan.fsdp, c.plan.tensor, c.plan.stages) for c in found}
    assert all(prod(each) == 8 for each in degrees)
    assert len(degrees) == 20


def test_every_rejection_has_a_reason(work: Workload) -> None:
    for candidate in search(work).candidates(8):
        assert candidate.fits != bool(candidate.because)
        assert candidate.fits != bool(candidate.reason)


def test_heads_that_do_not_divide_are_named(work: Workload) -> None:
    (rejected,) = by_degrees(search(work).candidates(8), tensor=8)
    assert rejected.because == "6 heads do not divide by 8"
    assert rejected.reason == "division"


def test_a_batch_that_does_not_divide_is_named(work: Workload) -> None:
    (rejected,) = by_degrees(search(work, batch=12).candidates(8), data=8)
    assert rejected.because == "a batch of 12 does not divide into 8 equal parts"


def test_a_pipeline_with_too_large_a_bubble_says_how_large(work: Workload) -> None:
    found = by_degrees(search(work).candidates(8), data=2, stages=4)
    bubbles = [c.because for c in found if c.reason == "bubble"]
    assert "bubble 43%" in bubbles


def test_memory_is_named_with_what_would_fit(work: Workload) -> None:
    found = with_ways_out(search(work, memory=300).candidates(8))
    rejected = [c for c in by_degrees(found, data=8) if not c.plan.remat]
    assert rejected[0].because == "1.0 KiB per device > 300 B; fits with fsdp=4"
    parts = {c.plan.accumulate: c.because for c in rejected}
    assert parts[8] == "1.0 KiB per device > 300 B; fits with fsdp=4, accumulate=1"
    even = "1.0 KiB per device > 300 B even with accumulate=8"
    assert parts[4] == f"{even}; fits with fsdp=4, accumulate=1"
    assert rejected[0].reason == "memory"


def test_of_plans_that_differ_in_levers_the_fastest_that_fits_stays(
    work: Workload,
) -> None:
    found = by_degrees(search(work).candidates(8), data=8)
    (kept,) = [c for c in found if c.fits]
    assert not kept.plan.remat
    (needless,) = [c.because for c in found if c.plan.remat]
    assert needless == "fits without, in 1.0 KiB, and takes longer"
    tight = search(work, memory=600).among([Plan(data=8)])
    assert [c.plan.remat for c in tight if c.fits] == [True]


def test_what_is_slower_than_enough_others_is_not_sized(work: Workload) -> None:
    found = search(work).candidates(8)
    assert sum(c.fits for c in found) == 3
    assert all((c.memory_bytes is not None) == c.fits for c in found)
    assert {c.reason for c in found if not c.fits} >= {"slower", "bubble"}


def test_of_small_plans_the_smallest_of_each_degrees_stays(work: Workload) -> None:
    wanted = replace(search(work), smallest=True)
    (kept,) = [c for c in wanted.among([Plan(data=8)]) if c.fits]
    assert (kept.plan.remat, kept.memory_bytes) == (True, 512)
    reasons = {c.because for c in wanted.among([Plan(data=8)]) if not c.fits}
    assert reasons == {
        "as large as data=8, remat",
        "512 B more per device than data=8, remat",
    }


def normed() -> keras.Model:
    inputs = keras.Input((32,))
    x = inputs
    for _ in range(4):
        x = L.BatchNormalization()(L.Dense(32, activation="relu")(x))
    model = keras.Model(inputs, x, name="normed")
    model.compile("adam", "mse")
    return model


def test_a_batch_with_statistics_is_cut_only_if_nothing_else_fits() -> None:
    work = Workload.of(build_abstractly(normed), "GPU")

    class InParts(Memory):
        """Parts of a batch need half."""

        def estimate(self, plan: Plan, batch_size: int) -> MemoryEstimate:
            found = super().estimate(plan, batch_size)
            half = 2 if plan.accumulate > 1 or plan.stages > 1 else 1
            return replace(found, parameters=found.parameters // half)

    def found(memory: int) -> list[Candidate]:
        made = replace(search(work, memory=memory), memory=InParts())
        return made.among([Plan(data=2), Plan(stages=2)])

    def fitting(candidates: list[Candidate]) -> list[Plan]:
        return [each.plan for each in candidates if each.fits]

    assert fitting(found(1024)) == [Plan(data=2)]
    out = {c.because for c in found(1024) if c.reason == "parts"}
    assert out == {"not needed, as data=2 fits, and not the same for this model"}
    assert fitting(found(512)) == [Plan(data=2, remat=True)]
    tight = fitting(found(256))
    assert tight
    assert all(plan.accumulate > 1 or plan.stages > 1 for plan in tight)


def test_changes_are_named_by_the_arguments_that_make_them() -> None:
    plan = Plan(stages=2, microbatches=4)
    assert changes(plan, Plan(stages=2, microbatches=8)) == ["microbatches=8"]
    other = Plan(stages=2, microbatches=4, schedule="gpipe", remat=True)
    assert changes(plan, other) == ["schedule=gpipe", "remat"]
    assert changes(Plan(remat=True), Plan(precision="bfloat16")) == [
        "no remat",
        "bfloat16",
    ]
    assert changes(Plan(data=8), Plan(data=4)) == ["data=4"]
