"""Trains a model for a few steps, and gives it back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.runtime import to_host
from meshwright.models.precision import keeping_precision, set_precision
from meshwright.strategies.attach import attached, place, step_over_mesh
from meshwright.strategies.strategy import Strategy
from meshwright.train.mesh_step import training_state
from meshwright.train.stage_cut import StageCut

import jax

State = list[list[Any]]
"""Values on the host, in the lists of a training step's state."""


@contextmanager
def borrowed(model: Any, batch: Any, precision: str | None) -> Iterator[State]:
    """The state of a model to train from; afterwards the model is as it was before.

    Like `evaluate`, it builds the model's metrics.

    Arguments:
        model: A compiled model.
        batch: A batch, by which it builds what is not built yet.
        precision: What its layers compute in inside; None leaves that as it is.
    """
    install_keras_hooks()
    training_state(model, batch)
    before = attached(model)
    try:
        with keeping_precision(model):
            set_precision(model, precision)
            state = training_state(model, batch)
            start = [[to_host(value) for value in group] for group in state]
            try:
                yield start
            finally:
                _restore(model, start)
    finally:
        # `Auto` places a model when it has chosen.
        if before is not None and not before.is_open:
            place(model, before)


def borrowed_step(model: Any, strategy: Strategy) -> Any:
    """The training step of a borrowed model under a strategy."""
    train_step = jax.jit(model.train_step)
    if strategy.plan.stages == 1:
        return strategy.make_step(model, train_step)
    place(model, strategy)
    cut = StageCut(model.name, strategy.plan)
    return step_over_mesh(model, train_step, strategy, cut)


def _restore(model: Any, start: State) -> None:
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    for variables, values in zip(groups, start, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable._layout = None
            variable._value = None
            variable.assign(value)
