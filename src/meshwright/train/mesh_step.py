"""A Keras step as one program over a mesh."""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from meshwright.devices.scope import passing_casts_through, passing_outputs_through
from meshwright.devices.start import user_line
from meshwright.devices.step import (
    StepCheck,
    StepState,
    batch_size,
    variables_of,
)
from meshwright.errors import BatchWarning, StrategyError
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.mesh import gathered, replicated

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

Shardings = tuple[tuple[NamedSharding, ...], ...]
"""The placements of a step's state, list by list."""

TRAIN_STATES = 4
"""Lists in the state of Keras' training step: weights, others, optimizer, metrics."""

PREDICT_STATES = 2
"""Lists in the state of Keras' predict step: weights and others."""


class MeshStep:
    """Runs a step of Keras' (train, test or predict) over a mesh.

    The step stays the pure function that Keras made of the model; it is compiled for
    the mesh once per batch size, with the state laid out as the model's variables are.
    """

    def __init__(self, model: Any, step: Any, mesh: Mesh) -> None:
        if not hasattr(step, "lower"):
            raise StrategyError(
                f"{model.name!r} was compiled with run_eagerly=True or "
                "jit_compile=False.",
                "A step over a mesh is one compiled program.",
                "Compile the model without these, or train it without a strategy.",
            )
        self._model = model
        self._function: Callable[[Any, Any], Any] = step.__wrapped__
        self._mesh = mesh
        self._check = StepCheck(model, step.__name__)
        self._state = StepState(model)
        self._newest: Any = None
        self._has_run = False
        self.giving_back = self._state.giving_back
        self._program = cache(self._make_program)

    def __call__(self, state: Any, data: Any) -> Any:
        """Runs one step on a batch of any size; returns what Keras' step does."""
        split = BatchSplit(batch_size(data), self._mesh)
        self._warn_of_idle_devices(split, len(state))
        state = self._lay_out(state)
        batch = split.put(data)
        program = self._program(split, self._shardings(len(state)))
        self._check.look(program, state, batch, split.size)
        outputs, state = program(state, batch)
        self._newest = state
        return outputs, self._state.keep(state)

    def lower(self, state: Any, data: Any) -> Any:
        """The program for a batch like `data`, ready to be compiled and looked at."""
        split = BatchSplit(batch_size(data), self._mesh)
        program = self._program(split, self._shardings(len(state)))
        return program.lower(self._lay_out(state), split.put(data))

    def _warn_of_idle_devices(self, split: BatchSplit, num_lists: int) -> None:
        """Says once that training batches do not divide; a tail is no reason to."""
        is_first, self._has_run = not self._has_run, True
        is_uneven = split.size > split.num_replicas > split.pieces
        if is_first and is_uneven and num_lists == TRAIN_STATES:
            wanted = split.num_replicas
            below = split.size // wanted * wanted
            file, line = user_line() or ("<unknown>", 1)
            warnings.warn_explicit(
                f"A global batch of {split.size} is split into {split.pieces} equal "
                f"pieces, although the mesh could compute {wanted} at a time. The "
                f"result is exact; a batch of {below} or {below + wanted} would use "
                "every device.",
                BatchWarning,
                file,
                line,
            )

    def _lay_out(self, state: Any) -> Any:
        if state is self._newest:
            return state
        return tuple(
            [jax.device_put(v, s) for v, s in zip(values, group, strict=True)]
            for values, group in zip(state, self._shardings(len(state)), strict=True)
        )

    def _shardings(self, num_lists: int) -> Shardings:
        whole = replicated(self._mesh)
        variables = variables_of(self._model, [()] * num_lists)
        return tuple(tuple(v._layout or whole for v in group) for group in variables)

    def _keep_gathered(self, variable: Any, value: Any) -> Any:
        place = variable._layout or replicated(self._mesh)
        return jax.lax.with_sharding_constraint(value, gathered(place))

    def _make_program(self, split: BatchSplit, shardings: Shardings) -> Any:
        predicts = len(shardings) == PREDICT_STATES
        in_use = [[gathered(place) for place in group] for group in shardings[:2]]

        def step(state: Any, batch: Any) -> Any:
            # Weights are gathered before use instead of leaving it to the compiler:
            # XLA was seen to compute wrong gradients with three axes in play. In mixed
            # precision the same holds for what they are cast to.
            weights = jax.lax.with_sharding_constraint(list(state[:2]), in_use)
            with (
                passing_outputs_through(split.keep),
                passing_casts_through(self._keep_gathered),
            ):
                outputs, state = self._function((*weights, *state[2:]), batch)
            return outputs, state

        logs = None if predicts else replicated(self._mesh)
        out = tuple(list(group) for group in shardings)
        return jax.jit(step, donate_argnums=0, out_shardings=(logs, out))


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
