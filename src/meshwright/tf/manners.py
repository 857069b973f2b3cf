"""What Keras does with tensors of the façade, and inside of a replica.

Keras' public methods are extended once, when the façade is imported:

| method | what is added |
|---|---|
| `Layer.__call__`, `Loss.__call__` | arrays go in, and tensors come out |
| `Loss.__call__` | in a replica, its share of the loss of the global batch |
| `Optimizer.apply` | in a replica, gradients are summed over all of them first |
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import current_stateless_scope, install_keras_hooks
from meshwright.tf.distribute.contexts import current_replica, current_strategy
from meshwright.tf.distribute.replicas import Replica
from meshwright.tf.distribute.updates import ReplicaScope
from meshwright.tf.distribute.values import PerReplica
from meshwright.tf.tensors import (
    bring,
    is_concrete,
    raw,
    unwrap,
    whole_on,
    without_tensors,
    wrap,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np

_inside: ContextVar[bool] = ContextVar("meshwright_tf_inside_keras", default=False)


class _Manners:
    minded = True


def mind_manners(minded: bool) -> None:
    """Whether Keras does what it was taught; tests of other rooms do without."""
    _Manners.minded = minded


@functools.cache
def teach_keras() -> None:
    """Extends Keras; a second call does nothing."""
    install_keras_hooks()  # with them, `fit` takes the data sets of the façade
    _extend(keras.Layer, "__call__", _call_layer)
    _extend(keras.Loss, "__call__", _call_loss)
    _extend(keras.Optimizer, "apply", _apply)


@functools.cache
def _teach_arrays() -> None:
    """Metrics of Keras' give arrays of JAX's, and code for TensorFlow asks these too.

    Their class is known as soon as there is one, which starts the runtime.
    """
    array_type: Any = type(jnp.zeros(()))
    array_type.numpy = lambda array: np.asarray(array)[()]


def _extend(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        if not _Manners.minded:
            return original(*args, **kwargs)
        return extension(original, *args, **kwargs)

    setattr(owner, name, extended)


def _call_outermost(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if _inside.get() or _is_traced_by_keras():
        result = original(self, *without_tensors(args), **without_tensors(kwargs))
        return without_tensors(result)
    _teach_arrays()
    args, kwargs = _beside_variables(self, without_tensors((args, kwargs)))
    token = _inside.set(True)
    try:
        return wrap(original(self, *args, **kwargs))
    finally:
        _inside.reset(token)


def _beside_variables(caller: Any, arguments: Any) -> Any:
    """Arguments on the devices of a layer's variables, if a strategy placed these."""
    if current_replica() is not None:
        return arguments
    values = [getattr(v, "_value", None) for v in getattr(caller, "variables", ())]
    places = [v.sharding for v in values if v is not None and is_concrete(v)]
    on_several = [place for place in places if len(place.device_set) > 1]
    if not on_several:
        return arguments
    return map_leaves(lambda leaf: bring(leaf, whole_on(on_several[0])), arguments)


def _is_traced_by_keras() -> bool:
    scope = current_stateless_scope()
    return scope is not None and not isinstance(scope, ReplicaScope)


def _call_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    replica = current_replica()
    if replica is not None and not self.built and not _inside.get():
        # Variables are made once for all replicas, and none inside of one.
        shapes = jax.tree.map(
            lambda a: keras.KerasTensor(a.shape, a.dtype), unwrap(args)
        )
        replica.once_for_all(lambda: _build(replica, original, self, shapes, kwargs))
    return _call_outermost(original, self, *args, **kwargs)


def _build(
    replica: Replica, original: Any, layer: Any, shapes: Any, kwargs: Any
) -> None:
    if not layer.built:
        with replica.strategy.meshwright.scope():
            original(layer, *shapes, **unwrap(kwargs))


def _call_loss(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    loss = _call_outermost(original, self, *args, **kwargs)
    replica = current_replica()
    if replica is None or self.reduction in ("sum", "none", None):
        return loss
    given = args[1] if len(args) > 1 else kwargs.get("y_pred", kwargs.get("y_true"))
    return loss * share_of(replica, jax.tree.leaves(unwrap(given))[0])


def share_of(replica: Replica, array: Any) -> float:
    """The part of the global batch's samples that a replica has."""
    own = int(np.shape(array)[0]) if np.ndim(array) else 1
    strategy = replica.strategy

    def add_up(counts: list[int]) -> int:
        if strategy.num_processes == 1:
            return sum(counts)
        return int(strategy.reduce("SUM", PerReplica(counts), None))

    total = replica.meet(add_up, own)
    return own / total if total else 0.0


def _apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    replica = current_replica()
    given = [None if g is None else raw(g) for g in grads]
    if replica is None:
        return original(self, _beside(given, trainable_variables), trainable_variables)
    if getattr(self, "inner_optimizer", None) is not None:
        return original(self, given, trainable_variables)
    variables = trainable_variables
    summed = replica.meet(lambda offers: _sum(replica, self, variables, offers), given)
    return original(self, [raw(g) for g in summed], variables)


def _sum(replica: Replica, optimizer: Any, variables: Any, offers: list[Any]) -> Any:
    """The gradients of all replicas; an optimizer's own variables are made first."""
    strategy = replica.strategy
    if variables is not None and not optimizer.built:
        with strategy.meshwright.scope():
            optimizer.build(variables)
    columns = zip(*offers, strict=True)
    return [
        None if column[0] is None else strategy.reduce("SUM", PerReplica(column), None)
        for column in columns
    ]


def _beside(gradients: list[Any], variables: Any) -> list[Any]:
    """Gradients on the devices of their variables, outside of replicas."""
    if variables is None or current_strategy() is None or _is_traced_by_keras():
        return gradients
    places = [getattr(v._value, "sharding", None) for v in variables]
    return [
        g if g is None or place is None else jax.device_put(g, place)
        for g, place in zip(gradients, places, strict=True)
    ]
