"""All strategies for one model and the devices that are here, side by side."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshwright.bench.fleet import Fleet
from meshwright.bench.table import Column, Table
from meshwright.devices.sizes import format_bytes
from meshwright.errors import MachineError, MeshwrightError
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.figures import format_seconds
from meshwright.planner.machines import Machine
from meshwright.planner.speeds import known_speed
from meshwright.planner.workload import Workload
from meshwright.strategies.planning import check_question, search, strategy_of
from meshwright.strategies.preflighting import preflight
from meshwright.strategies.timing import time_steps

MICROBATCHES = 4
"""For each stage, as `mw.Pipeline` has them."""


def plans_to_compare(number: int) -> Iterator[tuple[str, Plan]]:
    """The strategies that people name, each with its plan for so many devices.

    >>> [name for name, _ in plans_to_compare(1)]
    ['Single']
    """
    yield "Single", Plan()
    if number == 1:
        return
    yield "Mirrored", Plan(data=number)
    yield "FSDP", Plan(fsdp=number)
    yield "TensorParallel", Plan(tensor=number)
    yield "Layerwise", Plan(stages=number, microbatches=1, schedule="gpipe")
    yield "Pipeline", Plan(stages=number, microbatches=MICROBATCHES * number)
    if number % 2 or number < 4:
        return
    half = number // 2
    yield "Hybrid", Plan(data=half, fsdp=2)
    yield "Hybrid", Plan(data=half, tensor=2)
    yield "Hybrid", Plan(data=half, stages=2, microbatches=2 * MICROBATCHES)


NAMED = ("Mirrored", "FSDP", "TensorParallel", "Layerwise", "Pipeline")
"""Strategies whose names and numbers of devices say the whole plan."""


def plan_of(name: str, number: int) -> Plan:
    """The plan of one of the `NAMED` strategies for so many devices.

    >>> plan_of("FSDP", 4).describe()
    'fsdp=4'
    """
    return Plan() if number == 1 else dict(plans_to_compare(number))[name]


Tell = Callable[[str], None]
"""Called with what is about to be timed."""


def tell_nobody(text: str) -> None:
    """Where nobody waits."""


def compare_strategies(
    model: Any,
    batch_size: int,
    fleet: Fleet,
    data: Any = None,
    tell: Tell = tell_nobody,
) -> Table:
    """Times a step of every strategy here, beside what was predicted.

    Arguments:
        model: A built and compiled model with values; it is not changed.
        batch_size: Samples of the global batch.
        fleet: The devices; the greatest of its numbers is used.
        data: A batch as `(x, y)`, or its shapes, for models that do not say what they
            take.
        tell: Called with what is about to be timed.

    Returns:
        A table of time and memory of a device, the fastest first; what cannot be
        trained stands at the end with the reason.
    """
    check_question("bench", model, batch_size)
    number = fleet.counts[-1]
    if not fleet.is_here(number):
        raise MachineError(
            f"Strategies were to be compared on {fleet.all}.",
            "They are timed, so the devices have to be here.",
            "Leave the machine out; meshwright plan compares predictions.",
        )
    machine = fleet.part(number)
    work = Workload.of(model, machine.kind, data)
    rows = [
        _row(
            name,
            judged(work, machine, plan, batch_size),
            model,
            batch_size,
            fleet,
            data,
            tell,
        )
        for name, plan in plans_to_compare(number)
    ]
    rows.sort(key=lambda row: row["measured_seconds"] or float("inf"))
    source = f"Predictions: {known_speed(machine).source}."
    return Table(
        f"{model.name}, strategies on {machine}, a global batch of {batch_size:,}",
        _COLUMNS,
        tuple(rows),
        (*fleet.notes, *(() if fleet.is_of_stand_ins else (source,))),
        wide="plan",
    )


def judged(work: Workload, machine: Machine, plan: Plan, batch_size: int) -> Candidate:
    """What is predicted of a plan."""
    part = machine.part(plan.num_devices)
    return search(work, part, known_speed(part), batch_size).judge(plan)


def _row(
    name: str,
    candidate: Candidate,
    model: Any,
    batch_size: int,
    fleet: Fleet,
    data: Any,
    tell: Tell,
) -> dict[str, Any]:
    because = None if candidate.fits else candidate.because
    seconds = needed = None
    if candidate.fits:
        tell(f"timing {name}: {candidate.plan.describe()}")
        part = fleet.part(candidate.num_devices)
        try:
            strategy = strategy_of(candidate.plan, part)
            needed = preflight(model, batch_size, strategy, data=data).bytes_per_device
            seconds = time_steps(model, strategy, batch_size, data)
        except MeshwrightError as error:
            because = error.received
    if fleet.is_of_stand_ins:
        candidate = replace(candidate, step_seconds=None)
    return {
        "strategy": name,
        "plan": candidate.plan.describe(),
        "measured_seconds": seconds,
        "predicted_seconds": candidate.step_seconds,
        "compiled_bytes": needed,
        "predicted_bytes": candidate.memory_bytes,
        "because": because,
    }


_COLUMNS = (
    Column("strategy", "strategy"),
    Column("plan", "plan"),
    Column("measured_seconds", "measured step", format_seconds),
    Column("predicted_seconds", "predicted step", format_seconds),
    Column("compiled_bytes", "compiled memory", format_bytes),
    Column("predicted_bytes", "predicted memory", format_bytes),
    Column("because", "why not"),
)
