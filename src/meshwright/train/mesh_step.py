"""A Keras step that runs over a mesh."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from meshwright.cluster.channel import telling_of_compiling
from meshwright.data.resident import ArraysInMemory, Placeable, Shapes, Stretch
from meshwright.devices.containers import map_leaves
from meshwright.devices.memory import MemoryInUse, explaining_exhaustion
from meshwright.devices.start import user_line
from meshwright.devices.step import StepCheck, StepState, batch_size
from meshwright.errors import BatchWarning, StrategyError
from meshwright.parallel.batch import BatchSplit, PlacedBatch, PlacedStack
from meshwright.parallel.mesh import placed_shape, replicated
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.parallel.turns import run_in_turn
from meshwright.train.ahead import Ahead, finish_all
from meshwright.train.listeners import Logs
from meshwright.train.mesh_programs import MeshPrograms, Places, Shardings
from meshwright.train.stretches import put_whole
from meshwright.train.traced_step import TracedStep

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


class MeshStep:
    """Runs a step of Keras' (train, test or predict) over a mesh.

    The step stays the pure function that Keras made of the model; it is compiled for
    the mesh once per batch size, with the state laid out as the model's variables are.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: The devices.
        places: Where variables belong, if they have not been put there.
        skips: Whether training steps that lead to NaN are left out.
    """

    programs: type[MeshPrograms] = MeshPrograms
    """What makes its programs."""
    why_alone: str | None = None
    """Why its steps are dispatched one by one, if they always are."""

    def __init__(
        self,
        model: Any,
        step: Any,
        plan: Plan,
        mesh: Mesh,
        places: Places | None = None,
        skips: bool = False,
    ) -> None:
        if not hasattr(step, "lower"):
            raise StrategyError(
                f"{model.name!r} was compiled with run_eagerly=True or "
                "jit_compile=False.",
                "A step over a mesh is one compiled program.",
                "Compile the model without these, or train it without a strategy.",
            )
        self._programs = self.programs(model, step, plan, mesh, places, skips)
        self._plan = plan
        self._mesh = mesh
        self._what = f"{step.__name__} of {model.name!r}"
        self._check = StepCheck(model, step.__name__)
        self._state = StepState(model)
        self._newest: Any = None
        self._newest_shardings: Shardings = ()
        self._has_run = False
        self.giving_back = self._state.giving_back
        self._ahead = Ahead(self.measures_kernels)
        self._prepared: set[Any] = set()
        self._called: set[Any] = set()
        self._dispatched: set[Any] = set()
        self._compiling = threading.Lock()

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step on a batch of any size; returns what Keras' step does."""
        batch = data if isinstance(data, PlacedBatch) else self.put(data)
        cut = self._cut(batch.size)
        state, shardings = self._lay_out(state)
        program = self._programs.one_step(cut, shardings)
        return self._dispatch(program, cut, state, batch.arrays)

    def run_stretch(self, state: Any, stretch: Stretch, of_each: bool) -> Any:
        """Runs several steps on arrays; returns what the last of them does.

        Arguments:
            state: The state before them.
            stretch: The steps.
            of_each: Whether the logs of each of them are wanted, as `Logs`.
        """
        cut = self._cut(stretch.batches.size)
        state, shardings = self._lay_out(state)
        data, batches = self._keep(stretch.data), self._keep(stretch.batches)
        key = (cut, stretch.data.shapes, shardings)
        program = self._programs.over_arrays(*key, stretch.num_steps, of_each)
        with telling_of_compiling(is_new=program not in self._dispatched):
            if stretch.rest:
                self.prepare(stretch.data, stretch.rest, 1, 1, of_each)
            if self.measures_kernels:
                number, size = batches.shape
                self.prepare(stretch.data, size, number, stretch.num_steps, of_each)
                finish_all()
            self._ahead.finish(program)
            first = np.int32(stretch.first)
            logs, state = self._dispatch(program, cut, state, data, batches, first)
        return _with_each(logs, stretch.num_steps, of_each), state

    def run_placed(
        self, state: Any, batches: PlacedStack | PlacedBatch, of_each: bool
    ) -> Any:
        """Runs a step on each of the batches, as `run_stretch` does."""
        if isinstance(batches, PlacedBatch):
            return self(state, batches)
        cut = self._cut(batches.size)
        state, shardings = self._lay_out(state)
        shapes = Shapes.of(jax.tree.map(_first_of, batches.arrays))
        key = (cut, shapes, shardings)
        program = self._programs.over_stack(*key, batches.number, of_each)
        logs, state = self._dispatch(program, cut, state, batches.arrays)
        return _with_each(logs, batches.number, of_each), state

    @property
    def measures_kernels(self) -> bool:
        """Whether compiling runs kernels on the devices, to choose the fastest."""
        return bool(self._mesh.devices.flat[0].platform != "cpu")

    def work(self, data: ArraysInMemory, size: int) -> TracedStep:
        """What a step on a batch of `size` of these arrays does."""
        cut = self._cut(size)
        batch = self._programs.batch_shapes(cut, data.shapes)
        return self._programs.trace(cut, batch, self._all_shardings())

    def work_on(self, batch: Any) -> TracedStep:
        """What a step on a batch of the host does."""
        cut = self._cut(batch_size(batch))
        shapes = Shapes.of(self._cut_up(cut, map_leaves(np.asarray, batch)))
        return self._programs.trace(cut, shapes, self._all_shardings())

    def prepare(
        self,
        data: ArraysInMemory,
        size: int,
        num_batches: int,
        num_steps: int,
        of_each: bool,
    ) -> None:
        """Begins to compile what `run_stretch` will need, in a thread.

        Arguments:
            data: The arrays.
            size: Samples in a batch.
            num_batches: Batches of this size in an epoch.
            num_steps: Steps of the stretch.
            of_each: Whether the logs of each of them are wanted.
        """
        wanted = (data.shapes, size, num_batches, num_steps, of_each)
        if wanted in self._prepared:
            return
        self._prepared.add(wanted)
        shardings, whole = self._all_shardings(), replicated(self._mesh)
        key = (self._cut(size), data.shapes, shardings)
        program = self._programs.over_arrays(*key, num_steps, of_each)
        state = self._placed_state(shardings)
        rows = jax.ShapeDtypeStruct((num_batches, size), np.int32, sharding=whole)
        arrays = jax.tree.map(lambda leaf: placed_shape(leaf, whole), data.shapes.tree)
        self._ahead.start(program, state, arrays, rows, np.int32(0))

    def put(self, data: Any) -> PlacedBatch:
        """Moves a batch onto the mesh; other threads may do it ahead of the step.

        It is copied first: the step may read it later, when its source has used the
        same arrays for another one.
        """
        cut = self._cut(batch_size(data))
        parts = self._cut_up(cut, map_leaves(np.array, data))
        with self._compiling:
            return PlacedBatch(cut.size, self._place(cut, parts))

    def put_stack(self, stack: Any, size: int) -> PlacedStack:
        """Moves batches that are stacked along a first dim onto the mesh, like `put`.

        Arguments:
            stack: The batches.
            size: Samples in each.
        """
        cut = self._cut(size)
        parts = self._cut_up(cut, stack, 1)
        with self._compiling:
            placed = self._place(cut, parts, 1)
        return PlacedStack(size, len(jax.tree.leaves(placed)[0]), placed)

    def memory_in_use(self) -> MemoryInUse:
        """What the newest program takes on each device, by kind."""
        found = self._check.memory()
        return [] if found is None else [(self._mesh.devices.flat, found.by_kind())]

    def lower(self, state: Any, data: Any) -> Any:
        """The program for a batch like `data`, ready to be compiled and looked at."""
        batch = self.put(data)
        state, shardings = self._lay_out(state)
        program = self._programs.one_step(self._cut(batch.size), shardings)
        return program.lower(state, batch.arrays)

    def lower_shapes(self, batch: Any) -> Any:
        """Like `lower`, from the shapes of a batch; no value of the model is read."""
        cut = self._cut(batch_size(batch))
        parts = jax.eval_shape(partial(self._cut_up, cut), batch)
        shardings = self._all_shardings()
        program = self._programs.one_step(cut, shardings)
        return program.lower(
            self._placed_state(shardings), self._place(cut, parts, of_shapes=True)
        )

    def _placed_state(self, shardings: Shardings) -> Any:
        places = tuple(list(group) for group in shardings)
        return jax.tree.map(placed_shape, self._programs.state_shapes(), places)

    def _cut(self, size: int) -> Microbatches:
        return Microbatches(size, self._plan.accumulate if self._programs.trains else 1)

    def _cut_up(self, cut: Microbatches, batch: Any, num_stacks: int = 0) -> Any:
        """A batch in the form that steps take it: whole, or as microbatches."""
        return batch if cut.wanted == 1 else cut.cut(batch, num_stacks)

    def _place(
        self,
        cut: Microbatches,
        parts: Any,
        num_stacks: int = 0,
        of_shapes: bool = False,
    ) -> Any:
        put = BatchSplit.put_shapes if of_shapes else BatchSplit.put
        if cut.wanted == 1:
            return put(BatchSplit(cut.size, self._mesh), parts, num_stacks)
        groups = zip(self._splits(cut), parts, strict=True)
        return tuple(put(split, part, num_stacks + 1) for split, part in groups)

    def _splits(self, cut: Microbatches) -> tuple[BatchSplit, BatchSplit]:
        """Those of the larger and of the smaller microbatches."""
        return BatchSplit(cut.larger, self._mesh), BatchSplit(cut.smaller, self._mesh)

    def _keep(self, arrays: Placeable) -> Any:
        whole = partial(put_whole, replicated(self._mesh))
        return arrays.placed(self._mesh, whole)

    def _dispatch(self, program: Any, cut: Microbatches, state: Any, *rest: Any) -> Any:
        self._warn_of_idle_devices(cut)
        is_new = program not in self._dispatched
        self._dispatched.add(program)
        if is_new:
            self._check.remember(program, (state, *rest))
        with telling_of_compiling(is_new), self._alone_if_new(program, rest):
            self._check.look(program, (state, *rest), cut.size)
            with explaining_exhaustion(self._what, cut.size, self._plan.accumulate):
                outputs, state = run_in_turn(self._mesh, program, state, *rest)
        self._newest = state
        return outputs, self._state.keep(state)

    @contextmanager
    def _alone_if_new(self, program: Any, data: Any) -> Iterator[None]:
        """Keeps batches from being put while kernels of a program are tried out.

        They would come to lie between the arrays of the trials, and there would be no
        piece left that is large enough for the temporaries of the step.
        """
        if not self.measures_kernels:
            yield
            return
        key = (program, tuple((x.shape, x.dtype) for x in jax.tree.leaves(data)))
        with nullcontext() if key in self._called else self._compiling:
            yield
        self._called.add(key)

    def _warn_of_idle_devices(self, cut: Microbatches) -> None:
        """Says once that training batches do not divide, or are too small for the mesh.

        A tail is no reason to.
        """
        if self._has_run or not self._programs.trains:
            return
        self._has_run = True
        uneven = [s for s in self._splits(cut) if s.num_replicas > s.pieces]
        if uneven:
            split = uneven[0]
            wanted = split.num_replicas * cut.wanted
            below = max(cut.size // wanted, 1) * wanted
            what = "global batch" if cut.wanted == 1 else "microbatch"
            cut_up = f"is split into {split.pieces} equal pieces"
            if split.pieces == 1:
                cut_up = "cannot be split into equal pieces"
            file, line = user_line() or ("<unknown>", 1)
            warnings.warn_explicit(
                f"A {what} of {split.size} {cut_up}, although the mesh could compute "
                f"{split.num_replicas} at a time. The result is exact; a global batch "
                f"of {below} or {below + wanted} would use every device.",
                BatchWarning,
                file,
                line,
            )

    def _lay_out(self, state: Any) -> tuple[Any, Shardings]:
        """The state as it lies on the mesh; what a step has put out does already."""
        if state is self._newest:
            return state, self._newest_shardings
        self._newest_shardings = shardings = self._programs.shardings(len(state))
        laid_out = tuple(
            [_put(v, s) for v, s in zip(values, group, strict=True)]
            for values, group in zip(state, shardings, strict=True)
        )
        return laid_out, shardings

    def _all_shardings(self) -> Shardings:
        return self._programs.shardings(self._programs.num_lists)


def _with_each(logs: Any, num_steps: int, of_each: bool) -> Any:
    if not of_each:
        return logs
    last, each = logs
    return Logs(last, each, num_steps)


def _first_of(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def _put(value: Any, where: NamedSharding) -> Any:
    # Asking first takes a tenth of the time that JAX takes to find nothing to do.
    is_there = isinstance(value, jax.Array) and value.sharding == where
    return value if is_there else jax.device_put(value, where)


def as_keras_takes_them(arrays: Any) -> Any:
    """Arrays as Keras' `fit` would pass them on: floats in Keras' own precision."""
    import keras

    def convert(array: Any) -> Any:
        host = np.asarray(array)
        return host.astype(keras.config.floatx()) if host.dtype.kind == "f" else host

    return jax.tree.map(convert, arrays)


def training_state(model: Any, batch: Any) -> Any:
    """The state of a training step of Keras', with all variables made."""
    model._symbolic_build(data_batch=batch)
    return model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
