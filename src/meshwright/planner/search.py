"""Goes through the plans for a machine, and says of each what it takes or lacks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import gcd, prod
from typing import Protocol

from meshwright.devices.sizes import format_bytes
from meshwright.parallel.plan import Plan, Precision
from meshwright.parallel.schedules import DEFAULT_SCHEDULE, SCHEDULES
from meshwright.planner.candidates import Candidate, Reason
from meshwright.planner.machines import Machine
from meshwright.planner.memory import MemoryEstimate
from meshwright.planner.prediction import Prediction, schedule_of
from meshwright.planner.workload import Workload

MOST_BUBBLE = 0.4
"""Plans whose stages wait for longer than this share are not for anybody."""

LEAST_SPLIT = 0.5
"""An axis that splits less than this share of the weights does not do its work."""

_MICROBATCHES = (1, 2, 4, 8, 16, 32)
"""For each stage."""

_ACCUMULATE = tuple(2**i for i in range(10))


_Axes = tuple[int, int, int, int]
"""The degrees of a plan."""


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
        precision: What layers compute in; as the model has it if left out.
        smallest: Whether plans that need little are wanted, and not fast ones.
        enough: When so many ways to use the devices fit, slower ones are not looked at
            closely.
        whole_batches: Whether no batch may be computed in parts.
    """

    work: Workload
    machine: Machine
    batch_size: int
    times: Predicts
    memory: Estimates
    precision: Precision | None = None
    smallest: bool = False
    enough: int = 3
    whole_batches: bool = False

    def candidates(self, num_devices: int) -> list[Candidate]:
        """Plans that use so many of the devices, with the reasons of those that lose.

        Of plans that differ in nothing but levers the fastest that fits stays in, or
        the smallest.
        """
        return self.among(_factorisations(num_devices))

    def among(self, bases: Iterable[Plan]) -> list[Candidate]:
        """Likewise, among plans that have the axes of some others.

        Statistics and random numbers of parts of a batch are not those of the batch. If
        a model has such, a plan in parts is for when no other fits.
        """
        bases = list(bases)
        if not self.work.has_state:
            return self._judged(bases)
        straight = [base for base in bases if base.stages == 1]
        found = replace(self, whole_batches=True)._judged(straight)
        fitting = [each for each in found if each.fits]
        if not fitting:
            return self._judged(bases)
        first = min(fitting, key=_pace).plan.describe()
        because = f"not needed, as {first} fits, and not the same for this model"
        in_parts = [base for base in bases if base.stages > 1]
        in_parts += [replace(base, accumulate=2) for base in straight]
        return found + [self._out(each, "parts", because) for each in in_parts]

    def _judged(self, bases: Iterable[Plan]) -> list[Candidate]:
        found: list[Candidate] = []
        possible = []
        for base in bases:
            reason = self._why_not(base)
            if reason is None:
                possible.append(base)
            else:
                found.append(self._out(base, "division", reason))
        if self.smallest:
            plain = self._all_timed(possible, remat=False)
            again = self._all_timed(possible, remat=True)
            return found + self._smallest_first([*plain, *again])
        best: dict[_Axes, Candidate] = {}
        found += self._fastest_first(self._all_timed(possible, remat=False), best)
        promising = []
        for base in possible:
            needless = _why_no_remat(base, found, best)
            if needless is None:
                promising.append(base)
            else:
                changed = replace(base, remat=True, precision=self.precision)
                found.append(self._out(changed, "slower", needless))
        return found + self._fastest_first(self._all_timed(promising, remat=True), best)

    def _all_timed(self, bases: Iterable[Plan], *, remat: bool) -> Iterator[Candidate]:
        """All ways to let a batch flow, with the time that each takes."""
        for base in bases:
            levers = replace(base, precision=self.precision, remat=remat)
            for plan in self._flows(levers):
                bubble = schedule_of(plan).bubble if plan.stages > 1 else 0.0
                if bubble > MOST_BUBBLE:
                    out = self._out(plan, "bubble", f"bubble {bubble:.0%}")
                    yield replace(out, bubble=bubble)
                else:
                    yield self._timed(plan)

    def _flows(self, plan: Plan) -> Iterator[Plan]:
        """The ways to cut the batch of a plan into parts."""
        if plan.stages == 1:
            for number in _ACCUMULATE[: 1 if self.whole_batches else None]:
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

    def _fastest_first(
        self, timed: Iterable[Candidate], best: dict[_Axes, Candidate]
    ) -> list[Candidate]:
        """Plans with what they need; what comes after enough that fit is not sized.

        Arguments:
            timed: Plans with the time they take, or with the reason why they are out.
            best: By their axes: the fastest that fit; those that are found are added.
        """
        ranked = sorted(timed, key=_pace)
        leanest: dict[tuple[_Axes, bool], Candidate] = {}
        for candidate in sorted(filter(_is_open, ranked), key=_leanness):
            leanest.setdefault(_group_of(candidate.plan), candidate)
        found = []
        for candidate in ranked:
            axes = _axes_of(candidate.plan)
            ahead = best.get(axes) or self._last_of_enough(best)
            is_behind = ahead is not None and _is_behind(candidate, ahead)
            # Everybody compares with plain data parallelism.
            is_usual = max(axes[1:]) == 1 and axes not in best
            if candidate.fits and is_behind and not is_usual:
                first = best.get(axes) or min(best.values(), key=_pace)
                candidate = _slower(candidate, first)
            elif candidate.fits:
                group = _group_of(candidate.plan)
                leanest[group] = self._sized(leanest[group])
                candidate = self._unless_hopeless(candidate, leanest[group])
                if candidate.fits:
                    best[axes] = candidate
            found.append(candidate)
        return found

    def _unless_hopeless(self, candidate: Candidate, leanest: Candidate) -> Candidate:
        """What a plan needs, if at least the leanest of those like it fits."""
        if leanest.plan == candidate.plan:
            return leanest
        if leanest.fits:
            return self._sized(candidate)
        wanted = ", ".join(changes(candidate.plan, leanest.plan))
        because = f"{leanest.because} even with {wanted}"
        return replace(candidate, fits=False, because=because, reason="memory")

    def _last_of_enough(self, best: dict[_Axes, Candidate]) -> Candidate | None:
        """What a plan has to beat to be looked at closely, if enough others fit."""
        ranked = sorted(best.values(), key=_pace)
        return ranked[self.enough - 1] if len(ranked) >= self.enough else None

    def _smallest_first(self, timed: Iterable[Candidate]) -> list[Candidate]:
        sized = [self._sized(each) for each in sorted(timed, key=_pace)]
        best: dict[_Axes, Candidate] = {}
        found = []
        for candidate in sorted(sized, key=lambda each: each.memory_bytes or 0):
            if candidate.fits:
                ahead = best.setdefault(_axes_of(candidate.plan), candidate)
                if ahead is not candidate:
                    candidate = _larger(candidate, ahead)
            found.append(candidate)
        return found

    def judge(self, plan: Plan) -> Candidate:
        """What a plan takes, and whether it fits."""
        return self._sized(self._timed(plan))

    def _timed(self, plan: Plan) -> Candidate:
        prediction = self.times.predict(plan, self.batch_size)
        return Candidate(
            plan=plan,
            step_seconds=prediction.seconds,
            bubble=prediction.bubble,
            dollars_per_hour=self.machine.dollars_per_hour(plan.num_devices),
            parts=prediction.parts,
        )

    def _sized(self, candidate: Candidate) -> Candidate:
        if not candidate.fits or candidate.memory_bytes is not None:
            return candidate
        needed = self.memory.estimate(candidate.plan, self.batch_size)
        sized = replace(
            candidate, memory_bytes=needed.total, memory_by_kind=needed.by_kind()
        )
        room = self.machine.usable_memory
        if room is None or needed.total <= room:
            return sized
        because = f"{format_bytes(needed.total)} per device > {format_bytes(room)}"
        return replace(sized, fits=False, because=because, reason="memory")

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
        if not any(True for _ in self._flows(plan)):
            return (
                f"a batch of {batch} does not divide into equal microbatches for "
                f"{plan.stages} stages"
            )
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


def _why_no_remat(
    base: Plan, found: list[Candidate], best: dict[_Axes, Candidate]
) -> str | None:
    """Why not to compute activations again, which saves memory and takes time."""
    axes = _axes_of(base)
    if axes in best:
        needed = format_bytes(best[axes].memory_bytes or 0)
        return f"fits without, in {needed}, and takes longer"
    mine = [each for each in found if _axes_of(each.plan) == axes]
    if any(each.reason == "memory" for each in mine):
        return None
    behind = [each for each in mine if each.reason == "slower"]
    return f"{(behind or mine)[0].because}, even without"


def _pace(candidate: Candidate) -> tuple[float, ...]:
    """The fastest first; of plans that are as fast, the plainest."""
    plan = candidate.plan
    seconds = float(f"{candidate.step_seconds or 0.0:.3g}")
    is_usual = plan.schedule in (None, DEFAULT_SCHEDULE)
    return seconds, plan.remat, not is_usual, plan.microbatches or plan.accumulate


def _axes_of(plan: Plan) -> _Axes:
    return plan.data, plan.fsdp, plan.tensor, plan.stages


def _group_of(plan: Plan) -> tuple[_Axes, bool]:
    """Plans of which those with the most parts of a batch need the least memory.

    Sums of gradients, which parts have, take memory themselves.
    """
    return _axes_of(plan), (plan.microbatches or plan.accumulate) > 1


def _is_open(candidate: Candidate) -> bool:
    return candidate.fits


def _leanness(candidate: Candidate) -> tuple[bool, int]:
    """Of plans like each other, those that need the least memory first."""
    plan = candidate.plan
    return plan.schedule not in (None, DEFAULT_SCHEDULE), -(
        plan.microbatches or plan.accumulate
    )


def _is_behind(candidate: Candidate, ahead: Candidate) -> bool:
    return (candidate.step_seconds or 0.0) >= (ahead.step_seconds or 0.0)


def _slower(candidate: Candidate, ahead: Candidate) -> Candidate:
    assert candidate.step_seconds is not None
    assert ahead.step_seconds is not None
    share = candidate.step_seconds / ahead.step_seconds - 1
    how = f"{share:.1%} slower than" if share >= 0.0005 else "as slow as"
    because = f"{how} {ahead.plan.describe()}"
    return replace(candidate, fits=False, reason="slower", because=because)


def _larger(candidate: Candidate, ahead: Candidate) -> Candidate:
    more = (candidate.memory_bytes or 0) - (ahead.memory_bytes or 0)
    how = f"{format_bytes(more)} more per device than" if more else "as large as"
    because = f"{how} {ahead.plan.describe()}"
    return replace(candidate, fits=False, reason="larger", because=because)


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
    if plan.offload != other.offload:
        found.append("offload" if other.offload else "no offload")
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
