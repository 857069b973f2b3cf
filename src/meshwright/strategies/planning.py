"""`meshwright.plan`: which plan to use for a model, a batch and devices, and why."""

import gc
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.devices.runtime import jax_devices_of_all
from meshwright.devices.sizes import is_count
from meshwright.errors import MachineError, PlanError
from meshwright.parallel.plan import Plan, Precision
from meshwright.planner.calibration import measure_speed
from meshwright.planner.candidates import Candidate
from meshwright.planner.machines import DeviceSpec, Machine, parse_machine
from meshwright.planner.money import Choice, Wishes, choose, scaling_rows
from meshwright.planner.prediction import Predictor
from meshwright.planner.report import PlanReport
from meshwright.planner.search import Search, with_ways_out
from meshwright.planner.speeds import KnownSpeed, known_speed, store_speed
from meshwright.planner.workload import Workload
from meshwright.strategies.strategy import Strategy
from meshwright.strategies.timing import time_steps

import numpy as np
from jax.sharding import AxisType, Mesh


def plan(
    model: Any,
    batch_size: int,
    devices: DeviceSpec | Machine = None,
    *,
    memory: int | str | None = None,
    objective: str | None = None,
    precision: Precision | None = None,
    samples: int | None = None,
    epochs: int | None = None,
    finish_by: float | None = None,
    at_most: float | None = None,
    data: Any = None,
    calibrate: bool = False,
    measure: int = 0,
) -> PlanReport:
    """Says which plan to use, what it takes and costs, and why others lose.

    Nothing is allocated or run, unless `calibrate` or `measure` ask for it.

    Arguments:
        model: A built and compiled model, with or without values.
        batch_size: Samples of the global batch.
        devices: `'8xH200'`, `'4x8xH100'`, a list of devices that are here, or None for
            all of the best kind.
        memory: What a step may use of each device, as `'40GiB'`.
        objective: `'fastest'` (as if left out), `'cheapest'` or `'smallest'`.
        precision: What layers compute in; as the model has it if left out.
        samples: Samples of an epoch, for time and money.
        epochs: Epochs of the whole training.
        finish_by: Hours that the whole training may take.
        at_most: US dollars that it may cost.
        data: A batch as `(x, y)`, or its shapes, for models that do not say what they
            take.
        calibrate: Whether to measure first how fast the devices here are, which takes
            less than a minute; the result is remembered for later plans.
        measure: How many of the best plans are run here for a few steps, to correct
            the predictions.

    Returns:
        A `PlanReport`, which prints well.

    >>> import keras
    >>> import meshwright as mw
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    >>> model.compile("adam", "mse")
    >>> mw.plan(model, batch_size=256, devices="8xH200").best.fits
    True
    """
    if not is_count(batch_size):
        raise PlanError(
            f"plan received batch_size={batch_size!r}.",
            "A global batch has a whole number of samples from 1.",
            "Pass, for example, batch_size=256.",
        )
    machine = parse_machine(devices, memory=memory)
    wishes = Wishes(
        objective=objective,
        finish_by=finish_by,
        at_most=at_most,
        samples=samples,
        epochs=epochs,
    )
    if calibrate:
        calibrate_here(machine)
    if measure:
        _refuse_elsewhere(machine, "measure")
    known = known_speed(machine)
    with _no_garbage():
        work = Workload.of(model, machine.kind, data)
        smallest = wishes.objective == "smallest"
        found = _all_candidates(work, machine, known, batch_size, precision, smallest)
        choice = choose(with_ways_out(found), wishes, batch_size=batch_size)
    if measure:
        choice = _measured(model, choice, wishes, machine, batch_size, measure, data)
    with _no_garbage():
        return _report(work, machine, known, choice, wishes, batch_size, precision)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Stops Python from looking for garbage among many small objects in vain.

    It takes a quarter of the time of a plan for a large model.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _all_candidates(
    work: Workload,
    machine: Machine,
    known: KnownSpeed,
    batch_size: int,
    precision: Precision | None,
    smallest: bool,
) -> list[Candidate]:
    found = []
    for number in machine.sizes():
        part = machine.part(number)
        made = search(work, part, known, batch_size, precision, smallest)
        # Of fewer devices than there are the best plan is enough, to compare with.
        enough = made.enough if number == machine.num_devices else 1
        found += replace(made, enough=enough).candidates(number)
    return found


def search(
    work: Workload,
    machine: Machine,
    known: KnownSpeed,
    batch_size: int,
    precision: Precision | None = None,
    smallest: bool = False,
) -> Search:
    """The search for a model on a machine."""
    times = Predictor(work, machine, known.speed)
    return Search(work, machine, batch_size, times, work.memory, precision, smallest)


def _report(
    work: Workload,
    machine: Machine,
    known: KnownSpeed,
    choice: Choice,
    wishes: Wishes,
    batch_size: int,
    precision: Precision | None,
) -> PlanReport:
    assert wishes.objective is not None
    costs = partial(scaling_rows, samples=wishes.samples, epochs=wishes.epochs)
    strong = _best_by_number((*choice.candidates, *choice.rejected), batch_size)
    rows = costs(strong, batch_size=batch_size)
    own = max(batch_size // machine.num_devices, 1)
    weak: dict[int, Candidate] = {}
    for number in strong:
        size = own * number
        made = search(work, machine.part(number), known, size, precision)
        weak |= _best_by_number(replace(made, enough=1).candidates(number), size)
    rows += costs(weak, batch_size=own, is_weak=True)
    return PlanReport(
        model=work.name,
        batch_size=batch_size,
        machine=machine,
        best=choice.best,
        candidates=choice.candidates,
        rejected=choice.rejected,
        objective=wishes.objective,
        error_band=known.error,
        source=known.source,
        samples=wishes.samples,
        epochs=wishes.epochs,
        scaling=rows,
    )


def _best_by_number(
    found: Iterable[Candidate], batch_size: int
) -> dict[int, Candidate]:
    """By a number of devices, the fastest plan for it that fits."""
    by_number: dict[int, list[Candidate]] = {}
    for candidate in found:
        by_number.setdefault(candidate.num_devices, []).append(candidate)
    best = {
        number: choose(mine, Wishes(), batch_size=batch_size).best
        for number, mine in sorted(by_number.items())
    }
    return {number: each for number, each in best.items() if each is not None}


def calibrate_here(machine: Machine) -> None:
    """Measures how fast the devices here are, and remembers it."""
    _refuse_elsewhere(machine, "calibrate")
    meshes = [_mesh(machine.devices[:n]) for n in machine.sizes()]
    store_speed(machine, measure_speed(meshes))


def _mesh(names: tuple[str, ...]) -> Mesh:
    available = jax_devices_of_all()
    devices = np.array([available[name] for name in names], dtype=object)
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def _refuse_elsewhere(machine: Machine, what: str) -> None:
    if not machine.is_here:
        raise MachineError(
            f"plan received {what} for {machine}.",
            "Only devices that are here can be measured.",
            f"Leave {what} out, or leave devices out to plan for those that are here.",
        )


def _measured(
    model: Any,
    choice: Choice,
    wishes: Wishes,
    machine: Machine,
    batch_size: int,
    number: int,
    data: Any,
) -> Choice:
    """The same plans, of which the best ones have run, in the order that follows."""
    timed = {
        candidate.plan: time_steps(
            model, strategy_of(candidate.plan, machine), batch_size, data
        )
        for candidate in choice.candidates[:number]
    }
    ratios = [
        timed[candidate.plan] / candidate.step_seconds
        for candidate in choice.candidates
        if candidate.plan in timed and candidate.step_seconds
    ]
    correction = statistics.median(ratios) if ratios else 1.0
    corrected = [
        _corrected(candidate, correction, timed.get(candidate.plan))
        for candidate in (*choice.candidates, *choice.rejected)
    ]
    return choose(corrected, wishes, batch_size=batch_size)


def _corrected(
    candidate: Candidate, correction: float, measured: float | None
) -> Candidate:
    if candidate.step_seconds is None:
        return candidate
    parts = {name: correction * each for name, each in candidate.parts.items()}
    return replace(
        candidate,
        step_seconds=correction * candidate.step_seconds,
        parts=parts,
        measured_seconds=measured,
    )


def strategy_of(plan: Plan, machine: Machine) -> Strategy:
    """A strategy with a plan, on the first devices of a machine that is here."""
    per_host = plan.num_devices // machine.num_hosts
    names = machine.devices[: max(per_host, 1)]
    return Strategy(plan, names)
