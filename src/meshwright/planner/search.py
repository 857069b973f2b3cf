"""Goes through the plans for a machine, and says of each what it takes or lacks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from typing import Protocol

from meshwright.devices.sizes import format_bytes
from meshwright.parallel.plan import Plan, Precision
from meshwright.parallel.schedules import SCHEDULES
from meshwright.planner.candidates import Candidate, Reason
from meshwright.planner.machines import Machine
from meshwright.planner.memory import MemoryEstimate
from meshwright.planner.prediction import Prediction, schedule_of
from meshwright.planner.workload import Workload

MOST_BUBBLE = 0.4
"""Plans whose stages wait for longer than this share are not for anybody."""

LEAST_SPLIT = 0.5
"""An axis that splits less than this share of the weights does not do its work."""

_MICROBATCHES = (1, 2, 4, 8)
"""For each stage."""

_ACCUMULATE = (1, 2, 4, 8, 16)


class Predicts(Protocol):
    """Says how long a step takes."""

    def predict(self, plan: Plan, batch_size: int) -> Prediction:
        """The seconds of a step."""


class Estimates(Protocol):
    """Says what a step needs."""

    def estimate(self, plan: Plan, batch_size: int) -> MemoryEstimate:
        """The bytes of a device."""


@dataclass(frozen=True)
class Search:
    """What the plans for a model, a batch and a machine take.

    Arguments:
        work: The training step.
        machine: The devices.
        batch_size: Samples of the global batch.
        times: Says how long steps take.
        memory: Says what they need.
        precisions: What layers may compute in; None is as the model has it.
    """

    work: Workload
    machine: Machine
    batch_size: int
    times: Predicts
    memory: Estimates
    precisions: Sequence[Precision | None] = (None,)

    def candidates(self, num_devices: int) -> list[Candidate]:
        """Plans that use so many of the devices, with the reasons of those that lose.

        Of plans that differ in nothing but levers the fastest that fits stays in.
        """
        found = []
        for plan in _factorisations(num_devices):
            found += self.variants(plan)
        return found

    def variants(self, base: Plan) -> list[Candidate]:
        """Plans of the same degrees: the fastest that fits, and why not the others."""
        reason = self._why_not(base)
        if reason is not None:
            return [self._out(base, "division", reason)]
        plans = [
            plan
            for precision in self.precisions
            for remat in (False, True)
            for plan in self._flows(replace(base, precision=precision, remat=remat))
        ]
        return _only_the_best([self.judge(plan) for plan in plans])

    def _flows(self, plan: Plan) -> Iterator[Plan]:
        """The ways to cut the batch of a plan into parts."""
        if plan.stages == 1:
            for number in _ACCUMULATE:
                if self._divides(plan, number):
                    yield replace(plan, accumulate=number)
            return
        for schedule in SCHEDULES:
            for each in _MICROBATCHES:
                number = each * plan.stages
                if self._divides(plan, number):
                    yield replace(
                        plan, schedule=schedule, microbatches=number, chunks=None
                    )

    def _divides(self, plan: Plan, number: int) -> bool:
        return self.batch_size % (number * plan.num_replicas) == 0 or number == 1

    def judge(self, plan: Plan) -> Candidate:
        """What a plan takes, and whether it fits."""
        if plan.stages > 1:
            bubble = schedule_of(plan).bubble
            if bubble > MOST_BUBBLE:
                because = f"bubble {bubble:.0%}"
                return replace(self._out(plan, "bubble", because), bubble=bubble)
        estimate = self.memory.estimate(plan, self.batch_size)
        prediction = self.times.predict(plan, self.batch_size)
        room = self.machine.usable_memory
        fits = room is None or estimate.total <= room
        because = ""
        if not fits and room is not None:
            because = (
                f"{format_bytes(estimate.total)} per device > {format_bytes(room)}"
            )
        return Candidate(
            plan=plan,
            step_seconds=prediction.seconds,
            memory_bytes=estimate.total,
            memory_by_kind=estimate.by_kind(),
            bubble=prediction.bubble,
            dollars_per_hour=self.machine.dollars_per_hour(plan.num_devices),
            fits=fits,
            because=because,
            parts=prediction.parts,
            reason="" if fits else "memory",
        )

    def _out(self, plan: Plan, reason: Reason, because: str) -> Candidate:
        return Candidate(
            plan=plan,
            dollars_per_hour=self.machine.dollars_per_hour(plan.num_devices),
            fits=False,
            because=because,
            reason=reason,
        )

    def _why_not(self, plan: Plan) -> str | None:
        """What does not divide."""
        replicas, batch = plan.num_replicas, self.batch_size
        if gcd(batch, replicas) < replicas:
            return f"a batch of {batch} does not divide into {replicas} equal parts"
        if plan.stages > 1 and batch < replicas * plan.stages:
            return (
                f"a batch of {batch} has fewer samples than {replicas * plan.stages}, "
                "one for each stage of each replica"
            )
        if plan.tensor > self.machine.devices_per_host > 1:
            return (
                f"a host has {self.machine.devices_per_host} devices, and tensor "
                "devices talk in every layer"
            )
        for axis in (Plan(tensor=plan.tensor), Plan(fsdp=plan.fsdp)):
            if axis.num_devices > 1 and (reason := _unsplit(self.work, axis)):
                return reason
        most = len(self.work.layers(None, False).names)
        if plan.num_pieces > most:
            return f"{plan.num_pieces} pieces of a model of {most} layers"
        return None


@cache
def _unsplit(work: Workload, plan: Plan) -> str | None:
    """Why the one axis of a plan leaves most weights whole, if it does."""
    axis = "tensor" if plan.tensor > 1 else "fsdp"
    layouts = work.layouts_for(plan)
    sizes = work.weight_sizes
    whole: dict[str, int] = {}
    for path, size in sizes.items():
        if path in layouts and axis not in layouts[path].spec:
            because = layouts[path].because
            whole[because] = whole.get(because, 0) + size
    share = 1 - sum(whole.values()) / max(sum(sizes.values()), 1)
    stuck = [because for because in whole if "heads do not divide" in because]
    if stuck:
        return stuck[0].removeprefix("whole over tensor: ")
    if share < LEAST_SPLIT:
        most = max(whole, key=lambda because: whole[because])
        return f"it splits {share:.0%} of the weights ({most})"
    return None


def _only_the_best(found: list[Candidate]) -> list[Candidate]:
    """Plans with the same degrees: the fastest that fits, and why not the others."""
    fitting = [each for each in found if each.fits]
    if not fitting:
        return found
    best = min(fitting, key=lambda each: each.step_seconds or 0.0)
    kept = []
    for each in found:
        if each.fits and each is not best:
            assert each.step_seconds is not None
            assert best.step_seconds is not None
            slower = each.step_seconds / best.step_seconds - 1
            kept.append(
                replace(
                    each,
                    fits=False,
                    reason="slower",
                    because=f"{slower:.1%} slower than {best.plan.describe()}",
                )
            )
        else:
            kept.append(each)
    return kept


def with_ways_out(found: Iterable[Candidate]) -> list[Candidate]:
    """The same candidates; those that need too much say what would fit."""
    found = list(found)
    fitting = [each for each in found if each.fits]
    return [
        replace(each, because=f"{each.because}{_way_out(each.plan, fitting)}")
        if each.reason == "memory"
        else each
        for each in found
    ]


def _way_out(plan: Plan, fitting: list[Candidate]) -> str:
    near = [each.plan for each in fitting if each.num_devices == plan.num_devices]
    if not near:
        return ""
    closest = min(near, key=lambda other: _effort(plan, other))
    return f"; fits with {', '.join(changes(plan, closest))}"


def _effort(plan: Plan, other: Plan) -> tuple[int, int, int]:
    """How much has to change: how many things, how deeply, and how far."""
    depths = {"accumulate": 1, "remat": 2, "fsdp": 3, "tensor": 4, "stages": 5}
    named = [each.partition("=")[0] for each in changes(plan, other)]
    depth = max(depths.get(name, 0) for name in named)
    degrees = (other.accumulate, other.fsdp, other.tensor, other.stages)
    return len(named), depth, prod(degrees)


def changes(plan: Plan, other: Plan) -> list[str]:
    """What has to be changed of a plan to get another one.

    >>> changes(Plan(data=8), Plan(data=4, fsdp=2))
    ['fsdp=2']
    """
    found = []
    for axis in ("fsdp", "tensor", "stages", "accumulate"):
        if getattr(plan, axis) != getattr(other, axis):
            found.append(f"{axis}={getattr(other, axis)}")
    if other.stages > 1 and plan.stages > 1:
        if plan.microbatches != other.microbatches:
            found.append(f"microbatches={other.microbatches}")
        if plan.schedule != other.schedule:
            found.append(f"schedule={other.schedule}")
    if plan.remat != other.remat:
        found.append("remat" if other.remat else "no remat")
    if plan.precision != other.precision:
        found.append(str(other.precision))
    return found or [other.describe()]


def _factorisations(number: int) -> Iterator[Plan]:
    """The ways to use so many devices."""
    for tensor in _divisors(number):
        for fsdp in _divisors(number // tensor):
            for stages in _divisors(number // tensor // fsdp):
                data = number // tensor // fsdp // stages
                yield Plan(data=data, fsdp=fsdp, tensor=tensor, stages=stages)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
