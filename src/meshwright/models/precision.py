"""What the layers of a model compute in, also of a model that exists already.

Keras has a dtype policy per layer: `mixed_bfloat16` and `mixed_float16` compute low and
keep variables in float32. A layer reads its policy whenever it is called, so a model
changes its precision by changing the policies; a few things besides keep a dtype, and
are named here. float16 has little range, so its optimizer scales the loss.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.devices.scope import is_input

import numpy as np

LOW_PRECISIONS = ("bfloat16", "float16")
"""Fewer bits than float32, the roughest first."""

_POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
_MIXED = (_POLICIES["bfloat16"], _POLICIES["float16"])
_STEPS = ("train_function", "test_function", "predict_function")
_KEEPS = "_meshwright_keeps_precision"
_FACTOR = "_meshwright_loss_scale_factor"


@contextmanager
def making_layers_in(precision: str | None) -> Iterator[None]:
    """Layers that are made inside compute in a precision, unless they say otherwise.

    Like all of Keras' policies it holds in the current thread.
    """
    import keras

    if precision is None:
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(_POLICIES[precision])
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def set_precision(model: Any, precision: str | None) -> None:
    """Lets all layers of a model compute in a precision; None leaves them alone.

    Weights and optimizer state stay. Layers with a policy of another kind (quantized,
    a map, weights in low precision too) keep it, and so do layers that were made in
    float32 inside of a model in mixed precision.
    """
    if precision is None:
        return
    import keras

    policy = keras.DTypePolicy(_POLICIES[precision])
    had_loss_scaling = model.dtype_policy.name == _POLICIES["float16"]
    _mark_layers_that_were_kept_wide(model)
    changed = [layer for layer in _switchable(model) if layer.dtype_policy != policy]
    for layer in changed:
        _switch(layer, policy)
    for layer in model._flatten_layers():
        _widen_input(layer)
    if precision != "float16":
        _remove_loss_scaling(model)
    elif not had_loss_scaling:
        _add_loss_scaling(model)
    if changed:
        for name in _STEPS:
            setattr(model, name, None)


@contextmanager
def keeping_precision(model: Any) -> Iterator[None]:
    """Undoes what the block does to the precision of a model and to its optimizer."""
    policies = [(layer, layer.dtype_policy) for layer in model._flatten_layers()]
    inputs = [
        (layer, layer._dtype) for layer in model._flatten_layers() if is_input(layer)
    ]
    steps = {name: getattr(model, name) for name in _STEPS}
    optimizer: Any = getattr(model, "optimizer", None)
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    factor = getattr(inner, "loss_scale_factor", None)
    try:
        yield
    finally:
        for layer, policy in policies:
            if layer.dtype_policy is not policy:
                _switch(layer, policy)
        for layer, dtype in inputs:
            layer._dtype = layer.output._dtype = dtype
        for name, function in steps.items():
            setattr(model, name, function)
        if optimizer is not None:
            model.optimizer = optimizer
            inner.loss_scale_factor = factor


def layers_by_precision(model: Any) -> dict[str, tuple[str, ...]]:
    """The paths of the layers of a model by what they compute in."""
    found: dict[str, tuple[str, ...]] = {}
    for layer in _leaves(model):
        dtype = str(layer.compute_dtype)
        found[dtype] = (*found.get(dtype, ()), layer.path or layer.name)
    return found


def lowest_precision(model: Any) -> str:
    """The roughest that any layer of a model computes in."""
    found = layers_by_precision(model)
    return next((low for low in LOW_PRECISIONS if low in found), "float32")


def _leaves(model: Any) -> list[Any]:
    layers = model._flatten_layers()
    return [layer for layer in layers if not layer._layers and not is_input(layer)]


def _switchable(model: Any) -> list[Any]:
    return [
        layer
        for layer in model._flatten_layers()
        if _has_plain_policy(layer) and not getattr(layer, _KEEPS, False)
    ]


def _has_plain_policy(layer: Any) -> bool:
    import keras

    plain = (keras.DTypePolicy, keras.FloatDTypePolicy)
    is_plain = type(layer.dtype_policy) in plain and not is_input(layer)
    return is_plain and layer.dtype_policy.name in _POLICIES.values()


def _mark_layers_that_were_kept_wide(model: Any) -> None:
    """Remembers the layers that somebody put into float32 in a mixed model.

    Those that only follow the default share its policy object: they were made late,
    for example in `build`, after the scope of a strategy.
    """
    import keras

    is_mixed = any(leaf.dtype_policy.name in _MIXED for leaf in _leaves(model))
    if model.dtype_policy.name not in _MIXED or not is_mixed:
        return
    default = keras.config.dtype_policy()
    for layer in _switchable(model):
        policy = layer.dtype_policy
        if policy.name not in _MIXED and policy is not default:
            object.__setattr__(layer, _KEEPS, True)


def _switch(layer: Any, policy: Any) -> None:
    import keras

    layer.dtype_policy = policy
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        _cast_statistics(layer)


def _cast_statistics(layer: Any) -> None:
    """Normalization keeps its statistics as constants in what it computes in."""
    import keras

    if layer.input_mean is None:
        layer.finalize_state()
    else:
        layer.build(layer.get_build_config()["input_shape"])
    # By way of the host: constants of a step must not be tied to another mesh.
    layer.mean = keras.ops.convert_to_tensor(np.asarray(layer.mean))
    layer.variance = keras.ops.convert_to_tensor(np.asarray(layer.variance))


def _widen_input(layer: Any) -> None:
    """Takes inputs as they come, if Keras would round them to low precision.

    A Sequential that was not told its input takes the dtype of its first layer for it.
    Even numbers of words are rounded then: in bfloat16, 257 becomes 256. The first
    layer rounds what it computes with by itself.
    """
    import keras

    if isinstance(layer, keras.Sequential):
        for first in layer._layers[:1]:
            if is_input(first) and first.dtype in LOW_PRECISIONS:
                first._dtype = first.output._dtype = "float32"


def _add_loss_scaling(model: Any) -> None:
    """Wraps the optimizer, with its state, as Keras' `compile` does for float16."""
    import keras

    inner = getattr(model, "optimizer", None)
    if inner is None or isinstance(inner, keras.optimizers.LossScaleOptimizer):
        return
    factor = inner.loss_scale_factor
    outer = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
    object.__setattr__(outer, _FACTOR, factor)
    if inner.built:
        with _staying_built(inner):
            outer.build(inner._trainable_variables)
    model.optimizer = outer


@contextmanager
def _staying_built(optimizer: Any) -> Iterator[None]:
    """Keeps an optimizer from making its slots anew; not every custom one checks."""
    object.__setattr__(optimizer, "build", lambda variables: None)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "build")


def _remove_loss_scaling(model: Any) -> None:
    """Takes the wrapper off again, unless it is what the user compiled with."""
    import keras

    outer = getattr(model, "optimizer", None)
    if not isinstance(outer, keras.optimizers.LossScaleOptimizer):
        return
    compiled_with = getattr(model, "_compile_config", None)
    if compiled_with is None or compiled_with.config.get("optimizer") is outer:
        return
    model.optimizer = outer.inner_optimizer
    model.optimizer.loss_scale_factor = getattr(outer, _FACTOR, None)
