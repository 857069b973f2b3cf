"""What the stages of a pipeline hold in memory, by the compiler's own account."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.devices.sizes import format_bytes
from meshwright.devices.step import STATE_KINDS
from meshwright.errors import MemoryLimitError
from meshwright.parallel.mesh import placed_shape
from meshwright.parallel.schedules import Schedule
from meshwright.train.cut import Cut
from meshwright.train.piece_programs import PieceProgram
from meshwright.train.pieces import Pieces
from meshwright.train.stage_variables import StageVariables

import jax
import numpy as np

Options = Mapping[str, Any] | None
"""What a compiler is told, by the names of its options."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes on each device of a stage, at the most."""

    held: Mapping[str, int]
    """Weights, optimizer state, and what else the stage keeps, by kind."""
    gradients: int
    """Their sums over the microbatches."""
    kept: int
    """What backward passes that are still to come want to know."""
    working: int
    """What the largest program needs while it runs."""

    @property
    def variables(self) -> int:
        """What the stage keeps, of any kind."""
        return sum(self.held.values())

    @property
    def total(self) -> int:
        """All together."""
        return self.variables + self.gradients + self.kept + self.working

    def by_kind(self) -> dict[str, int]:
        """The bytes of each kind; they add up to `total`."""
        return {
            **self.held,
            "gradients": self.gradients,
            "activations": self.kept,
            "temporaries": self.working,
        }


def memory_of_stages(
    pieces: Pieces,
    variables: StageVariables,
    state: Any,
    schedule: Schedule | None,
    options: Options = None,
) -> list[StageMemory]:
    """Compiles the programs of a step and adds up what they need.

    Arguments:
        pieces: The pieces of the step, for its largest microbatch.
        variables: Where the variables lie.
        state: The state, laid out; of its values, shapes and placements are enough.
        schedule: How many microbatches are under way at the same time; None for a step
            that only goes forward.
        options: What the compiler is told besides.
    """
    found = []
    for stage in range(len(variables.meshes)):
        mine = [
            _PieceMemory(pieces, piece, schedule is None, options)
            for piece in range(len(pieces.programs))
            if pieces.stages[piece] == stage
        ]
        most = 1 if schedule is None else schedule.most_alive(stage)
        # With several pieces on a stage, the largest of them are counted.
        largest = max((each.kept for each in mine), default=0)
        kept = max(largest * most, sum(each.kept for each in mine))
        found.append(
            StageMemory(
                held=_held(state, variables, stage)
                | {"copies of variables": _copied(pieces, variables, stage)},
                gradients=sum(each.gradients for each in mine),
                kept=kept,
                working=max((each.working for each in mine), default=0),
            )
        )
    return found


def refuse_stages_over_limit(
    found: list[StageMemory], limit: int, what: str, cut: Cut
) -> None:
    """Raises `MemoryLimitError` if a stage needs more than its devices may use.

    Arguments:
        found: What each stage needs.
        limit: Bytes that a device may use.
        what: The step, in words.
        cut: Where the model is cut, for the advice.
    """
    stage, most = max(enumerate(found), key=lambda pair: pair[1].total)
    if most.total <= limit:
        return
    kinds = {
        "variables": most.variables,
        "gradients": most.gradients,
        "kept for backward passes": most.kept,
        "programs": most.working,
    }
    parts = ", ".join(f"{k} {format_bytes(b)}" for k, b in kinds.items() if b)
    is_fixed = most.variables + most.gradients > limit
    relief = cut.relief(is_fixed, has_gradients=most.gradients > 0)
    raise MemoryLimitError(
        f"{what} needs {format_bytes(most.total)} on {cut.name_of(stage)} "
        f"({parts}); the limit is {format_bytes(limit)}.",
        "What a device keeps, and what its largest program needs, must fit its memory "
        "limit.",
        f"{relief}, or set memory_limit to at least {most.total} bytes.",
        needed=most.total,
        limit=limit,
        by_kind=kinds,
    )


def _held(state: Any, variables: StageVariables, stage: int) -> dict[str, int]:
    devices = set(variables.meshes[stage].devices.flat)
    return {
        kind: sum(_own_bytes(v) for v in group if devices <= v.sharding.device_set)
        for kind, group in zip(STATE_KINDS[len(state)], state, strict=True)
    }


def _copied(pieces: Pieces, variables: StageVariables, stage: int) -> int:
    """Bytes of the variables that a stage reads, and that live on another."""
    found = {}
    for program, place in zip(pieces.programs, pieces.stages, strict=True):
        for number in (*program.ends.weights, *program.ends.arguments):
            given = pieces.step.staged.inputs[number]
            is_variable = place == stage and given.role != "data"
            if is_variable and variables.stage(given) not in (None, stage):
                v = pieces.step.staged.program.jaxpr.invars[number]
                found[given] = _own_bytes(_of(v, program.place_of_input(number)))
    return sum(found.values())


class _PieceMemory:
    """What one piece needs for a microbatch."""

    def __init__(
        self, pieces: Pieces, piece: int, is_alone: bool, options: Options
    ) -> None:
        program = pieces.programs[piece]
        given = _given(pieces, program)
        run = program.forward_only if is_alone else program.forward
        forward = run.lower(*given).compile(compiler_options=options)
        shapes = jax.eval_shape(run, *given)
        *_, kept_places = forward.output_shardings
        *_, kept = shapes
        (_, active), (arguments, passive) = given
        data = [
            each
            for each, n in zip(arguments, program.ends.arguments, strict=True)
            if pieces.step.staged.inputs[n].role == "data"
        ]
        self.kept = sum(_own_bytes(each) for each in (*active, *passive, *data))
        put_out = sum(map(_shard_bytes, *_leaves(kept, kept_places)))
        self.kept += put_out
        self.working = _working(forward) - put_out
        self.gradients = 0
        if program.has_backward and not is_alone:
            placed = list(map(placed_shape, *_leaves(kept, kept_places)))
            carried = [_of(v, program.place(v)) for v in program.ends.carried]
            weights = given[0][0]
            self.gradients = sum(map(_own_bytes, weights))
            lowered = program.backward.lower(*given, placed, carried, weights)
            backward = lowered.compile(compiler_options=options)
            self.working = max(self.working, _working(backward) - self.gradients)


def _given(pieces: Pieces, program: PieceProgram) -> Any:
    staged, ends = pieces.step.staged, program.ends
    invars = staged.program.jaxpr.invars

    def of(number: int) -> jax.ShapeDtypeStruct:
        v = invars[number]
        if staged.inputs[number].role == "data":
            return _of(v, program.place(v))
        return _of(v, program.place_of_input(number))

    weights, arguments = map(of, ends.weights), map(of, ends.arguments)
    active = [_of(v, program.place(v)) for v in ends.active]
    passive = [_of(v, program.place(v)) for v in ends.passive]
    return (list(weights), active), (list(arguments), passive)


def _working(compiled: Any) -> int:
    """Bytes beside the arguments: outputs that are new, and what is thrown away."""
    analysis = compiled.memory_analysis()
    new = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.temp_size_in_bytes + new)


def _leaves(values: Any, places: Any) -> tuple[list[Any], list[Any]]:
    return jax.tree.leaves(values), jax.tree.leaves(places)


def _of(v: Any, place: Any) -> jax.ShapeDtypeStruct:
    return placed_shape(v.aval, place)


def _own_bytes(value: Any) -> int:
    return _shard_bytes(value, value.sharding)


def _shard_bytes(value: Any, place: Any) -> int:
    size = int(np.prod(place.shard_shape(value.shape), dtype=np.int64))
    return size * int(getattr(value.dtype, "itemsize", 0))
