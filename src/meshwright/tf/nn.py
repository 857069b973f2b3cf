"""`tf.nn`: activations, and the scaling of losses in loops of your own."""

from typing import Any

from meshwright.tf.absent import refuse
from meshwright.tf.distribute.contexts import current_replica, current_strategy
from meshwright.tf.distribute.strategy import get_strategy
from meshwright.tf.errors import InvalidArgumentError
from meshwright.tf.operations import elementwise, reduce_sum
from meshwright.tf.tensors import Tensor, raw, together, wrap

import jax
import jax.numpy as jnp

relu = elementwise(jax.nn.relu, 1, "The positive part.")
sigmoid = elementwise(jax.nn.sigmoid, 1, "The logistic function.")
tanh = elementwise(jnp.tanh, 1, "The hyperbolic tangent.")
gelu = elementwise(jax.nn.gelu, 1, "The Gaussian error linear unit.")


def softmax(logits: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Probabilities of logits."""
    return wrap(jax.nn.softmax(together(logits)[0], axis=axis))


def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> Tensor:
    """The loss of each sample, from the number of its class.

    >>> loss = sparse_softmax_cross_entropy_with_logits
    >>> print(loss(jnp.array([0]), jnp.zeros((1, 2))))
    tf.Tensor([0.6931472], shape=(1,), dtype=float32)
    """
    classes, values = together(labels, logits)
    logs = jax.nn.log_softmax(values)
    chosen = jnp.take_along_axis(logs, jnp.asarray(classes)[..., None], axis=-1)
    return wrap(-chosen[..., 0])


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: int | None = None,
) -> Tensor:
    """A replica's share of the mean loss: its sum over the size of the global batch.

    Arguments:
        per_example_loss: The loss of each sample of this replica.
        sample_weight: A weight for each.
        global_batch_size: The samples of all replicas; as many as here on each of them
            if left out.

    >>> print(compute_average_loss(jnp.array([1.0, 3.0]), global_batch_size=4))
    tf.Tensor(1.0, shape=(), dtype=float32)
    """
    (losses,) = together(per_example_loss)
    losses = jnp.asarray(losses)
    if losses.ndim == 0:
        raise ValueError(
            "Invalid value passed for `per_example_loss`. Expected a tensor with at "
            f"least rank 1, but received a scalar tensor ({losses})."
        )
    _refuse_across("compute_average_loss")
    size = raw(global_batch_size)
    if size is None:
        size = losses.shape[0] * get_strategy().num_replicas_in_sync
    is_traced = isinstance(size, jax.core.Tracer)
    if not jnp.issubdtype(jnp.result_type(size), jnp.integer):
        raise TypeError(f"`global_batch_size` must be an integer, got {size!r}.")
    if not is_traced and int(size) < 0:
        raise InvalidArgumentError(
            None, None, f"`global_batch_size` must be non-negative, got {size}."
        )
    if sample_weight is not None:
        losses = losses * jnp.asarray(raw(sample_weight))
    total = raw(reduce_sum(losses))
    return wrap(jnp.where(size == 0, 0.0, total / jnp.maximum(size, 1)))


def scale_regularization_loss(regularization_loss: Any) -> Tensor:
    """A replica's share of a loss that all replicas have whole."""
    _refuse_across("scale_regularization_loss")
    total = reduce_sum(raw(regularization_loss))
    return total / get_strategy().num_replicas_in_sync


def _refuse_across(name: str) -> None:
    if current_strategy() is not None and current_replica() is None:
        raise RuntimeError(
            f"You are calling `{name}` in cross replica context, while it was expected "
            "to be called in replica context."
        )


__getattr__ = refuse(
    "tf.nn",
    {
        "conv2d": "keras.ops.conv",
        "max_pool2d": "keras.ops.max_pool",
        "dropout": "keras.layers.Dropout",
        "softmax_cross_entropy_with_logits": "keras.losses.CategoricalCrossentropy("
        "from_logits=True, reduction='none')",
    },
)
