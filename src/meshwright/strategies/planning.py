"""`meshwright.plan`: which plan to use for a model, a batch and devices, and why."""

import gc
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.devices.runtime import jax_devices_of_all
from meshwright.devices.sizes import is_count
from meshwright.errors import MachineError, PlanError
from meshwright.models.profile import refuse_unbuilt
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

import jax
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
    check_question("plan", model, batch_size)
    _check_measure(measure)
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
        _refuse_without_values(model)
    known = known_speed(machine)
    with _no_garbage():
        work = Workload.of(model, machine.kind, data)
        smallest = wishes.objective == "smallest"
        found = _all_candidates(work, machine, known, batch_size, precision, smallest)
        found = with_ways_out(found)
        choice = choose(found, wishes, batch_size=batch_size)
    correction = 1.0
    if measure:
        best = choice.candidates[:measure]
        timed = _timed(model, best, machine, batch_size, data)
        correction = _correction(best, timed)
        found = [_corrected(c, correction, timed.get(c.plan)) for c in found]
        choice = choose(found, wishes, batch_size=batch_size)
    with _no_garbage():
        strong = _best_by_number(found, batch_size)
        weak = _weak_scaling(
            work, machine, known, batch_size, precision, correction, strong
        )
    return _report(work.name, machine, known, choice, wishes, batch_size, strong, weak)


def check_question(verb: str, model: Any, batch_size: Any) -> None:
    """Refuses what is no model or is not built, and a batch that is none.

    Arguments:
        verb: The function that received them.
        model: Should be a Keras model.
        batch_size: Should be a count.
    """
    import keras

    if not isinstance(model, keras.Model):
        raise PlanError(
            f"{verb} received {model!r} (a {type(model).__name__}) as model.",
            "It takes a Keras model.",
            "Wrap layers in a model, for example keras.Sequential([...]).",
        )
    if not is_count(batch_size) or batch_size < 1:
        raise PlanError(
            f"{verb} received batch_size={batch_size!r} (a "
            f"{type(batch_size).__name__}).",
            "A global batch has a whole number of samples from 1.",
            "Pass, for example, batch_size=256.",
        )
    refuse_unbuilt(model)


def _check_measure(measure: Any) -> None:
    if not is_count(measure) or measure < 0:
        raise PlanError(
            f"plan received measure={measure!r} (a {type(measure).__name__}).",
            "It is the number of plans that are run here, from 0.",
            "Pass, for example, measure=3, or leave it out.",
        )


def _refuse_without_values(model: Any) -> None:
    if any(isinstance(v._value, jax.ShapeDtypeStruct) for v in model.variables):
        raise PlanError(
            f"plan received measure for {model.name!r}, whose variables have no "
            "values.",
            "Only a model with values can be run.",
            "Leave measure out, or build the model as usual.",
        )


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


def _weak_scaling(
    work: Workload,
    machine: Machine,
    known: KnownSpeed,
    batch_size: int,
    precision: Precision | None,
    correction: float,
    numbers: Iterable[int],
) -> dict[int, Candidate]:
    """By a number of devices, the fastest plan for a batch that grows with it."""
    own = _own_batch(batch_size, machine)
    batches = {number: own * number for number in numbers}
    weak = fastest_plans(work, machine, known, batches, precision)
    return {number: _corrected(each, correction) for number, each in weak.items()}


def fastest_plans(
    work: Workload,
    machine: Machine,
    known: KnownSpeed,
    batches: Mapping[int, int],
    precision: Precision | None = None,
) -> dict[int, Candidate]:
    """By a number of devices, the fastest plan for all of them that fits.

    Arguments:
        work: The training step.
        machine: The devices, of which parts are looked at.
        known: How fast they are.
        batches: By a number of devices, the samples of the global batch.
        precision: What layers compute in; as the model has it if left out.
    """
    found: dict[int, Candidate] = {}
    for number, size in batches.items():
        made = search(work, machine.part(number), known, size, precision)
        candidates = replace(made, enough=1).candidates(number)
        found |= _best_by_number(candidates, size)
    return found


def _own_batch(batch_size: int, machine: Machine) -> int:
    """Samples of one device."""
    return max(batch_size // machine.num_devices, 1)


def _report(
    name: str,
    machine: Machine,
    known: KnownSpeed,
    choice: Choice,
    wishes: Wishes,
    batch_size: int,
    strong: dict[int, Candidate],
    weak: dict[int, Candidate],
) -> PlanReport:
    assert wishes.objective is not None
    costs = partial(scaling_rows, samples=wishes.samples, epochs=wishes.epochs)
    rows = costs(strong, batch_size=batch_size)
    rows += costs(weak, batch_size=_own_batch(batch_size, machine), is_weak=True)
    return PlanReport(
        model=name,
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
    if machine.num_hosts > 1:
        raise MachineError(
            f"plan received {what} in a run of {machine.num_hosts} processes.",
            "Only the devices of a process that is alone can be measured.",
            f"Leave {what} out, or plan in a run of one process.",
        )


def _timed(
    model: Any,
    candidates: Iterable[Candidate],
    machine: Machine,
    batch_size: int,
    data: Any,
) -> dict[Plan, float]:
    """How long steps of plans really take."""
    return {
        each.plan: time_steps(model, strategy_of(each.plan, machine), batch_size, data)
        for each in candidates
    }


def _correction(candidates: Iterable[Candidate], timed: dict[Plan, float]) -> float:
    """By how much longer steps take than was predicted."""
    ratios = [timed[c.plan] / c.step_seconds for c in candidates if c.step_seconds]
    return statistics.median(ratios) if ratios else 1.0


def _corrected(
    candidate: Candidate, correction: float, measured: float | None = None
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
    return Strategy(plan, machine.devices[: plan.num_devices])
