"""A Keras training step in which every device trains a model of its own for a while."""

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from meshwright.cluster.channel import telling_of_compiling
from meshwright.data.resident import ArraysInMemory, Shapes, Stretch
from meshwright.devices.containers import map_leaves
from meshwright.devices.memory import explaining_exhaustion
from meshwright.devices.step import (
    STATE_KINDS,
    StepCheck,
    StepState,
    batch_size,
    variables_of,
)
from meshwright.errors import StrategyError
from meshwright.parallel.batch import PlacedBatch, PlacedStack
from meshwright.parallel.local_sgd import Round
from meshwright.parallel.mesh import placed_shape, replicated
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.parallel.turns import run_in_turn
from meshwright.train.ahead import Ahead, finish_all
from meshwright.train.listeners import Logs
from meshwright.train.local_programs import (
    LocalPrograms,
    merge_program,
    spread_program,
)
from meshwright.train.mesh_programs import Shardings
from meshwright.train.mesh_step import MeshStep
from meshwright.train.stretches import put_whole
from meshwright.train.traced_step import TracedStep

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

OWN = "workers"
"""The first word of the names that checkpoints have for what workers have."""


class LocalStep:
    """Runs Keras' training step on workers that agree once in a round.

    What it gives back as the state belongs to the workers, along a first dim, until
    somebody wants to see the model: `show` makes one model of it then, and training
    goes on with the workers, but for values that were changed meanwhile.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: The devices, each a worker.
        sync_every: Steps of a round.
        outer: The optimizer that moves what the workers agreed on, or None.
    """

    def __init__(
        self,
        model: Any,
        step: Any,
        plan: Plan,
        mesh: Mesh,
        sync_every: int,
        outer: Any = None,
    ) -> None:
        if not hasattr(step, "lower"):
            raise StrategyError(
                f"{model.name!r} was compiled with run_eagerly=True or "
                "jit_compile=False.",
                "A step of many workers is one compiled program.",
                "Compile the model without these, or train it without a strategy.",
            )
        self._model, self._mesh, self._plan = model, mesh, plan
        self._outer = _built_for(model, outer)
        self._programs = LocalPrograms(model, step, plan, mesh, self._outer, sync_every)
        self._workers = self._programs.workers
        self._spread = spread_program(self._workers)
        self._merge = merge_program(self._workers, mesh)
        self._what = f"{step.__name__} of {model.name!r}"
        self._check = StepCheck(model, step.__name__)
        self._kept = StepState(model)
        self.giving_back = self._kept.giving_back
        self._ahead = Ahead(self.measures_kernels)
        self._prepared: set[Any] = set()
        self._dispatched: set[Any] = set()
        self._state: Any = None
        """What Keras has been given, if the workers have something of their own."""
        self._round: Round | None = None
        self._shown: list[list[Any]] = []
        """Weak references to what `show` has shown of `_state`."""
        self._outer_slots = [self._whole(v.value) for v in _variables_of(self._outer)]
        self._next_outer_slots = self._outer_slots

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step on a batch of any size; returns what Keras' step does."""
        batch = data if isinstance(data, PlacedBatch) else self.put(data)
        program = self._program_for(batch)
        return self._dispatch(program, batch.size, state, batch.arrays)

    def run_stretch(self, state: Any, stretch: Stretch, of_each: bool) -> Any:
        """Runs several steps on arrays; see `MeshStep.run_stretch`."""
        size = stretch.batches.size
        data, batches = self._keep(stretch.data), self._keep(stretch.batches)
        key = (stretch.data.shapes, stretch.num_steps, of_each)
        program = self._programs.on_arrays(size, *key)
        with telling_of_compiling(is_new=program not in self._dispatched):
            if stretch.rest:
                self.prepare(stretch.data, stretch.rest, 1, 1, of_each)
            if self.measures_kernels:
                number = stretch.batches.number
                self.prepare(stretch.data, size, number, stretch.num_steps, of_each)
                finish_all()
            self._ahead.finish(program)
            first = np.int32(stretch.first)
            logs, state = self._dispatch(program, size, state, data, batches, first)
        return _with_each(logs, stretch.num_steps, of_each), state

    def run_placed(
        self, state: Any, batches: PlacedStack | PlacedBatch, of_each: bool
    ) -> Any:
        """Runs a step on each of the batches, as `run_stretch` does."""
        if isinstance(batches, PlacedBatch):
            return self(state, batches)
        leaves, structure = self._leaves_of(batches.arrays, 1)
        key = (leaves, structure, batches.number, of_each)
        program = self._programs.on_stack(batches.size, *key)
        logs, state = self._dispatch(program, batches.size, state, batches.arrays)
        return _with_each(logs, batches.number, of_each), state

    @property
    def measures_kernels(self) -> bool:
        """Whether compiling runs kernels on the devices, to choose the fastest."""
        return bool(self._mesh.devices.flat[0].platform != "cpu")

    def work(self, data: ArraysInMemory, size: int) -> TracedStep:
        """What a worker does in a step on a batch of `size` of these arrays."""
        shares = self._programs.shares(size)
        return self._programs.trace_on_arrays(shares.larger, data.shapes)

    def work_on(self, batch: Any) -> TracedStep:
        """What a worker does in a step on a batch of the host."""
        shares = self._programs.shares(batch_size(batch))
        part = map_leaves(lambda leaf: _share_of_first(leaf, shares), batch)
        return self._programs.trace(shares.larger, Shapes.of(part))

    def prepare(
        self,
        data: ArraysInMemory,
        size: int,
        num_batches: int,
        num_steps: int,
        of_each: bool,
    ) -> None:
        """Begins to compile what `run_stretch` will need; see `MeshStep.prepare`."""
        wanted = (data.shapes, size, num_batches, num_steps, of_each)
        if wanted in self._prepared:
            return
        self._prepared.add(wanted)
        program = self._programs.on_arrays(size, data.shapes, num_steps, of_each)
        whole = replicated(self._mesh)
        rows = jax.ShapeDtypeStruct((num_batches, size), np.int32, sharding=whole)
        arrays = jax.tree.map(lambda leaf: placed_shape(leaf, whole), data.shapes.tree)
        state, round = self._state_shapes(), self._round_shapes()
        self._ahead.start(program, state, round, arrays, rows, np.int32(0))

    def put(self, data: Any) -> PlacedBatch:
        """Moves the shares of a batch to their workers; threads may do it ahead."""
        size = batch_size(data)
        return PlacedBatch(size, self._place(map_leaves(np.array, data), size, 0))

    def put_stack(self, stack: Any, size: int) -> PlacedStack:
        """Does so with batches that are stacked along a first dim.

        Arguments:
            stack: The batches.
            size: Samples in each.
        """
        placed = self._place(stack, size, 1)
        return PlacedStack(size, len(jax.tree.leaves(placed)[0]), placed)

    def lower(self, state: Any, data: Any) -> Any:
        """The program for a batch like `data`, ready to be compiled and looked at."""
        batch = self.put(data)
        program = self._program_for(batch)
        return program.lower(self._state_shapes(), self._round_shapes(), batch.arrays)

    def show(self, lists: Sequence[Any]) -> Sequence[Any]:
        """The lists of a model's state, of one model if they belong to workers."""
        if self._state is None or not _are(list(map(list, lists)), self._state):
            return lists
        *replica, metrics = self._state
        merged, self._next_outer_slots = run_in_turn(
            self._mesh, self._merge, tuple(replica), self._round
        )
        self._shown = [[ref(value) for value in group] for group in merged]
        return [*merged, metrics]

    def follow(self, before: Any, after: Any) -> None:
        """Knows what was shown again, in the arrays that took its place.

        Arguments:
            before: Lists of a state, the weights and the other variables first.
            after: What a step that does not train has made of them.
        """
        for shown, olds, news in zip(self._shown[:2], before, after, strict=False):
            for i, (old, new) in enumerate(zip(olds, news, strict=True)):
                if shown[i]() is old:
                    shown[i] = ref(new)

    def end_round(self) -> None:
        """Ends a round early: what was shown last is what all workers begin with."""
        self._outer_slots = self._next_outer_slots
        self._state = self._round = None
        self._shown = []

    def own_values(self) -> dict[str, Any]:
        """What the workers and the outer optimizer have, by name, for a checkpoint."""
        has_state = self._state is not None
        if not has_state:
            lists = [[v._value for v in group] for group in self._variables()]
            self._take((*lists, []))
        values = jax.tree.leaves((self._state[:3], self._round))
        if not has_state:
            self._state = self._round = None
        return dict(zip(self._own_names(), values, strict=True))

    def own_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes, types and places of these values."""
        leaves = jax.tree.leaves((self._state_shapes()[:3], self._round_shapes()))
        return dict(zip(self._own_names(), leaves, strict=True))

    def give_own_values(
        self, values: Mapping[str, Any], shown: Sequence[Sequence[Any]]
    ) -> None:
        """Goes on with what a checkpoint has.

        Arguments:
            values: Those of `own_values`.
            shown: The lists of the model, as `show` has shown them then.
        """
        shapes = (self._state_shapes()[:3], self._round_shapes())
        found = [values[name] for name in self._own_names()]
        replica, self._round = jax.tree.unflatten(jax.tree.structure(shapes), found)
        self._state = (*replica, [])
        self._shown = [[ref(value) for value in group] for group in shown[:3]]

    def _variables(self) -> list[list[Any]]:
        return variables_of(self._model, [()] * 4)[:3]

    def _own_names(self) -> list[str]:
        kinds = STATE_KINDS[4]
        names = [
            f"{kind}/{index}/{variable.path}"
            for kind, group in zip(kinds, self._variables(), strict=False)
            for index, variable in enumerate(group)
        ]
        names += ["round/steps", "round/samples"]
        if self._outer is not None:
            names += [f"anchor/{i}" for i in range(len(self._variables()[0]))]
            names += [f"outer/{i}" for i in range(len(self._outer.variables))]
        return [f"{OWN}/{name}" for name in names]

    def _program_for(self, batch: PlacedBatch) -> Any:
        return self._programs.on_batch(batch.size, *self._leaves_of(batch.arrays, 0))

    def _leaves_of(self, arrays: Any, num_stacks: int) -> Any:
        leaves, structure = jax.tree.flatten(arrays)
        own = self._place_of_shares(num_stacks)
        return tuple((x.shape, x.dtype, x.sharding == own) for x in leaves), structure

    def _place_of_shares(self, num_stacks: int) -> NamedSharding:
        spec = PartitionSpec(*(None,) * num_stacks, self._workers.axes)
        return NamedSharding(self._mesh, spec)

    def _place(self, data: Any, size: int, num_stacks: int) -> Any:
        rows = self._programs.shares(size).rows
        own, whole = self._place_of_shares(num_stacks), replicated(self._mesh)

        def put(array: Any) -> jax.Array:
            host = np.asarray(array)
            host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
            if host.shape[num_stacks : num_stacks + 1] != (size,):
                return put_whole(whole, host)
            stacks, dims = host.shape[:num_stacks], host.shape[num_stacks + 1 :]
            shape = (*stacks, *rows.shape, *dims)

            def shares_of(index: Any) -> Any:
                workers = rows[index[num_stacks]]
                return np.take(host, workers, axis=num_stacks)

            return jax.make_array_from_callback(shape, own, shares_of)

        return map_leaves(put, data)

    def _keep(self, arrays: Any) -> Any:
        whole = partial(put_whole, replicated(self._mesh))
        return arrays.placed(self._mesh, whole)

    def _dispatch(self, program: Any, size: int, state: Any, *data: Any) -> Any:
        if state is not self._state:
            self._take(state)
        given, round = self._state, self._round
        is_new = program not in self._dispatched
        self._dispatched.add(program)
        with telling_of_compiling(is_new):
            self._check.look(program, (given, round, *data), size)
            with explaining_exhaustion(self._what, size, self._plan.accumulate):
                logs, (self._state, self._round) = run_in_turn(
                    self._mesh, program, given, round, *data
                )
        return logs, self._kept.keep(self._state)

    def _take(self, state: Any) -> None:
        """Takes a model's state over, where it is not what was shown of the workers."""
        known = self._state if self._shown else None
        *lists, metrics = state
        own = []
        for number, values in enumerate(lists):
            kept: Any = [None] * len(values)
            if known is not None:
                pairs = zip(values, self._shown[number], known[number], strict=True)
                kept = [old if shown() is v else None for v, shown, old in pairs]
            own.append(self._spread_new(values, kept, is_others=number == 1))
        changed = known is None or any(
            shown() is not v for v, shown in zip(lists[0], self._shown[0], strict=True)
        )
        if self._round is None or changed:
            # Who gives the model other weights begins a round with them.
            self._round = self._begin_round(lists[0])
        self._state = (*own, [self._whole(value) for value in metrics])

    def _spread_new(
        self, values: list[Any], kept: list[Any], is_others: bool
    ) -> list[Any]:
        new = [i for i, old in enumerate(kept) if old is None]
        seeds = self._programs.are_seeds if is_others else [False] * len(values)
        given = [self._whole(values[i]) for i in new]
        if not new:
            return kept
        flags = tuple(seeds[i] for i in new)
        made = run_in_turn(self._mesh, self._spread, given, flags)
        found = dict(zip(new, made, strict=True))
        return [found.get(i, old) for i, old in enumerate(kept)]

    def _begin_round(self, weights: list[Any]) -> Round:
        # Copies: what a program is given is used up.
        copies = [jnp.copy(self._whole(w)) for w in weights] if self._outer else []
        slots = [jnp.copy(value) for value in self._outer_slots]
        samples = np.zeros(self._workers.number, np.float32)
        own = jax.make_array_from_callback(
            samples.shape, self._workers.own, samples.__getitem__
        )
        return Round(self._whole(np.int32(0)), own, copies, slots)

    def _whole(self, value: Any) -> jax.Array:
        where = replicated(self._mesh)
        if isinstance(value, jax.Array) and value.sharding == where:
            return value
        return put_whole(where, value)

    def _state_shapes(self) -> Any:
        *replica, metrics = self._programs.state_shapes()
        whole, number = replicated(self._mesh), self._workers.number

        def stacked(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype)
            return placed_shape(shape, self._workers.own)

        own = [[stacked(leaf) for leaf in group] for group in replica]
        return (*own, [placed_shape(leaf, whole) for leaf in metrics])

    def _round_shapes(self) -> Round:
        whole = replicated(self._mesh)
        anchor = self._programs.state_shapes()[0] if self._outer is not None else []
        return Round(
            jax.ShapeDtypeStruct((), np.int32, sharding=whole),
            jax.ShapeDtypeStruct(
                (self._workers.number,), np.float32, sharding=self._workers.own
            ),
            [placed_shape(leaf, whole) for leaf in anchor],
            [placed_shape(leaf, whole) for leaf in self._outer_slots],
        )


class LookingStep(MeshStep):
    """A step of `evaluate` or `predict`, on what the workers would agree on now.

    It leaves the workers as they are, whatever it does to other variables.
    """

    def __init__(self, model: Any, step: Any, plan: Plan, mesh: Mesh) -> None:
        super().__init__(model, step, plan, mesh)
        self._model = model
        self._given: Any = None

    def _lay_out(self, state: Any) -> tuple[Any, Shardings]:
        self._given = state
        return super()._lay_out(state)

    def _dispatch(self, program: Any, cut: Microbatches, state: Any, *rest: Any) -> Any:
        outputs, after = super()._dispatch(program, cut, state, *rest)
        training = getattr(self._model.train_function, "guarded", None)
        if isinstance(training, LocalStep):
            training.follow(self._given, after)
        self._given = None
        return outputs, after


def _built_for(model: Any, outer: Any) -> Any:
    """An outer optimizer of a model's own, like the one that was given."""
    if outer is None:
        return None
    own = type(outer).from_config(outer.get_config())
    own.build(model.trainable_variables)
    return own


def _variables_of(optimizer: Any) -> list[Any]:
    return [] if optimizer is None else list(optimizer.variables)


def _are(lists: Sequence[Any], state: Any) -> bool:
    """Whether lists hold the values of a state, not others like them."""
    mine, theirs = jax.tree.leaves(lists), jax.tree.leaves(state)
    return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))


def _share_of_first(leaf: Any, shares: Any) -> Any:
    array = np.asarray(leaf)
    has_samples = array.shape[:1] == (shares.size,)
    return array[: shares.larger] if has_samples else array


def _with_each(logs: Any, num_steps: int, of_each: bool) -> Any:
    if not of_each:
        return logs
    last, each = logs
    return Logs(last, each, num_steps)
