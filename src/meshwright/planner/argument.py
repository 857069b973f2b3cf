"""The decision tree that people draw by hand, walked with the planner's numbers."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from meshwright.devices.sizes import format_bytes
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.figures import format_seconds
from meshwright.planner.machines import Machine
from meshwright.planner.money import why_behind


class Considered(NamedTuple):
    """All plans that were looked at."""

    machine: Machine
    objective: str
    fitting: tuple[Candidate, ...]
    """The best one first."""
    rejected: tuple[Candidate, ...]

    def first(self, holds: Callable[[Plan], bool]) -> Candidate | None:
        """The best plan of a kind; if none fits, the one that needs least."""
        fitting = [each for each in self.fitting if holds(each.plan)]
        if fitting:
            return fitting[0]
        return least_bad(each for each in self.rejected if holds(each.plan))


def least_bad(rejected: Iterable[Candidate]) -> Candidate | None:
    """Of plans that do not fit, the one that is closest to it.

    A plan that only takes or costs too much can run; then comes what lacks memory.
    """
    found = list(rejected)
    late = [each for each in found if each.reason == "deadline"]
    dear = [each for each in found if each.reason == "budget"]
    large = [each for each in found if each.memory_bytes is not None]
    if late:
        return min(late, key=lambda each: each.seconds or 0.0)
    if dear:
        return min(dear, key=lambda each: each.device_seconds or 0.0)
    if large:
        return min(large, key=lambda each: each.memory_bytes or 0)
    return found[0] if found else None


def walk(considered: Considered) -> list[str]:
    """The questions in their order, each with its answer and the numbers for it."""
    best = considered.fitting[0] if considered.fitting else None
    lines = [*_one_device(considered), *_several(considered, best)]
    for question, has in _LEVERS:
        line = _lever(considered, best, question, has)
        lines += [line] if line else []
    if best is None:
        closest = least_bad(considered.rejected)
        shown = f" The least bad: {_named(closest)}." if closest else ""
        return [*lines, f"So: nothing fits.{shown}"]
    return [*lines, f"So: {best.plan.describe()}, {figures_of(best)}."]


_LEVERS: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("Split parameters and optimizer state (fsdp)?", lambda plan: plan.fsdp > 1),
    ("Split weights inside of layers (tensor)?", lambda plan: plan.tensor > 1),
    ("Cut the model into stages (pipeline)?", lambda plan: plan.stages > 1),
    ("Compute a batch in parts (accumulate)?", lambda plan: plan.accumulate > 1),
    ("Compute activations again (remat)?", lambda plan: plan.remat),
)


def _one_device(considered: Considered) -> Iterator[str]:
    question = "Does the model fit on one device?"
    plain = considered.first(lambda p: p.num_devices == 1 and _is_plain(p))
    some = considered.first(lambda p: p.num_devices == 1)
    if plain and some and _has_room(plain) and plain.memory_bytes is None:
        # It lost by its time, before anybody asked for its memory.
        levers = _levers(some.plan)
        yield f"{question} With {levers}: {_memory(some, considered.machine)}."
    elif plain and _has_room(plain):
        yield f"{question} Yes: {_memory(plain, considered.machine)}."
    elif plain and some and _has_room(some):
        yield (
            f"{question} Not as it is: {_memory(plain, considered.machine)}. With "
            f"{_levers(some.plan)} it does: {_memory(some, considered.machine)}."
        )
    elif found := plain or some:
        yield f"{question} No: {_memory(found, considered.machine)}."


def _several(considered: Considered, best: Candidate | None) -> Iterator[str]:
    if considered.machine.num_devices == 1:
        return
    one = considered.first(lambda p: p.num_devices == 1)
    many = considered.first(lambda p: p.num_devices > 1)
    question = "Is one device enough?"
    if best is not None and best.num_devices == 1:
        text = f"{question} Yes: {figures_of(best)}."
        if many is not None and many.fits:
            text += f" The best on several: {_behind(many, best, considered)}"
        yield text
    elif best is not None and one is not None and one.fits:
        yield f"{question} No: {_behind(one, best, considered)}"
    elif one is not None:
        yield f"{question} No: {one.because or 'nothing fits there'}."
    question = "Is it enough to split the batch (data)?"
    split = considered.first(_only_data)
    if split is None or (best is not None and best.num_devices == 1):
        return
    if split is best:
        yield f"{question} Yes: {_named(split)}."
    elif split.fits and best is not None:
        yield f"{question} No: {_behind(split, best, considered)}"
    else:
        yield f"{question} No: {_named(split)}."


def _lever(
    considered: Considered,
    best: Candidate | None,
    question: str,
    has: Callable[[Plan], bool],
) -> str | None:
    """Whether the best plan uses something, and what the best does that differs."""
    used = considered.first(has)
    if used is None:
        return None
    if best is None:
        return f"{question} It does not help: {_named(used)}."
    if not has(best.plan):
        word = _behind(used, best, considered) if used.fits else f"{_named(used)}."
        return f"{question} No: {word}"
    unused = considered.first(lambda plan: not has(plan))
    if unused is None:
        return f"{question} Yes: {_named(best)}."
    word = (
        f"without it, {_behind(unused, best, considered)}"
        if unused.fits
        else f"without it nothing fits; {_named(unused)}."
    )
    return f"{question} Yes: {word}"


def _behind(candidate: Candidate, best: Candidate, considered: Considered) -> str:
    why = why_behind(candidate, best, considered.objective)
    return f"{candidate.plan.describe()} has {figures_of(candidate)}, {why}."


def _named(candidate: Candidate) -> str:
    if candidate.fits:
        return f"{candidate.plan.describe()}, {figures_of(candidate)}"
    return f"{candidate.plan.describe()}: {candidate.because}"


def figures_of(candidate: Candidate) -> str:
    """Time and memory of a plan in words.

    >>> figures_of(Candidate(plan=Plan(), step_seconds=0.5, memory_bytes=2**30))
    'predicted 500 ms a step and 1.0 GiB per device'
    """
    known = []
    is_measured = candidate.measured_seconds is not None
    if candidate.seconds is not None:
        how = "measured" if is_measured else "predicted"
        known.append(f"{how} {format_seconds(candidate.seconds)} a step")
    if candidate.memory_bytes is not None:
        how = "predicted " if is_measured or not known else ""
        known.append(f"{how}{format_bytes(candidate.memory_bytes)} per device")
    return " and ".join(known) or "nothing known of it"


def _memory(candidate: Candidate, machine: Machine) -> str:
    if candidate.memory_bytes is None:
        return candidate.because or "its memory is not known"
    needed = f"predicted {format_bytes(candidate.memory_bytes)}"
    if machine.usable_memory is None:
        return f"{needed}, and how much a device has is not known"
    sign = "<=" if candidate.memory_bytes <= machine.usable_memory else ">"
    return f"{needed} {sign} {format_bytes(machine.usable_memory)} usable"


def _has_room(candidate: Candidate) -> bool:
    """Whether it can run, though perhaps not as fast or cheap as was wished."""
    outdone = ("deadline", "budget", "slower", "larger")
    return candidate.fits or candidate.reason in outdone


def _is_plain(plan: Plan) -> bool:
    return plan.accumulate == 1 and not plan.remat


def _only_data(plan: Plan) -> bool:
    return plan.data > 1 and plan.data == plan.num_devices and _is_plain(plan)


def _levers(plan: Plan) -> str:
    return plan.describe().removeprefix("one device, ")
