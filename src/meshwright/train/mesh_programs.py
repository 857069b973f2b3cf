"""The programs that a Keras step becomes on a mesh."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

from meshwright.data.resident import Shapes
from meshwright.devices.step import variables_of
from meshwright.devices.strategy_hooks import (
    TraceHooks,
    replacing_forward_pass,
    tracing,
)
from meshwright.models.formulations import compiler_options, in_best_form
from meshwright.models.forward import in_blocks
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.mesh import gathered, on_devices, replicated
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.train.accumulation import accumulated_step
from meshwright.train.pure_step import pure
from meshwright.train.skipping import keep_finite
from meshwright.train.stretches import SMALL_STEP_FLOPS, run_steps, take_batch
from meshwright.train.traced_step import TracedStep

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Shardings = tuple[tuple[NamedSharding, ...], ...]
"""The placements of a step's state, list by list."""

Places = Mapping[int, NamedSharding]
"""Where variables belong, by their `id`; others are whole on every device."""

PREDICT_STATES, TEST_STATES, TRAIN_STATES = 2, 3, 4
"""Lists in the states of Keras' steps: weights, others, optimizer, metrics."""


FETCHED_IN_TURN = {"xla_gpu_enable_latency_hiding_scheduler": False}
"""What XLA is told when state comes from the host.

It would fetch all of it at the beginning, to hide how long that takes, and a step would
need more memory than with the state on the device. Like this, the state of a variable
comes when the variable is updated.
"""


class MeshPrograms:
    """Makes functions under `jax.jit` of a step of Keras', each once.

    All of them take the state first, give it back with the same placements, and
    return what Keras' step does.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: The devices.
        places: Where variables belong, by their `id`; if left out, each knows itself.
        skips: Whether training steps that lead to NaN are left out.

    Attributes:
        trains: Whether the step is that of `fit`.
        one_step: `(cut, shardings)`: a step on a batch, of any shapes.
        over_arrays: `(cut, arrays, shardings, num_steps, of_each)`: steps on arrays
            that are whole on every device, rows of indices, and the first row.
        over_stack: `(cut, batch, shardings, num_steps, of_each)`: steps on batches that
            are stacked along a first dim.
        trace: `(cut, batch, shardings)`: the step on a batch of these shapes.
    """

    def __init__(
        self,
        model: Any,
        step: Any,
        plan: Plan,
        mesh: Mesh,
        places: Places | None = None,
        skips: bool = False,
    ) -> None:
        self.trains = step.__name__ == "train_step"
        self._skips = skips and self.trains
        self._offloads = plan.offload and self.trains
        self._model = model
        self._function = pure(model, step.__name__, step.__wrapped__)
        self._plan = plan
        self._mesh = mesh
        self._places = places
        self.one_step = cache(self._one_step)
        self.over_arrays = cache(self._over_arrays)
        self.over_stack = cache(self._over_stack)
        self.trace = cache(self._trace)

    @property
    def num_lists(self) -> int:
        """Lists in the state of a step that runs in stretches."""
        return TRAIN_STATES if self.trains else TEST_STATES

    def shardings(self, num_lists: int) -> Shardings:
        """Where the state belongs."""
        variables = variables_of(self._model, [()] * num_lists)
        return tuple(tuple(map(self._place, group)) for group in variables)

    def _place(self, variable: Any) -> NamedSharding:
        whole = replicated(self._mesh)
        if self._places is not None:
            return self._places.get(id(variable), whole)
        return variable._layout or whole

    def state_shapes(self) -> Any:
        """The shapes and types of the state."""
        variables = variables_of(self._model, [()] * self.num_lists)
        return tuple([_shape_of(v) for v in group] for group in variables)

    def batch_shapes(self, cut: Microbatches, arrays: Shapes) -> Shapes:
        """Those of a batch that is taken from arrays."""
        row = jax.ShapeDtypeStruct((cut.size,), np.int32)
        take = partial(take_batch, cut, self._mesh)
        return Shapes.of(jax.eval_shape(take, arrays.tree, row))

    def _one_step(self, cut: Microbatches, shardings: Shardings) -> Any:
        step = self._step_function(cut, shardings)

        def run(state: Any, batch: Any) -> Any:
            # The compiler knows arguments by these names, see `StepMemory.of`.
            return step(state, batch)

        return self._compile_later(run, shardings)

    def _trace(
        self, cut: Microbatches, batch: Shapes, shardings: Shardings
    ) -> TracedStep:
        step = self._step_function(cut, shardings)
        return TracedStep.of(step, self.state_shapes(), batch.tree)

    def _over_arrays(
        self,
        cut: Microbatches,
        arrays: Shapes,
        shardings: Shardings,
        num_steps: int,
        of_each: bool,
    ) -> Any:
        step = self.trace(cut, self.batch_shapes(cut, arrays), shardings)

        def pick(number: Any, arrays: Any, batches: Any, first: Any) -> Any:
            return take_batch(cut, self._mesh, arrays, batches[first + number])

        return self._loop(step, pick, shardings, num_steps, of_each)

    def _over_stack(
        self,
        cut: Microbatches,
        batch: Shapes,
        shardings: Shardings,
        num_steps: int,
        of_each: bool,
    ) -> Any:
        step = self.trace(cut, batch, shardings)

        def pick(number: Any, stack: Any) -> Any:
            return jax.tree.map(lambda array: array[number], stack)

        return self._loop(step, pick, shardings, num_steps, of_each)

    def _loop(
        self,
        step: TracedStep,
        pick: Callable[..., Any],
        shardings: Shardings,
        num_steps: int,
        of_each: bool,
    ) -> Any:
        """Several steps; `pick` gets a batch from its number and the arguments."""
        places = self._on_devices(shardings)
        unrolls = step.flops <= SMALL_STEP_FLOPS

        def run(state: Any, *data: Any) -> Any:
            def one(state: Any, number: Any) -> Any:
                logs, state = step(state, pick(number, *data))
                state = jax.lax.with_sharding_constraint(list(state), places)
                return tuple(state), logs

            logs = step.logs
            return run_steps(
                one, state, num_steps, logs, unrolls=unrolls, of_each=of_each
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
            remat = self._plan.remat and self.trains
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
        return jax.jit(
            self._fetching(run, shardings),
            donate_argnums=0,
            out_shardings=(logs, out),
            compiler_options=self._options(),
        )

    def _options(self) -> dict[str, Any] | None:
        is_fetched = self._offloads and self._mesh.devices.flat[0].platform == "gpu"
        return FETCHED_IN_TURN if is_fetched else compiler_options(self._mesh)

    def _fetching(
        self, run: Callable[..., Any], shardings: Shardings
    ) -> Callable[..., Any]:
        """The same function, for a state of which a part is in the host's memory."""
        if not self._offloads:
            return run
        places = tuple(self._on_devices(shardings))

        def fetch_and_run(state: Any, *data: Any) -> Any:
            return run(jax.device_put(state, places), *data)

        return fetch_and_run

    def _on_devices(self, shardings: Shardings) -> list[list[NamedSharding]]:
        """Where the state is while a step runs."""
        if not self._offloads:
            return [list(group) for group in shardings]
        return [list(map(on_devices, group)) for group in shardings]

    def _in_blocks(self, gather: Callable[[Any], Any]) -> AbstractContextManager[None]:
        return replacing_forward_pass(self._model, in_blocks(gather))

    def _run(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        logs, after = self._run_any(cut, state, batch)
        return logs, keep_finite(logs, state, after) if self._skips else after

    def _run_any(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        if cut.wanted > 1:
            return accumulated_step(self._model, state, batch, self._keeping)
        with self._keeping(cut.size):
            return self._function(state, batch)

    def _keeping(self, size: int) -> AbstractContextManager[None]:
        """Keeps what layers put out split by sample, and weights as they were."""
        split = BatchSplit(size, self._mesh)
        keep, number = self._keep_gathered, self._mesh.size
        return tracing(TraceHooks(split.keep, keep, split.apply, number))

    def _keep_gathered(self, variable: Any, value: Any) -> Any:
        place = gathered(self._place(variable))
        return jax.lax.with_sharding_constraint(value, place)


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    # Keras takes the values away while `fit` runs.
    held = variable if variable._value is None else variable._value
    return jax.ShapeDtypeStruct(tuple(held.shape), held.dtype)
