"""One update from many microbatches: the gradients of each are added.

The loss is that of the whole batch. If it is a plain mean over samples, each microbatch
computes its own and counts by its number of samples. If not (masks, sums, weighted
means, losses of the user's own), the outputs of all microbatches are computed first,
then the loss of the whole batch, and then the gradients, microbatch by microbatch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from typing import Any, NamedTuple

from meshwright.devices.keras_hooks import mask_of
from meshwright.devices.strategy_hooks import replacing_forward_pass
from meshwright.errors import StrategyError
from meshwright.models.forward import flatten, rebuild
from meshwright.parallel.microbatch import Microbatches

import jax
import jax.numpy as jnp

Batch = tuple[Any, Any]
"""Microbatches as `Microbatches.cut` gives them; the smaller ones may be None."""

Groups = list[Any]
"""Something of each microbatch along a first dim: of the larger, of the smaller."""

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
    is_mean = why_not_a_mean(model, state, first_of(batch)) is None
    step = _step_by_losses if is_mean else _step_by_outputs
    return step(model, state, _groups(batch), around)


def first_of(batch: Batch) -> Any:
    """The first microbatch of a batch."""
    return jax.tree.map(lambda stacked: stacked[0], batch[0])


def why_not_a_mean(model: Any, state: Any, microbatch: Any) -> str | None:
    """Why the loss of a batch is not the mean of those of its samples, or None.

    Of state and microbatch, shapes and types are enough.
    """
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
    if _has_masks(model, state, microbatch):
        return "outputs are masked"
    return None


def _has_masks(model: Any, state: Any, microbatch: Any) -> bool:
    found: list[Any] = []

    def look(state: Any, microbatch: Any) -> Any:
        outputs, *_ = forward_pass(model, state[0], state[1], _unpack(microbatch)[0])
        flat, _ = flatten(outputs)
        found.extend(mask_of(tensor) for tensor in flat)
        return flat

    jax.eval_shape(look, state, microbatch)
    return any(mask is not None for mask in found)


def _step_by_losses(model: Any, state: Any, groups: Groups, around: Around) -> Any:
    weights, others, slots, metrics = state
    total = _num_samples(groups)
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
    (sums, others, metrics), logs = _scan(add, start, groups)
    last = jax.tree.map(lambda log: log[-1], logs[-1])
    weights, slots = model.optimizer.stateless_apply(slots, sums, weights)
    return last, (weights, others, slots, metrics)


class _Outputs(NamedTuple):
    """What the forward passes of all microbatches gave."""

    template: Any
    flat: list[Any]
    masks: list[Any]
    losses: list[Any]
    """Those that layers added."""
    before: Groups
    """The model's other variables in front of each microbatch."""
    after: Any
    """The same, behind the last."""

    def rebuilt(self, flat: list[Any]) -> Any:
        """The outputs as the model gives them."""
        return rebuild(self.template, flat, self.masks)


def _step_by_outputs(model: Any, state: Any, groups: Groups, around: Around) -> Any:
    weights, others, slots, metrics = state
    given = _unpack(_join(groups))
    outputs = _outputs_of_all(model, weights, others, groups, around)

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
    # Keras' own step has lost the masks when it comes to the metrics.
    unmasked = rebuild(outputs.template, outputs.flat)
    logs, metrics = model._update_metrics_variables(
        metrics, loss, x, y, unmasked, sample_weight
    )
    sums = _pulled_back(model, weights, groups, outputs, gradients, around)
    weights, slots = model.optimizer.stateless_apply(slots, sums, weights)
    return logs, (weights, others, slots, metrics)


def _outputs_of_all(
    model: Any, weights: Any, others: Any, groups: Groups, around: Around
) -> _Outputs:
    template: Any = None

    def forward(others: Any, data: Any) -> Any:
        nonlocal template
        inputs = _unpack(data)[0]
        with around(_size(inputs)):
            outputs, new, losses = forward_pass(model, weights, others, inputs)
        flat, template = flatten(outputs)
        refuse_without_samples(model, flat, _size(inputs))
        return new, (others, flat, [mask_of(tensor) for tensor in flat], losses)

    after, found = _scan(forward, others, groups)
    before, flat, masks, losses = (list(each) for each in zip(*found, strict=True))
    return _Outputs(
        template=template,
        flat=_join(flat),
        masks=_join(masks),
        losses=_mean(losses, groups),
        before=before,
        after=after,
    )


def _pulled_back(
    model: Any,
    weights: Any,
    groups: Groups,
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
        share = _size(inputs) / _num_samples(groups)

        def outputs_and_losses(weights: Any) -> Any:
            with around(_size(inputs)):
                outputs, _, losses = forward_pass(model, weights, others, inputs)
            return flatten(outputs)[0], losses

        _, pull = jax.vjp(outputs_and_losses, weights)
        (found,) = pull((to_outputs, [share * g for g in to_losses]))
        return _add(sums, found, 1.0), None

    given = zip(groups, outputs.before, _cut_like(to_outputs, groups), strict=True)
    return _scan(add, to_weights, list(given))[0]


def forward_pass(model: Any, weights: Any, others: Any, inputs: Any) -> Any:
    """A model's outputs in training, its other variables, and losses of its layers."""
    options = {"training": True} if model._call_has_training_arg else {}
    return model.stateless_call(weights, others, inputs, return_losses=True, **options)


def refuse_without_samples(
    model: Any, outputs: list[Any], size: int, lever: str = "accumulate"
) -> None:
    """Refuses outputs of a microbatch that cannot be joined with those of others.

    Arguments:
        model: The model.
        outputs: Its outputs.
        size: Samples of the microbatch.
        lever: What was asked for.
    """
    for leaf in outputs:
        if not leaf.ndim or leaf.shape[0] != size:
            raise StrategyError(
                f"{lever} was asked for {model.name!r}, which has an output of "
                f"shape {leaf.shape} for {size} samples.",
                "Outputs of microbatches are joined by sample, so each has one row per "
                "sample.",
                f"Pass such values on with add_loss or a metric, or use {lever}=1.",
            )


def _unpack(data: Any) -> tuple[Any, Any, Any]:
    import keras

    return keras.utils.unpack_x_y_sample_weight(data)


def _groups(batch: Batch) -> Groups:
    return [group for group in batch if group is not None]


def _scan(body: Any, carry: Any, groups: Groups) -> tuple[Any, Groups]:
    """Goes through the microbatches: what is carried, and what each gives."""
    found = []
    for group in groups:
        carry, every = jax.lax.scan(body, carry, group)
        found.append(every)
    return carry, found


def _size(x: Any) -> int:
    return int(next(leaf.shape[0] for leaf in jax.tree.leaves(x) if leaf.ndim))


def _counts(group: Any) -> tuple[int, int]:
    """The microbatches of a group, and the samples of each."""
    leaf = next(leaf for leaf in jax.tree.leaves(group) if leaf.ndim > 1)
    return leaf.shape[0], leaf.shape[1]


def _num_samples(groups: Groups) -> int:
    return sum(prod(_counts(group)) for group in groups)


def _zeros(weights: Any) -> Any:
    return [jnp.zeros_like(weight) for weight in weights]


def _add(sums: Any, gradients: Any, share: float) -> Any:
    return [s + share * g for s, g in zip(sums, gradients, strict=True)]


def _join(groups: Groups) -> Any:
    """Values of microbatches as those of the batch."""

    def join(*leaves: Any) -> Any:
        return jnp.concatenate([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])

    return jax.tree.map(join, *groups)


def _cut_like(values: Any, groups: Groups) -> Groups:
    """Values of the batch as those of its microbatches."""
    number = sum(_counts(group)[0] for group in groups)
    return _groups(Microbatches(_num_samples(groups), number).cut(values))


def _mean(losses: Groups, groups: Groups) -> Any:
    """Losses that layers added, each weighted by its number of samples."""
    shares = [prod(_counts(group)) / _num_samples(groups) for group in groups]

    def mean(*leaves: Any) -> Any:
        pairs = zip(shares, leaves, strict=True)
        return sum(share * leaf.mean(0) for share, leaf in pairs)

    return jax.tree.map(mean, *losses)
