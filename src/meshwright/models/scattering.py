"""A traced program whose inputs lie in several places, computed where they are.

An operation goes where the largest of its inputs is, so that small values travel. What
depends on no input that has a place is computed wherever it is read.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshwright.models.parts import Owners, bytes_of

from jax.extend.core import ClosedJaxpr, Literal, Var


class Unit(NamedTuple):
    """Operations of one place, between which nothing arrives from elsewhere."""

    phase: int
    """What a unit receives comes from units of earlier phases."""
    place: int


def scatter(
    program: ClosedJaxpr, places: Sequence[int | None], num_places: int
) -> tuple[list[Unit], Owners]:
    """Units in the order in which they can run, and which of them computes what.

    Arguments:
        program: The program.
        places: Of its inputs; None for those that are everywhere.
        num_places: How many places there are.

    Returns:
        The units, and for each operation the units that compute it, by number. An
        output that has no place is computed everywhere.
    """
    jaxpr = program.jaxpr
    pairs = zip(jaxpr.invars, places, strict=True)
    at = {v: Unit(0, place) for v, place in pairs if place is not None}
    chosen: list[Unit | None] = []
    for operation in jaxpr.eqns:
        placed = [v for v in operation.invars if _is_in(v, at)]
        unit = _unit_for(placed, at) if placed else None
        chosen.append(unit)
        if unit is not None:
            at |= dict.fromkeys(operation.outvars, unit)
    units = sorted({unit for unit in chosen if unit} | _one_each(num_places))
    return units, _owners(program, chosen, units)


def _one_each(num_places: int) -> set[Unit]:
    return {Unit(0, place) for place in range(num_places)}


def _unit_for(placed: list[Any], at: dict[Any, Unit]) -> Unit:
    place = at[max(placed, key=bytes_of)].place
    phase = max(at[v].phase + (at[v].place != place) for v in placed)
    return Unit(phase, place)


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


def _is_in(v: Any, at: dict[Any, Unit]) -> bool:
    return not isinstance(v, Literal) and v in at
