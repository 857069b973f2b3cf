"""A Keras step as one program over a mesh."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

from meshwright.data.resident import ArraysInMemory, Placeable, Shapes, Stretch
from meshwright.devices.start import user_line
from meshwright.devices.step import (
    StepCheck,
    StepState,
    batch_size,
    variables_of,
)
from meshwright.devices.strategy_hooks import (
    TraceHooks,
    replacing_forward_pass,
    tracing,
)
from meshwright.errors import BatchWarning, StrategyError
from meshwright.models.forward import in_blocks
from meshwright.parallel.batch import BatchSplit, PlacedBatch
from meshwright.parallel.mesh import gathered, replicated
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.parallel.turns import run_in_turn
from meshwright.train.accumulation import accumulated_step
from meshwright.train.ahead import Ahead, finish_all
from meshwright.train.formulations import compiler_options, in_best_form
from meshwright.train.listeners import Logs
from meshwright.train.pure_step import pure
from meshwright.train.stretches import (
    SMALL_STEP_FLOPS,
    put_whole,
    run_steps,
    take_batch,
)
from meshwright.train.traced_step import TracedStep

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Shardings = tuple[tuple[NamedSharding, ...], ...]
"""The placements of a step's state, list by list."""

PREDICT_STATES, TEST_STATES, TRAIN_STATES = 2, 3, 4
"""Lists in the states of Keras' steps: weights, others, optimizer, metrics."""


class MeshStep:
    """Runs a step of Keras' (train, test or predict) over a mesh.

    The step stays the pure function that Keras made of the model; it is compiled for
    the mesh once per batch size, with the state laid out as the model's variables are.
    """

    def __init__(self, model: Any, step: Any, plan: Plan, mesh: Mesh) -> None:
        if not hasattr(step, "lower"):
            raise StrategyError(
                f"{model.name!r} was compiled with run_eagerly=True or "
                "jit_compile=False.",
                "A step over a mesh is one compiled program.",
                "Compile the model without these, or train it without a strategy.",
            )
        self._model = model
        self._function = pure(model, step.__name__, step.__wrapped__)
        self._trains = step.__name__ == "train_step"
        self._plan = plan
        self._mesh = mesh
        self._check = StepCheck(model, step.__name__)
        self._state = StepState(model)
        self._newest: Any = None
        self._newest_shardings: Shardings = ()
        self._has_run = False
        self.giving_back = self._state.giving_back
        self._program = cache(self._make_program)
        self._ahead = Ahead()
        self._prepared: set[Any] = set()
        self._trace = cache(self._make_trace)
        self._stretch_program = cache(self._make_stretch_program)

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step on a batch of any size; returns what Keras' step does."""
        batch = data if isinstance(data, PlacedBatch) else self.put(data)
        cut = self._cut(batch.size)
        self._warn_of_idle_devices(cut)
        state, shardings = self._lay_out(state)
        program = self._program(cut, shardings)
        return self._dispatch(program, cut, state, batch.arrays)

    def run_stretch(self, state: Any, stretch: Stretch, of_each: bool) -> Any:
        """Runs several steps; returns what the last of them does.

        Arguments:
            state: The state before them.
            stretch: The steps.
            of_each: Whether the logs of each of them are wanted, as `Logs`.
        """
        cut = self._cut(stretch.batches.size)
        self._warn_of_idle_devices(cut)
        state, shardings = self._lay_out(state)
        data, batches = self._keep(stretch.data), self._keep(stretch.batches)
        key = (cut, stretch.data.shapes, shardings)
        program = self._stretch_program(*key, stretch.num_steps, of_each)
        if stretch.rest:
            self.prepare(stretch.data, stretch.rest, 1, 1, of_each)
        if self.measures_kernels:
            number, size = batches.shape
            self.prepare(stretch.data, size, number, stretch.num_steps, of_each)
            finish_all()
        self._ahead.finish(program)
        first = np.int32(stretch.first)
        logs, state = self._dispatch(program, cut, state, data, batches, first)
        if of_each:
            last, each = logs
            logs = Logs(last, each, stretch.num_steps)
        return logs, state

    @property
    def measures_kernels(self) -> bool:
        """Whether compiling runs kernels on the devices, to choose the fastest."""
        return bool(self._mesh.devices.flat[0].platform != "cpu")

    def work(self, data: ArraysInMemory, size: int) -> TracedStep:
        """What a step on a batch of `size` of these arrays does."""
        return self._trace(self._cut(size), data.shapes, self._all_shardings())

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
        program = self._stretch_program(*key, num_steps, of_each)
        places = tuple(list(group) for group in shardings)
        state = jax.tree.map(_placed_shape, self._state_shapes(), places)
        rows = jax.ShapeDtypeStruct((num_batches, size), np.int32, sharding=whole)
        arrays = jax.tree.map(lambda leaf: _placed_shape(leaf, whole), data.shapes.tree)
        self._ahead.start(program, state, arrays, rows, np.int32(0))

    def _keep(self, arrays: Placeable) -> Any:
        whole = partial(put_whole, replicated(self._mesh))
        return arrays.placed(self._mesh, whole)

    def _dispatch(self, program: Any, cut: Microbatches, state: Any, *rest: Any) -> Any:
        self._check.look(program, (state, *rest), cut.size)
        outputs, state = run_in_turn(self._mesh, program, state, *rest)
        self._newest = state
        return outputs, self._state.keep(state)

    def put(self, data: Any) -> PlacedBatch:
        """Moves a batch onto the mesh; other threads may do it ahead of the step."""
        cut = self._cut(batch_size(data))
        if cut.wanted == 1:
            return PlacedBatch(cut.size, BatchSplit(cut.size, self._mesh).put(data))
        equal, last = cut.cut(data)
        first = BatchSplit(cut.each, self._mesh).put(equal, is_stacked=True)
        rest = None if last is None else BatchSplit(cut.last, self._mesh).put(last)
        return PlacedBatch(cut.size, (first, rest))

    def lower(self, state: Any, data: Any) -> Any:
        """The program for a batch like `data`, ready to be compiled and looked at."""
        batch = self.put(data)
        state, shardings = self._lay_out(state)
        program = self._program(self._cut(batch.size), shardings)
        return program.lower(state, batch.arrays)

    def _cut(self, size: int) -> Microbatches:
        return Microbatches(size, self._plan.accumulate if self._trains else 1)

    def _warn_of_idle_devices(self, cut: Microbatches) -> None:
        """Says once that training batches do not divide; a tail is no reason to."""
        is_first, self._has_run = not self._has_run, True
        split = BatchSplit(cut.each, self._mesh)
        is_uneven = split.size > split.num_replicas > split.pieces
        if is_first and is_uneven and self._trains:
            wanted = split.num_replicas * cut.wanted
            below = max(cut.size // wanted, 1) * wanted
            what = "global batch" if cut.wanted == 1 else "microbatch"
            file, line = user_line() or ("<unknown>", 1)
            warnings.warn_explicit(
                f"A {what} of {split.size} is split into {split.pieces} equal "
                f"pieces, although the mesh could compute {split.num_replicas} at a "
                f"time. The result is exact; a global batch of {below} or "
                f"{below + wanted} would use every device.",
                BatchWarning,
                file,
                line,
            )

    def _lay_out(self, state: Any) -> tuple[Any, Shardings]:
        """The state as it lies on the mesh; what a step has put out does already."""
        if state is self._newest:
            return state, self._newest_shardings
        self._newest_shardings = shardings = self._shardings(len(state))
        laid_out = tuple(
            [_put(v, s) for v, s in zip(values, group, strict=True)]
            for values, group in zip(state, shardings, strict=True)
        )
        return laid_out, shardings

    def _state_shapes(self) -> Any:
        variables = variables_of(self._model, [()] * self._num_lists)
        return tuple([_shape_of(v) for v in group] for group in variables)

    def _all_shardings(self) -> Shardings:
        return self._shardings(self._num_lists)

    @property
    def _num_lists(self) -> int:
        return TRAIN_STATES if self._trains else TEST_STATES

    def _shardings(self, num_lists: int) -> Shardings:
        whole = replicated(self._mesh)
        variables = variables_of(self._model, [()] * num_lists)
        return tuple(tuple(v._layout or whole for v in group) for group in variables)

    def _keep_gathered(self, variable: Any, value: Any) -> Any:
        place = variable._layout or replicated(self._mesh)
        return jax.lax.with_sharding_constraint(value, gathered(place))

    def _make_program(self, cut: Microbatches, shardings: Shardings) -> Any:
        step = self._step_function(cut, shardings)
        return self._compile_later(step, shardings)

    def _make_trace(
        self, cut: Microbatches, data: Shapes, shardings: Shardings
    ) -> TracedStep:
        state = self._state_shapes()
        row = jax.ShapeDtypeStruct((cut.size,), np.int32)
        batch = jax.eval_shape(partial(take_batch, cut, self._mesh), data.tree, row)
        return TracedStep.of(self._step_function(cut, shardings), state, batch)

    def _make_stretch_program(
        self,
        cut: Microbatches,
        data: Shapes,
        shardings: Shardings,
        num_steps: int,
        of_each: bool,
    ) -> Any:
        step = self._trace(cut, data, shardings)
        out = [list(group) for group in shardings]

        def run(state: Any, data: Any, batches: Any, first: Any) -> Any:
            def one(state: Any, row: Any) -> Any:
                batch = take_batch(cut, self._mesh, data, batches[row])
                logs, state = step(state, batch)
                return tuple(jax.lax.with_sharding_constraint(list(state), out)), logs

            unrolls = step.flops <= SMALL_STEP_FLOPS
            return run_steps(
                one,
                state,
                first,
                num_steps,
                step.logs,
                unrolls=unrolls,
                of_each=of_each,
            )

        return self._compile_later(run, shardings)

    def _step_function(
        self, cut: Microbatches, shardings: Shardings
    ) -> Callable[[Any, Any], Any]:
        in_use = [[gathered(place) for place in group] for group in shardings[:2]]

        def gather(weights: Any) -> Any:
            # Weights are gathered before use instead of leaving it to the compiler:
            # XLA was seen to compute wrong gradients with three axes in play. In mixed
            # precision the same holds for what they are cast to.
            return jax.lax.with_sharding_constraint(weights, in_use)

        def step(state: Any, batch: Any) -> Any:
            remat = self._plan.remat and self._trains
            weights = list(state[:2]) if remat else gather(list(state[:2]))
            with self._in_blocks(gather) if remat else nullcontext():
                return self._run(cut, (*weights, *state[2:]), batch)

        return in_best_form(step, self._mesh)

    def _compile_later(self, run: Callable[..., Any], shardings: Shardings) -> Any:
        predicts = len(shardings) == PREDICT_STATES
        # Every process reads the outputs, so they are whole if there are several.
        is_alone = not self._mesh.is_multi_process
        logs = None if predicts and is_alone else replicated(self._mesh)
        out = tuple(list(group) for group in shardings)
        options = compiler_options(self._mesh)
        return jax.jit(
            run,
            donate_argnums=0,
            out_shardings=(logs, out),
            compiler_options=options,
        )

    def _in_blocks(self, gather: Callable[[Any], Any]) -> AbstractContextManager[None]:
        return replacing_forward_pass(self._model, in_blocks(gather))

    def _run(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        if cut.wanted > 1:
            return accumulated_step(self._model, state, batch, self._keeping)
        with self._keeping(cut.size):
            return self._function(state, batch)

    def _keeping(self, size: int) -> AbstractContextManager[None]:
        """Keeps what layers put out split by sample, and weights as they were."""
        split = BatchSplit(size, self._mesh)
        return tracing(TraceHooks(split.keep, self._keep_gathered, split.apply))


def _placed_shape(shape: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)


def _put(value: Any, where: NamedSharding) -> Any:
    # Asking first takes a tenth of the time that JAX takes to find nothing to do.
    is_there = isinstance(value, jax.Array) and value.sharding == where
    return value if is_there else jax.device_put(value, where)


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    # Keras takes the values away while `fit` runs.
    held = variable if variable._value is None else variable._value
    return jax.ShapeDtypeStruct(tuple(held.shape), held.dtype)


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
