"""Every place where Meshwright reaches into Keras, in one file.

Keras on JAX forgets devices: variables drift to device 0 when they are assigned or
trained, and layers compute wherever their caller does. A few methods are extended so
that things stay where `meshwright.device` put them; models that were never placed, and
steps without a memory limit or a placement log, run the original code.

| method | what is added |
|---|---|
| `Variable.__init__` | remembers the scope it was made in |
| `Variable._deferred_initialize` | makes the first value on the variable's device |
| `Variable._direct_assign` | takes new values to the variable's device |
| `Operation.__init__` | remembers the scope the layer or operation was made in |
| `Operation.__call__`, `Layer.__call__` | computes on that device |
| `Optimizer.add_variable_from_reference` | slots live with their variable |
| `JAXTrainer.make_train_function`, `_make_function` | steps of placed models |
| `trainer._distribute_data` | batches that a limited GPU cannot take |
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from meshwright.devices.runtime import jax_devices
from meshwright.devices.scope import enter, home_of, remember_home
from meshwright.devices.step import (
    GuardedStep,
    refusal_of_batches_over_limit,
    refuse_to_train_split_model,
)

import jax
import numpy as np


@functools.cache
def install_keras_hooks() -> None:
    """Extends Keras once; a second call does nothing.

    Importing Keras takes a second, so this waits until somebody needs it.
    """
    from keras.src.backend.jax import trainer
    from keras.src.backend.jax.core import Variable
    from keras.src.backend.jax.trainer import JAXTrainer
    from keras.src.layers.layer import Layer
    from keras.src.ops.operation import Operation
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    _extend(Variable, "__init__", _remembering_init)
    _extend(Variable, "_deferred_initialize", _call_at_home)
    _extend(Variable, "_direct_assign", _assign_at_home)
    _extend(Operation, "__init__", _remembering_init)
    _extend(Operation, "__call__", _call_at_home)
    _extend(Layer, "__call__", _call_at_home)
    _extend(BaseOptimizer, "add_variable_from_reference", _add_slot_at_home)
    _extend(JAXTrainer, "make_train_function", _make_train_function)
    _extend(JAXTrainer, "_make_function", _make_guarded_function)
    _extend(trainer, "_distribute_data", _transfer_within_limit)


def _extend(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    """Replaces a method or function by `extension(original, ...)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(original, *args, **kwargs)

    # Keras reads the arguments of `__init__` to write configurations.
    extended.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def _remembering_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Before the original runs: a variable assigns its first value in there.
    remember_home(self)
    original(self, *args, **kwargs)


def _assign_at_home(original: Any, self: Any, value: Any) -> None:
    home = home_of(self)
    original(self, value if home is None else _bring(value, home))


def _call_at_home(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    home = home_of(self)
    if home is None:
        return original(self, *args, **kwargs)
    with enter(home):
        args, kwargs = jax.tree.map(
            lambda leaf: _bring(leaf, home) if _is_committed(leaf) else leaf,
            (args, kwargs),
        )
        return original(self, *args, **kwargs)


def _add_slot_at_home(
    original: Any, self: Any, reference_variable: Any, *args: Any, **kwargs: Any
) -> Any:
    home = home_of(reference_variable)
    with nullcontext() if home is None else enter(home):
        return original(self, reference_variable, *args, **kwargs)


def _make_train_function(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    refuse_to_train_split_model(self)
    original(self, *args, **kwargs)


def _make_guarded_function(
    original: Any, self: Any, step_function: Any, *args: Any, **kwargs: Any
) -> Any:
    guarded = GuardedStep(self, step_function)
    run = original(self, guarded, *args, **kwargs)

    def run_or_give_back(state: Any, iterator: Any) -> Any:
        with guarded.giving_back(state):
            return run(state, iterator)

    return run_or_give_back


def _transfer_within_limit(original: Any, data: Any, *args: Any) -> Any:
    with refusal_of_batches_over_limit(data):
        return original(data, *args)


def _is_committed(leaf: Any) -> bool:
    # Uncommitted arrays follow the scope by themselves; tracers have no place.
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return concrete and leaf.committed


def _bring(value: Any, home: str) -> Any:
    """The value as an uncommitted array on `home`."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    target = jax_devices()[home]
    if value.devices() == {target} and not value.committed:
        return value
    with jax.default_device(target):
        # A committed array can only be freed of its device by way of the host.
        return _compiled_copy(np.asarray(value) if value.committed else value)


def _copy(value: Any) -> Any:
    return value


_compiled_copy = jax.jit(_copy)
