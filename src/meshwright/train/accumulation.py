"""One update from many microbatches: the gradients of each are added.

The loss is that of the whole batch. If it is a plain mean over samples, each microbatch
computes its own and counts by its number of samples. If not (masks, sums, weighted
means, losses of the user's own), the outputs of all microbatches are computed first,
then the loss of the whole batch, and then the gradients, microbatch by microbatch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from meshwright.devices.keras_hooks import mask_of
from meshwright.devices.strategy_hooks import replacing_forward_pass
from meshwright.errors import StrategyError
from meshwright.models.forward import flatten, rebuild

import jax
import jax.numpy as jnp

Batch = tuple[Any, Any]
"""Equal microbatches along a first dim, and a smaller last one or None."""

Around = Callable[[int], AbstractContextManager[None]]
"""What is entered while a microbatch of so many samples is traced."""

_MEANS = [
    "binary_crossentropy",
    "categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "categorical_hinge",
    "cosine_similarity",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "squared_hinge",
]
"""Losses of Keras' that have one value for each sample, which depends on it only."""


def accumulated_step(model: Any, state: Any, batch: Batch, around: Around) -> Any:
    """A training step like Keras' own, on a batch that was cut into microbatches."""
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise StrategyError(
            f"accumulate was asked for {model.name!r}, whose class "
            f"{type(model).__name__} has a train_step of its own.",
            "Accumulation replaces the training step, so it would not be called.",
            "Override compute_loss instead of train_step, or use accumulate=1.",
        )
    is_mean = why_not_a_mean(model, state, batch) is None
    step = _step_by_losses if is_mean else _step_by_outputs
    return step(model, state, batch, around)


def why_not_a_mean(model: Any, state: Any, batch: Batch) -> str | None:
    """Why the loss of a batch is not the mean of those of its samples, or None."""
    import keras

    if type(model).compute_loss is not keras.Model.compute_loss:
        return f"{type(model).__name__} has a compute_loss of its own"
    plain = {getattr(keras.losses, name) for name in _MEANS}
    for part in model._compile_loss._flat_losses if model._compile_loss else ():
        loss = part.loss
        is_keras_own = type(loss).__module__.startswith("keras.")
        if not is_keras_own or getattr(loss, "fn", None) not in plain:
            return f"{loss.name} is a loss of the user's own"
        if loss.reduction not in ("sum_over_batch_size", "mean"):
            return f"{loss.name} is reduced by {loss.reduction!r}"
        if loss._fn_kwargs.get("ignore_class") is not None:
            return f"{loss.name} ignores a class"
    if _has_masks(model, state, batch):
        return "outputs are masked"
    return None


def _has_masks(model: Any, state: Any, batch: Batch) -> bool:
    found: list[Any] = []

    def look(state: Any, microbatch: Any) -> Any:
        outputs, *_ = _forward(model, state[0], state[1], _unpack(microbatch)[0])
        flat, _ = flatten(outputs)
        found.extend(mask_of(tensor) for tensor in flat)
        return flat

    jax.eval_shape(look, state, jax.tree.map(lambda stacked: stacked[0], batch[0]))
    return any(mask is not None for mask in found)


def _step_by_losses(model: Any, state: Any, batch: Batch, around: Around) -> Any:
    weights, others, slots, metrics = state
    total = _num_samples(batch)
    gradients_of = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)

    def add(carry: Any, data: Any) -> Any:
        sums, others, metrics = carry
        x, y, sample_weight = _unpack(data)
        size = _size(x)
        with around(size):
            (_, aux), gradients = gradients_of(
                weights,
                others,
                metrics,
                x,
                y,
                sample_weight,
                training=True,
                optimizer_variables=slots,
            )
            loss, outputs, others, metrics = aux
            logs, metrics = model._update_metrics_variables(
                metrics, loss, x, y, outputs, sample_weight
            )
        return (_add(sums, gradients, size / total), others, metrics), logs

    start = (_zeros(weights), others, metrics)
    (sums, others, metrics), every, last = _scan(add, start, batch)
    logs = jax.tree.map(lambda log: log[-1], every) if last is None else last
    weights, slots = model.optimizer.stateless_apply(slots, sums, weights)
    return logs, (weights, others, slots, metrics)


class _Outputs(NamedTuple):
    """What the forward passes of all microbatches gave."""

    template: Any
    flat: list[Any]
    masks: list[Any]
    losses: list[Any]
    """Those that layers added."""
    before: Batch
    """The model's other variables in front of each microbatch."""
    after: Any
    """The same, behind the last."""

    def rebuilt(self, flat: list[Any]) -> Any:
        """The outputs as the model gives them."""
        return rebuild(self.template, flat, self.masks)


def _step_by_outputs(model: Any, state: Any, batch: Batch, around: Around) -> Any:
    weights, others, slots, metrics = state
    given = _unpack(_join(batch[0], batch[1]))
    outputs = _outputs_of_all(model, weights, others, batch, around)

    def loss_of(weights: Any, flat: Any, losses: Any) -> Any:
        def computed(*_: Any, **__: Any) -> Any:
            return outputs.rebuilt(flat), outputs.after, list(losses)

        with replacing_forward_pass(model, computed):
            return model.compute_loss_and_updates(
                weights,
                outputs.after,
                metrics,
                *given,
                training=True,
                optimizer_variables=slots,
            )

    gradients_of = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
    (_, aux), gradients = gradients_of(weights, outputs.flat, outputs.losses)
    loss, _, others, metrics = aux
    x, y, sample_weight = given
    logs, metrics = model._update_metrics_variables(
        metrics, loss, x, y, outputs.rebuilt(outputs.flat), sample_weight
    )
    sums = _pulled_back(model, weights, batch, outputs, gradients, around)
    weights, slots = model.optimizer.stateless_apply(slots, sums, weights)
    return logs, (weights, others, slots, metrics)


def _outputs_of_all(
    model: Any, weights: Any, others: Any, batch: Batch, around: Around
) -> _Outputs:
    template: Any = None

    def forward(others: Any, data: Any) -> Any:
        nonlocal template
        inputs = _unpack(data)[0]
        with around(_size(inputs)):
            outputs, new, losses = _forward(model, weights, others, inputs)
        flat, template = flatten(outputs)
        _refuse_without_samples(model, flat, _size(inputs))
        return new, (others, flat, [mask_of(tensor) for tensor in flat], losses)

    after, every, last = _scan(forward, others, batch)
    return _Outputs(
        template=template,
        flat=_join(every[1], last and last[1]),
        masks=_join(every[2], last and last[2]),
        losses=_mean(every[3], last and last[3], batch),
        before=(every[0], last and last[0]),
        after=after,
    )


def _pulled_back(
    model: Any,
    weights: Any,
    batch: Batch,
    outputs: _Outputs,
    gradients: tuple[Any, Any, Any],
    around: Around,
) -> Any:
    """The gradients of the loss with respect to the weights, through all microbatches.

    Arguments:
        gradients: Those with respect to the weights that the loss uses itself, to the
            outputs, and to the losses that layers added.
    """
    to_weights, to_outputs, to_losses = gradients

    def add(sums: Any, given: Any) -> Any:
        data, others, to_outputs = given
        inputs = _unpack(data)[0]
        share = _size(inputs) / _num_samples(batch)

        def outputs_and_losses(weights: Any) -> Any:
            with around(_size(inputs)):
                outputs, _, losses = _forward(model, weights, others, inputs)
            return flatten(outputs)[0], losses

        _, pull = jax.vjp(outputs_and_losses, weights)
        (found,) = pull((to_outputs, [share * g for g in to_losses]))
        return _add(sums, found, 1.0), None

    equal, rest = _cut_like(to_outputs, batch)
    first = (batch[0], outputs.before[0], equal)
    last = None if batch[1] is None else (batch[1], outputs.before[1], rest)
    return _scan(add, to_weights, (first, last))[0]


def _forward(model: Any, weights: Any, others: Any, inputs: Any) -> Any:
    options = {"training": True} if model._call_has_training_arg else {}
    return model.stateless_call(weights, others, inputs, return_losses=True, **options)


def _refuse_without_samples(model: Any, outputs: list[Any], size: int) -> None:
    for leaf in outputs:
        if not leaf.ndim or leaf.shape[0] != size:
            raise StrategyError(
                f"accumulate was asked for {model.name!r}, which has an output of "
                f"shape {leaf.shape} for {size} samples.",
                "Outputs of microbatches are joined by sample, so each has one row per "
                "sample.",
                "Pass such values on with add_loss or a metric, or use accumulate=1.",
            )


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    import keras

    return keras.utils.unpack_x_y_sample_weight(data)


def _scan(body: Any, carry: Any, batch: Batch) -> tuple[Any, Any, Any]:
    """Goes through the microbatches: what is carried, every output, the last one's."""
    carry, every = jax.lax.scan(body, carry, batch[0])
    if batch[1] is None:
        return carry, every, None
    carry, last = body(carry, batch[1])
    return carry, every, last


def _size(x: Any) -> int:
    return int(next(leaf.shape[0] for leaf in jax.tree.leaves(x) if leaf.ndim))


def _num_samples(batch: Batch) -> int:
    leaf = next(leaf for leaf in jax.tree.leaves(batch[0]) if leaf.ndim > 1)
    return int(leaf.shape[0] * leaf.shape[1]) + (_size(batch[1]) if batch[1] else 0)


def _zeros(weights: Any) -> Any:
    return [jnp.zeros_like(weight) for weight in weights]


def _add(sums: Any, gradients: Any, share: float) -> Any:
    return [s + share * g for s, g in zip(sums, gradients, strict=True)]


def _join(every: Any, last: Any) -> Any:
    """Values of microbatches as those of the batch."""
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), every)
    if last is None:
        return flat
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), flat, last)


def _cut_like(values: Any, batch: Batch) -> tuple[Any, Any]:
    """Values of the batch as those of its microbatches."""
    leaf = next(leaf for leaf in jax.tree.leaves(batch[0]) if leaf.ndim > 1)
    num, each = leaf.shape[:2]

    def stack(value: Any) -> Any:
        return value[: num * each].reshape(num, each, *value.shape[1:])

    rest = jax.tree.map(lambda value: value[num * each :], values)
    return jax.tree.map(stack, values), rest


def _mean(every: Any, last: Any, batch: Batch) -> list[Any]:
    """Losses that layers added, each weighted by its number of samples."""
    total = _num_samples(batch)
    rest = _size(batch[1]) if batch[1] else 0
    equal = (total - rest) / total
    means = [equal * loss.mean(0) for loss in every]
    if last is None:
        return means
    return [m + rest / total * loss for m, loss in zip(means, last, strict=True)]
