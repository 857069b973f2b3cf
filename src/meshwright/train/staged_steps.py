"""Keras' steps, traced so that they can be cut into pieces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import mask_of
from meshwright.models.forward import flatten
from meshwright.models.stages import Input, Role, StagedProgram
from meshwright.train.accumulation import forward_pass, refuse_without_samples

import jax
from jax.extend.core import Literal

TRAIN: tuple[Role, ...] = ("weight", "state", "shared", "metric")
TEST: tuple[Role, ...] = ("weight", "state", "metric")
PREDICT: tuple[Role, ...] = ("weight", "state")
ROLES = {len(roles): roles for roles in (TRAIN, TEST, PREDICT)}
"""Of the lists in the states of Keras' steps, by the number of lists."""


@dataclass(frozen=True)
class StagedStep:
    """A step as operations, and what becomes of its outputs.

    Attributes:
        staged: The operations.
        starts: The structure of what gradients start from; these outputs come first.
        logs: The structure of what it returns besides these and the state.
    """

    staged: StagedProgram
    starts: Any
    logs: Any

    @property
    def first(self) -> int:
        """The number of the first output that is a log."""
        return int(self.starts.num_leaves)

    def passed_on(self) -> dict[int, Any]:
        """Outputs that no operation makes: inputs by number, or constants."""
        jaxpr = self.staged.program.jaxpr
        numbers: dict[Any, Any] = {v: ("input", n) for n, v in enumerate(jaxpr.invars)}
        found: dict[int, Any] = {}
        constants = dict(zip(jaxpr.constvars, self.staged.program.consts, strict=True))
        for number, v in enumerate(jaxpr.outvars):
            if isinstance(v, Literal):
                found[number] = ("constant", v.val)
            elif v in constants:
                found[number] = ("constant", constants[v])
            elif v in numbers:
                found[number] = numbers[v]
        return found


def trace_step(
    function: Callable[..., Any],
    roles: tuple[Role, ...],
    returned: tuple[Role, ...],
    state: Any,
    batch: Any,
) -> StagedStep:
    """Traces a function of state and batch.

    Arguments:
        function: Returns what gradients start from, logs, and new lists of the state.
        roles: Of the lists of the state.
        returned: The roles of the lists that it returns.
        state: The shapes and types of the lists.
        batch: Those of the batch.
    """
    program, outputs = jax.make_jaxpr(function, return_shape=True)(state, batch)
    inputs = [
        Input(role, i)
        for role, values in zip(roles, state, strict=True)
        for i in range(len(values))
    ]
    numbers = {each: number for number, each in enumerate(inputs)}
    inputs += [Input("data", i) for i in range(len(jax.tree.leaves(batch)))]
    starts, logs, lists = outputs
    updates: list[int | None] = [None] * len(jax.tree.leaves((starts, logs)))
    for role, values in zip(returned, lists, strict=True):
        updates += [numbers[Input(role, i)] for i in range(len(values))]
    first = tuple(range(len(jax.tree.leaves(starts))))
    staged = StagedProgram(program, tuple(inputs), tuple(updates), first)
    return StagedStep(staged, *map(jax.tree.structure, (starts, logs)))


def training_of(model: Any) -> Callable[..., Any]:
    """The forward pass of a training step on a microbatch, with loss and metrics."""
    import keras

    def run(state: Any, batch: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        loss, aux = model.compute_loss_and_updates(
            weights,
            others,
            metrics,
            x,
            y,
            sample_weight,
            training=True,
            optimizer_variables=slots,
        )
        unscaled, outputs, others, metrics = aux
        # Metrics have no gradients, and in Keras' own step they see no masks.
        seen = map_leaves(jax.lax.stop_gradient, outputs)
        logs, metrics = model._update_metrics_variables(
            metrics, unscaled, x, y, seen, sample_weight
        )
        return loss, logs, (others, metrics)

    return run


class OutputsOf:
    """The forward pass of a training step without its loss.

    Attributes:
        template: How its outputs are put together; known when it was traced.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.template: Any = None

    def __call__(self, state: Any, batch: Any) -> Any:
        """Returns outputs and losses of layers, masks, and the model's new state."""
        import keras

        weights, others, *_ = state
        inputs, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs, others, losses = forward_pass(self._model, weights, others, inputs)
        flat, self.template = flatten(outputs)
        size = next(leaf.shape[0] for leaf in jax.tree.leaves(inputs) if leaf.ndim)
        refuse_without_samples(self._model, flat, size, "microbatches")
        return (flat, losses), [mask_of(tensor) for tensor in flat], (others,)
