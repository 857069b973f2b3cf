"""A traced program whose inputs lie in several places, computed where they are.

An operation goes where the largest of its inputs is, so that small values travel,
unless it is told where to go. What depends on no input that has a place is computed
wherever it is read; what depends on no other input is computed when it is read, so that
it makes no unit of its own.
"""

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.models.parts import Owners, bytes_of

from jax.extend.core import ClosedJaxpr, Literal, Var


class Unit(NamedTuple):
    """Operations of one place, between which nothing arrives from elsewhere."""

    phase: int
    """What a unit receives comes from units of earlier phases."""
    place: int


def scatter(
    program: ClosedJaxpr,
    places: Sequence[int | None],
    num_places: int,
    told: Mapping[int, int] = MappingProxyType({}),
) -> tuple[list[Unit], Owners]:
    """Units in the order in which they can run, and which of them computes what.

    Arguments:
        program: The program.
        places: Of its inputs; None for those that are everywhere.
        num_places: How many places there are.
        told: The places of operations that are told where to go, by their number.

    Returns:
        The units, and for each operation the units that compute it, by number. An
        output that has no place is computed everywhere.
    """
    jaxpr = program.jaxpr
    pairs = zip(jaxpr.invars, places, strict=True)
    at = {v: Unit(0, place) for v, place in pairs if place is not None}
    chosen: list[Unit | None] = []
    for number, operation in enumerate(jaxpr.eqns):
        placed = [v for v in operation.invars if _is_in(v, at)]
        unit = _unit_for(placed, at, told.get(number))
        chosen.append(unit)
        if unit is not None:
            at |= dict.fromkeys(operation.outvars, unit)
    _let_wait(program, places, chosen)
    units = sorted({unit for unit in chosen if unit} | _one_each(num_places))
    return units, _owners(program, chosen, units)


def _let_wait(
    program: ClosedJaxpr, places: Sequence[int | None], chosen: list[Unit | None]
) -> None:
    """Moves what depends on placed inputs alone to the unit that reads it first."""
    jaxpr = program.jaxpr
    fed = {v for v, place in zip(jaxpr.invars, places, strict=True) if place is None}
    may_wait = []
    for operation in jaxpr.eqns:
        may_wait.append(not any(_is_in(v, fed) for v in operation.invars))
        if not may_wait[-1]:
            fed |= set(operation.outvars)
    busy = {unit for unit, waits in zip(chosen, may_wait, strict=True) if not waits}
    readers: dict[Any, set[Unit]] = {}
    for i in reversed(range(len(jaxpr.eqns))):
        operation, unit = jaxpr.eqns[i], chosen[i]
        if unit is None:
            continue
        if may_wait[i]:
            reading = set().union(*(readers.get(v, set()) for v in operation.outvars))
            unit = chosen[i] = _latest(unit, busy, reading)
        for v in operation.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, set()).add(unit)


def _latest(unit: Unit, busy: set[Unit | None], readers: set[Unit]) -> Unit:
    """The last of the units at a place that is not too late for some readers."""
    ends = [other.phase - (other.place != unit.place) for other in readers]
    choice = [
        other
        for other in busy | readers
        if other is not None
        and other.place == unit.place
        and unit.phase <= other.phase <= min(ends, default=other.phase)
    ]
    return max(choice, default=unit)


def _one_each(num_places: int) -> set[Unit]:
    return {Unit(0, place) for place in range(num_places)}


def _unit_for(placed: list[Any], at: dict[Any, Unit], place: int | None) -> Unit | None:
    if place is None and not placed:
        return None
    if place is None:
        place = at[max(placed, key=bytes_of)].place
    phases = [at[v].phase + (at[v].place != place) for v in placed]
    return Unit(max(phases, default=0), place)


def _owners(
    program: ClosedJaxpr, chosen: list[Unit | None], units: list[Unit]
) -> Owners:
    jaxpr = program.jaxpr
    numbers = {unit: number for number, unit in enumerate(units)}
    firsts = {numbers[unit] for unit in units if unit.phase == 0}
    readers: dict[Any, set[int]] = {}
    for v in jaxpr.outvars:
        if isinstance(v, Var):
            readers[v] = set(firsts)
    owners: list[frozenset[int]] = []
    for operation, unit in zip(reversed(jaxpr.eqns), reversed(chosen), strict=True):
        if unit is not None:
            mine = {numbers[unit]}
        else:
            mine = set().union(*(readers.get(v, set()) for v in operation.outvars))
        owners.append(frozenset(mine))
        for v in operation.invars:
            if not isinstance(v, Literal):
                readers.setdefault(v, set()).update(mine)
    return owners[::-1]


def _is_in(v: Any, at: Container[Any]) -> bool:
    return not isinstance(v, Literal) and v in at
