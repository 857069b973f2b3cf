"""What comes out of a step that has gone through the pieces of a model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from meshwright.data.resident import Shapes
from meshwright.devices.containers import map_leaves
from meshwright.models.stages import Input
from meshwright.parallel.transfers import Parcel, has_part, join_parts, move, part_on
from meshwright.train.pipeline_flow import Flow, parcel_of, put_batch
from meshwright.train.whole_loss import Microbatch

import jax
from jax.sharding import Mesh, PartitionSpec


class FlowEnds:
    """The results of a step, where they can be read.

    Arguments:
        flow: The step.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    def logs(self) -> Any:
        """What the step returns besides the state: of the last microbatch."""
        pieces, number = self._flow.pieces[-1], len(self._flow.pieces) - 1
        step = pieces.step
        outputs = range(step.first, step.first + step.logs.num_leaves)
        found = {output: self._output(output, number) for output in outputs}
        if self._flow.variables.mesh.is_multi_process:
            made = [output for output in outputs if output in pieces.printer]
            for piece in sorted({pieces.printer[output] for output in made}):
                mine = [output for output in made if pieces.printer[output] == piece]
                shapes = [step.staged.program.jaxpr.outvars[o].aval for o in mine]
                values = [found[output] for output in mine]
                spread = self._spread(values, shapes, self._flow.stage_of(piece))
                found |= dict(zip(mine, spread, strict=True))
        return jax.tree.unflatten(step.logs, list(found.values()))

    def spread_from_last(self, values: Any, shapes: Any) -> Any:
        """A tree of whole values of the last stage, where this process can read it.

        Arguments:
            values: The values; None in a process that has no device of that stage.
            shapes: Their shapes.
        """
        if not self._flow.variables.mesh.is_multi_process:
            return values
        leaves, structure = jax.tree.flatten(shapes)
        known = [None] * len(leaves) if values is None else jax.tree.leaves(values)
        stage = self._flow.stage_of(self._flow.last)
        return jax.tree.unflatten(structure, self._spread(known, leaves, stage))

    def _spread(
        self, values: Sequence[Any], shapes: Sequence[Any], stage: int
    ) -> list[Any]:
        """Values that one stage has whole, on all devices."""
        meshes = self._flow.variables.meshes
        parcels = [Parcel(each.shape, each.dtype, PartitionSpec()) for each in shapes]
        parts = [move(values, parcels, meshes[stage], mesh) for mesh in meshes]
        return [
            join_parts(each, self._flow.variables.mesh)
            for each in zip(*parts, strict=True)
        ]

    def _output(self, output: int, number: int) -> Any:
        """An output of a microbatch that is no state; None if others have it."""
        step = self._flow.pieces[number].step
        kind, what = step.passed_on().get(output, ("made", None))
        if kind == "made":
            return self._flow.outputs.get((output, number))
        if kind == "constant":
            return what
        given = step.staged.inputs[what]
        return (
            self._flow.data[number][given.index]
            if given.role == "data"
            else self._flow.current[given]
        )

    def microbatch_shapes(self) -> tuple[Shapes, ...]:
        """The shapes of what the forward passes make, which all processes know."""
        found = []
        for number, data in enumerate(self._flow.batch.arrays):
            step = self._flow.pieces[number].step
            outvars = step.staged.program.jaxpr.outvars
            shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in outvars]
            count = step.first + step.logs.num_leaves
            flat, losses = jax.tree.unflatten(step.starts, shapes[: step.first])
            masks = jax.tree.unflatten(step.logs, shapes[step.first : count])
            given = map_leaves(_shape_of, data)
            found.append(Shapes.of(Microbatch(flat, losses, masks, given)))
        return tuple(found)

    def microbatches(self) -> list[Microbatch]:
        """What the forward passes have made, on the devices of the last stage.

        Without values in a process that has none of them.
        """
        found = []
        last = self._flow.mesh_of(self._flow.last)
        for number, data in enumerate(self._flow.batch.arrays):
            step = self._flow.pieces[number].step
            count = step.first + step.logs.num_leaves
            values = [self._at_the_end(output, number) for output in range(count)]
            flat, losses = jax.tree.unflatten(step.starts, values[: step.first])
            masks = jax.tree.unflatten(step.logs, values[step.first :])
            if has_part(last):
                put = partial(put_batch, mesh=last, others=self._flow.data[number])
                data = map_leaves(put, data)
            found.append(Microbatch(flat, losses, masks, data))
        return found

    def _at_the_end(self, output: int, number: int) -> Any:
        pieces = self._flow.pieces[number]
        value = self._output(output, number)
        if output not in pieces.printer:
            return value
        v = pieces.step.staged.program.jaxpr.outvars[output]
        source = pieces.printer[output]
        return self._flow.move([value], [v], number, source, self._flow.last)[0]

    def gradients_at_home(self, found: Sequence[Any] | None) -> list[list[Any]]:
        """Gradients of outputs, from the last stage to where the outputs were made.

        Arguments:
            found: For each microbatch a tree of them; None where there are none.
        """
        starts = []
        for number, pieces in enumerate(self._flow.pieces):
            outvars = pieces.step.staged.program.jaxpr.outvars
            leaves: list[Any] = [None] * pieces.step.first
            if found is not None:
                leaves = jax.tree.leaves(found[number])
            moved = []
            for output, gradient in enumerate(leaves):
                maker = pieces.printer.get(output, self._flow.last)
                v = outvars[output]
                moved += self._flow.move(
                    [gradient], [v], number, self._flow.last, maker
                )
            starts.append(moved)
        return starts

    def read(self, given: Input, mesh: Mesh) -> Any:
        """A variable on the devices of a stage."""
        value, stage = self._flow.current[given], self._flow.variables.stage(given)
        if stage is None:
            return part_on(value, mesh) if has_part(mesh) else None
        return move(
            [value], [parcel_of(value)], self._flow.variables.meshes[stage], mesh
        )[0]

    def spread_metrics(self) -> None:
        """Gives metrics to all processes, which read them at the end of an epoch."""
        if not self._flow.variables.mesh.is_multi_process:
            return
        stage = self._flow.stage_of(self._flow.last)
        there = self._flow.variables.meshes[stage]
        metrics = {k: v for k, v in self._flow.current.items() if k.role == "metric"}
        is_mine = has_part(there)
        values = [
            self._flow.on_stage(v, there) if is_mine else None for v in metrics.values()
        ]
        found = self._spread(values, list(metrics.values()), stage)
        self._flow.current |= dict(zip(metrics, found, strict=True))


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
