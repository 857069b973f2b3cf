"""The optimizer's update, each weight where it lives.

The update is traced as a whole and scattered over the stages, so that an optimizer may
do what it likes: what it needs of all gradients together (the norm of all of them,
whether any has overflowed) travels as a few numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshwright.models.formulations import compiler_options
from meshwright.models.inlining import inlined
from meshwright.models.parts import Part, as_function, split_program
from meshwright.models.scattering import Unit, scatter
from meshwright.models.stages import Input
from meshwright.parallel.mesh import replicated
from meshwright.parallel.transfers import Parcel, has_part, join_parts, move, part_on
from meshwright.parallel.turns import run_in_order

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class StageUpdate:
    """Updates weights and optimizer state on the stages of a pipeline.

    Arguments:
        optimizer: The optimizer, built.
        slots: Shapes and types of its variables.
        weights: Those of the weights.
        slot_stages: The stages of its variables; None for those that are everywhere.
        weight_stages: The stages of the weights.
        meshes: The devices of each stage.
        mesh: All devices.
        place: Where a weight or slot lies.
    """

    def __init__(
        self,
        optimizer: Any,
        slots: list[Any],
        weights: list[Any],
        slot_stages: Sequence[int | None],
        weight_stages: Sequence[int],
        meshes: list[Mesh],
        mesh: Mesh,
        place: Callable[[Input], NamedSharding],
    ) -> None:
        traced = jax.make_jaxpr(optimizer.stateless_apply)(slots, weights, weights)
        self._program: ClosedJaxpr = inlined(traced)
        self._stages = [*slot_stages, *weight_stages, *weight_stages]
        self._num_slots, self._num_weights = len(slots), len(weights)
        self._meshes, self._mesh, self._place = meshes, mesh, place
        self._units, owners = scatter(self._program, self._stages, len(meshes))
        self._parts = split_program(self._program, owners, len(self._units))
        self._maker = {
            v: unit.place
            for unit, part in zip(self._units, self._parts, strict=True)
            for v in part.sent
        }
        self._functions = [self._compile(number) for number in range(len(self._units))]

    def __call__(self, slots: Any, gradients: Any, weights: Any) -> tuple[Any, Any]:
        """Returns the new weights and slots; the old ones are used up."""
        inputs = [*slots, *gradients, *weights]
        values: dict[Any, Any] = {}
        outputs: dict[tuple[int, int], Any] = {}
        for unit, part, function in zip(
            self._units, self._parts, self._functions, strict=True
        ):
            given = [self._input(inputs[n], n, unit) for n in part.arguments]
            received = [self._receive(values.get(v), v, unit) for v in part.received]
            mesh = self._meshes[unit.place]
            if not has_part(mesh):
                continue
            used = self._used_up(part, unit)
            consumed = [v for v, is_used in zip(given, used, strict=True) if is_used]
            kept = [v for v, is_used in zip(given, used, strict=True) if not is_used]
            sent, results = run_in_order(mesh, function, consumed, [*kept, *received])
            values |= dict(zip(part.sent, sent, strict=True))
            made = zip(part.results, results, strict=True)
            outputs |= {(number, unit.place): value for number, value in made}
        found = [self._output(n, outputs, inputs) for n in range(self._num_outputs)]
        return found[: self._num_weights], found[self._num_weights :]

    @property
    def _num_outputs(self) -> int:
        return self._num_weights + self._num_slots

    def _input(self, value: Any, number: int, unit: Unit) -> Any:
        mesh, stage = self._meshes[unit.place], self._stages[number]
        if stage is None:
            return part_on(value, mesh) if has_part(mesh) else None
        parcel = Parcel(value.shape, value.dtype, value.sharding.spec)
        return move([value], [parcel], self._meshes[stage], mesh)[0]

    def _receive(self, value: Any, v: Any, unit: Unit) -> Any:
        source = self._meshes[self._maker[v]]
        return move([value], [_whole(v)], source, self._meshes[unit.place])[0]

    def _output(self, number: int, outputs: Any, inputs: list[Any]) -> Any:
        """A new value; of those that are everywhere, one from each stage."""
        v = self._program.jaxpr.outvars[number]
        makers = [
            unit.place
            for unit, part in zip(self._units, self._parts, strict=True)
            if number in part.results
        ]
        if not makers:
            return v.val if isinstance(v, Literal) else inputs[self._invars.index(v)]
        if not self._is_everywhere(number):
            # Where this process has no part of it, the old value stands for it.
            return outputs.get((number, makers[0]), inputs[self._input_of(number)])
        parts = [outputs.get((number, place)) for place in range(len(self._meshes))]
        if set(makers) < set(range(len(self._meshes))):
            value, source = outputs.get((number, makers[0])), self._meshes[makers[0]]
            parts = [move([value], [_whole(v)], source, m)[0] for m in self._meshes]
        return join_parts(parts, self._mesh)

    def _is_everywhere(self, number: int) -> bool:
        slot = number - self._num_weights
        return slot >= 0 and self._stages[slot] is None

    def _input_of(self, number: int) -> int:
        """The number of the input that an output is the next value of."""
        if number >= self._num_weights:
            return number - self._num_weights
        return number + self._num_slots + self._num_weights

    @property
    def _invars(self) -> list[Any]:
        return list(self._program.jaxpr.invars)

    def _used_up(self, part: Part, unit: Unit) -> list[bool]:
        """Inputs whose next value a unit makes, and which nobody reads later."""
        later = self._parts[self._units.index(unit) + 1 :]
        return [
            self._next_of(number) in part.results
            and self._stages[number] == unit.place
            and not any(number in other.arguments for other in later)
            for number in part.arguments
        ]

    def _next_of(self, number: int) -> int | None:
        """The number of the output that an input becomes."""
        if number < self._num_slots:
            return self._num_weights + number
        first_weight = self._num_slots + self._num_weights
        return number - first_weight if number >= first_weight else None

    def _compile(self, number: int) -> Any:
        unit, part = self._units[number], self._parts[number]
        mesh, jaxpr = self._meshes[unit.place], self._program.jaxpr
        used = self._used_up(part, unit)
        pairs = list(zip(part.arguments, used, strict=True))
        order = [n for n, is_used in pairs if is_used]
        order += [n for n, is_used in pairs if not is_used]
        inputs = [*(jaxpr.invars[n] for n in order), *part.received]
        results = [jaxpr.outvars[n] for n in part.results]
        function = as_function(self._program, part, inputs, [*part.sent, *results])
        run = partial(_run, function, len(part.sent))
        places = [self._output_place(n, mesh) for n in part.results]
        return jax.jit(
            run,
            donate_argnums=0,
            out_shardings=([self._sent_place(v, unit) for v in part.sent], places),
            compiler_options=compiler_options(mesh),
        )

    def _sent_place(self, v: Any, unit: Unit) -> NamedSharding | None:
        """Whole if it travels; else it is up to the compiler."""
        pairs = zip(self._units, self._parts, strict=True)
        readers = {other.place for other, part in pairs if v in part.received}
        travels = readers != {unit.place}
        return replicated(self._meshes[unit.place]) if travels else None

    def _output_place(self, number: int, mesh: Mesh) -> NamedSharding:
        is_weight = number < self._num_weights
        slot = number - self._num_weights
        given = Input("weight", number) if is_weight else Input("shared", slot)
        return NamedSharding(mesh, self._place(given).spec)


def _whole(v: Any) -> Parcel:
    return Parcel(v.aval.shape, v.aval.dtype, PartitionSpec())


def _run(
    function: Callable[..., list[Any]], num_sent: int, consumed: Any, kept: Any
) -> tuple[list[Any], list[Any]]:
    values = function(*consumed, *kept)
    return values[:num_sent], values[num_sent:]
