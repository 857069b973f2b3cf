"""One step on its way through the pieces of a model.

In a run of several processes each of them computes the pieces that lie on its devices.
All of them go through the same actions in the same order, because both sides of a
transfer take part in it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from meshwright.devices.step import batch_size
from meshwright.models.stages import Input
from meshwright.parallel.batch import BatchSplit, PlacedBatch
from meshwright.parallel.transfers import (
    Delivery,
    Parcel,
    add,
    deliver,
    has_part,
    move,
    part_on,
)
from meshwright.parallel.turns import Call, run_together
from meshwright.train.cut import Act
from meshwright.train.piece_programs import PieceProgram
from meshwright.train.pieces import Pieces
from meshwright.train.stage_variables import StageVariables
from meshwright.train.staged_steps import ROLES

import jax
import numpy as np
from jax.sharding import Mesh


class Flow:
    """The values of one step.

    Arguments:
        variables: Where the variables lie.
        pieces: The pieces for each microbatch.
        state: The state before.
        batch: The microbatches.
        starts: For each microbatch the gradients that it starts from, in the order of
            the outputs; None for the loss of its own.

    Attributes:
        data: The arrays of each microbatch.
        current: The newest values of the state.
        outputs: What the pieces have put out, by number and microbatch.
    """

    def __init__(
        self,
        variables: StageVariables,
        pieces: list[Pieces],
        state: Any,
        batch: PlacedBatch,
        starts: Sequence[Any] | None = None,
    ) -> None:
        self.variables = variables
        self.pieces = pieces
        self._state = state
        self.batch = batch
        self._starts = starts
        self._roles = ROLES[len(state)]
        self.data = [jax.tree.leaves(each) for each in batch.arrays]
        self._shares = [batch_size(each) / batch.size for each in batch.arrays]
        self.current = {
            Input(role, i): value
            for role, values in zip(self._roles, state, strict=True)
            for i, value in enumerate(values)
        }
        # Several pieces of one stage may read a state, before and after its update.
        self._read = dict(self.current) if len(pieces) == 1 else self.current
        self._made: dict[tuple[Any, int], Any] = {}
        self._values: dict[tuple[Any, int, int], Any] = {}
        self._sent_back: dict[tuple[Any, int, int], Any] = {}
        self._gradients: dict[tuple[Any, int], list[Any]] = defaultdict(list)
        self._kept: dict[tuple[int, int], Any] = {}
        self._sums: dict[tuple[int, Input], Any] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self._copies = self._copy_what_others_read()

    def _copy_what_others_read(self) -> dict[tuple[Input, int], Any]:
        """Variables for the stages that read them and are not their home."""
        found: dict[tuple[Input, int], Any] = {}
        for given, stage in sorted(self._read_elsewhere()):
            home, there = self.variables.stage(given), self.variables.meshes[stage]
            assert home is not None
            value = self.current[given]
            source = self.variables.meshes[home]
            (found[given, stage],) = move([value], [parcel_of(value)], source, there)
        return found

    def _read_elsewhere(self) -> set[tuple[Input, int]]:
        return {
            (given, stage)
            for pieces in self.pieces
            for piece, program in enumerate(pieces.programs)
            for given in self._read_by(pieces, program)
            for stage in [self.stage_of(piece)]
            if self.variables.stage(given) not in (None, stage)
        }

    def _read_by(self, pieces: Pieces, program: PieceProgram) -> list[Input]:
        """The variables that a piece reads."""
        numbers = (*program.ends.weights, *program.ends.arguments)
        inputs = [pieces.step.staged.inputs[n] for n in numbers]
        return [each for each in inputs if each.role != "data"]

    def act(self, actions: Iterable[Act]) -> None:
        """Does what actions say that do not wait for each other.

        Arguments:
            actions: Kind (one of a schedule, or `forward_only`), piece and microbatch.
        """
        found = [self._job(*action) for action in actions]
        jobs = [job for job in found if job is not None]
        outputs = run_together([job.call for job in jobs])
        for job, values in zip(jobs, outputs, strict=True):
            job.keep(values)

    def _job(self, kind: str, piece: int, number: int) -> "_Job | None":
        has_backward = self.pieces[number].programs[piece].has_backward
        is_forward = kind.startswith("forward")
        if not has_part(self.mesh_of(piece)) or not (is_forward or has_backward):
            return None
        makers: dict[str, Callable[[int, int], _Job]] = {
            "forward": self._forward,
            "forward_only": partial(self._forward, is_alone=True),
            "backward": self._backward,
            "input_gradients": self._pass_gradients_on,
            "weight_gradients": self._add_gradients,
        }
        return makers[kind](piece, number)

    def _call(self, piece: int, program: Any, *args: Any) -> Call:
        return Call(self.mesh_of(piece), program, args)

    def fetch(self, actions: Iterable[Act]) -> None:
        """Brings what actions need of other pieces to the devices of their own.

        It is done when the actions begin, and not when the values are made: between
        processes both sides wait for each other, so they meet as late as possible, and
        what goes there and back at the same tick meets once.

        Arguments:
            actions: Kind, piece and microbatch of each, as `act` takes them.
        """
        wanted = [each for action in actions for each in self._wanted(*action)]
        moved = deliver([delivery for delivery, _ in wanted])
        for (_, keep), values in zip(wanted, moved, strict=True):
            keep(values)

    def _wanted(
        self, kind: str, piece: int, number: int
    ) -> Iterator[tuple[Delivery, Callable[[list[Any]], None]]]:
        """What an action needs of each other piece, and what to do when it is there."""
        pieces = self.pieces[number]
        ends = pieces.programs[piece].ends
        if kind.startswith("forward"):
            wanted = (*ends.active, *ends.passive)
            for maker in sorted({pieces.maker[v] for v in wanted}):
                chosen = [v for v in wanted if pieces.maker[v] == maker]
                given = [self._take_made(v, number, piece) for v in chosen]
                delivery = self._delivery(given, chosen, number, maker, piece)
                yield delivery, partial(self._keep_values, chosen, number, piece)
        elif kind != "weight_gradients":
            for reader in sorted({r for v in ends.carried for r in pieces.readers[v]}):
                if not pieces.programs[reader].has_backward:
                    continue
                chosen = [v for v in ends.carried if reader in pieces.readers[v]]
                given = [self._sent_back.pop((v, number, reader), None) for v in chosen]
                delivery = self._delivery(given, chosen, number, reader, piece)
                yield delivery, partial(self._keep_gradients, chosen, number)

    def _keep_values(
        self, made: Sequence[Any], number: int, piece: int, values: list[Any]
    ) -> None:
        pairs = zip(made, values, strict=True)
        self._values |= {(v, number, piece): value for v, value in pairs}

    def _keep_gradients(
        self, made: Sequence[Any], number: int, gradients: list[Any]
    ) -> None:
        for v, gradient in zip(made, gradients, strict=True):
            self._gradients[v, number].append(gradient)

    def _forward(self, piece: int, number: int, is_alone: bool = False) -> "_Job":
        pieces = self.pieces[number]
        program, inputs = pieces.programs[piece], pieces.step.staged.inputs
        ends = program.ends
        weights = [self._value(inputs[n], piece, number) for n in ends.weights]
        arguments = [self._value(inputs[n], piece, number) for n in ends.arguments]
        active = [self._values.pop((v, number, piece)) for v in ends.active]
        passive = [self._values.pop((v, number, piece)) for v in ends.passive]
        given = (weights, active), (arguments, passive)

        def keep(outputs: Any) -> None:
            carried, (left, results), kept = outputs
            if program.has_backward and not is_alone:
                self._kept[piece, number] = (*given, kept)
            self._take_results(pieces, number, ends.results, results)
            names = (*ends.carried, *ends.left)
            made = zip(names, (*carried, *left), strict=True)
            self._made |= {(v, number): x for v, x in made if pieces.readers[v]}

        run = program.forward_only if is_alone else program.forward
        return _Job(self._call(piece, run, *given), keep)

    def _take_made(self, v: Any, number: int, reader: int) -> Any:
        """A value that was made; the last of its readers takes it away."""
        is_last = reader == max(self.pieces[number].readers[v])
        take = self._made.pop if is_last else self._made.get
        return take((v, number), None)

    def move(self, *args: Any) -> list[Any]:
        """Moves values of a microbatch, or their gradients, between two pieces."""
        return deliver([self._delivery(*args)])[0]

    def _delivery(
        self,
        values: Sequence[Any],
        variables: Sequence[Any],
        number: int,
        source: int,
        target: int,
    ) -> Delivery:
        """Values of a microbatch, or their gradients, from one piece to another."""
        program = self.pieces[number].programs[source]
        parcels = [
            Parcel(v.aval.shape, v.aval.dtype, program.place(v).spec) for v in variables
        ]
        meshes = self.mesh_of(source), self.mesh_of(target)
        return Delivery(values, parcels, *meshes)

    def _take_results(
        self, pieces: Pieces, number: int, made: Sequence[int], results: Any
    ) -> None:
        staged = pieces.step.staged
        for output, value in zip(made, results, strict=True):
            source = staged.updates[output]
            if source is None:
                self.outputs[output, number] = value
            else:
                self.current[staged.inputs[source]] = value

    def _value(self, given: Input, piece: int, number: int) -> Any:
        """An input of the step on the devices of a piece."""
        mesh, stage = self.mesh_of(piece), self.stage_of(piece)
        if given.role == "data":
            array = self.data[number][given.index]
            return put_batch(array, mesh=mesh, others=self.data[number])
        if (given, stage) in self._copies:
            return self._copies[given, stage]
        return self.on_stage(self._read[given], mesh)

    def on_stage(self, value: Any, mesh: Mesh) -> Any:
        """A value that is there, perhaps among other places."""
        return value if value.sharding.mesh == mesh else part_on(value, mesh)

    def _backward(self, piece: int, number: int) -> "_Job":
        def keep(outputs: Any) -> None:
            sums, to_active = outputs
            self._keep_sums(piece, number, sums)
            self._send_back(piece, number, to_active)

        given = (*self._kept.pop((piece, number)), self._arrived(piece, number))
        run = self.pieces[number].programs[piece].backward
        return _Job(self._call(piece, run, *given, self._sums_of(piece, number)), keep)

    def _pass_gradients_on(self, piece: int, number: int) -> "_Job":
        given = (*self._kept[piece, number], self._arrived(piece, number))

        def keep(outputs: Any) -> None:
            to_active, between = outputs
            self._kept[piece, number] = (*given, between)
            self._send_back(piece, number, to_active)

        run = self.pieces[number].programs[piece].input_gradients
        return _Job(self._call(piece, run, *given), keep)

    def _add_gradients(self, piece: int, number: int) -> "_Job":
        given = self._kept.pop((piece, number))
        run = self.pieces[number].programs[piece].weight_gradients
        call = self._call(piece, run, *given, self._sums_of(piece, number))
        return _Job(call, partial(self._keep_sums, piece, number))

    def _arrived(self, piece: int, number: int) -> list[Any]:
        """The gradients of what a piece carried on, from the pieces after it."""
        pieces = self.pieces[number]
        carried = pieces.programs[piece].ends.carried
        return [self._gradient(pieces, v, number) for v in carried]

    def _send_back(self, piece: int, number: int, gradients: Any) -> None:
        active = self.pieces[number].programs[piece].ends.active
        pairs = zip(active, gradients, strict=True)
        self._sent_back |= {(v, number, piece): gradient for v, gradient in pairs}

    def _gradient(self, pieces: Pieces, v: Any, number: int) -> Any:
        arrived = self._gradients.pop((v, number), [])
        jaxpr, starts = pieces.step.staged.program.jaxpr, pieces.step.staged.starts
        for position, output in enumerate(starts):
            if v is jaxpr.outvars[output]:
                arrived.append(self._start(position, number, v.aval.dtype))
        if not arrived:
            # No gradient goes through its readers: they compare it, for example.
            return np.zeros(v.aval.shape, v.aval.dtype)
        return add(arrived)

    def _start(self, position: int, number: int, dtype: Any) -> Any:
        if self._starts is None:
            return np.asarray(self._shares[number], dtype)
        return self._starts[number][position]

    def _sums_of(self, piece: int, number: int) -> list[Any]:
        keys = self._keys(piece, number)
        if not all(key in self._sums for key in keys):
            zeros = self.pieces[number].programs[piece].zeros()
            self._sums = dict(zip(keys, zeros, strict=True)) | self._sums
        return [self._sums[key] for key in keys]

    def _keep_sums(self, piece: int, number: int, sums: list[Any]) -> None:
        self._sums |= dict(zip(self._keys(piece, number), sums, strict=True))

    def _keys(self, piece: int, number: int) -> list[tuple[int, Input]]:
        pieces = self.pieces[number]
        weights = pieces.programs[piece].ends.weights
        return [(piece, pieces.step.staged.inputs[n]) for n in weights]

    def state(self) -> Any:
        """The state after the step."""
        return tuple(
            [self.current[Input(role, i)] for i in range(len(values))]
            for role, values in zip(self._roles, self._state, strict=True)
        )

    def take_metrics(self, values: Sequence[Any]) -> None:
        """Takes metrics that were updated elsewhere."""
        self.current |= {Input("metric", i): value for i, value in enumerate(values)}

    def add_gradients_of_loss(self, gradients: dict[Input, Any]) -> None:
        """Adds gradients that do not come through the pieces; they are in the last."""
        self._sums |= {(self.last + 1, each): g for each, g in gradients.items()}

    def stage_of(self, piece: int) -> int:
        """The stage that a piece lies on."""
        return self.pieces[0].stages[piece]

    def mesh_of(self, piece: int) -> Mesh:
        """The devices of a piece."""
        return self.variables.meshes[self.stage_of(piece)]

    @property
    def last(self) -> int:
        """The last piece."""
        return len(self.pieces[-1].programs) - 1

    def update(self, update: Callable[..., Any]) -> None:
        """Lets the optimizer update weights and its own variables."""
        weights, _, slots, _ = self._state
        self._copies.clear()
        weights, slots = update(slots, self._summed(), weights)
        self.current |= {Input("weight", i): v for i, v in enumerate(weights)}
        self.current |= {Input("shared", i): v for i, v in enumerate(slots)}

    def _summed(self) -> list[Any]:
        """The gradient of each weight, where it lives."""
        found: dict[Input, list[Any]] = defaultdict(list)
        for piece, given in sorted(self._all_sums()):
            weight = self.current[given]
            source = self.mesh_of(min(piece, self.last))
            value, there = self._sums.get((piece, given)), weight.sharding.mesh
            found[given] += move([value], [parcel_of(weight)], source, there)
        weights = [Input("weight", i) for i in range(len(self._state[0]))]
        return [
            self._gradient_of(self.current[each], found.get(each)) for each in weights
        ]

    def _all_sums(self) -> set[tuple[int, Input]]:
        """Those of all processes."""
        mine = set(self._sums)
        return mine | {
            key
            for number, pieces in enumerate(self.pieces)
            for piece, program in enumerate(pieces.programs)
            if program.has_backward
            for key in self._keys(piece, number)
        }

    def _gradient_of(self, weight: Any, found: list[Any] | None) -> Any:
        if not has_part(weight.sharding.mesh):
            return weight
        if found is None:
            return jax.device_put(np.zeros(weight.shape, weight.dtype), weight.sharding)
        return add(found)


class _Job(NamedTuple):
    """A program that is ready to run, and what becomes of its outputs."""

    call: Call
    keep: Callable[[Any], None]


def parcel_of(value: Any) -> Parcel:
    """What is to be known of a value that lies on a stage."""
    return Parcel(value.shape, value.dtype, value.sharding.spec)


def put_batch(array: Any, *, mesh: Mesh, others: list[Any]) -> Any:
    """A part of a microbatch on the devices of a piece, split by sample."""
    return BatchSplit(batch_size(others), mesh).put(array)
