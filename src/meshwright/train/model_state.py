"""The values of a model in training, by name: what checkpoints hold."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.cluster.store import say_to_all
from meshwright.devices.step import STATE_KINDS, newest_values, variables_of

import jax
import jax.numpy as jnp
import numpy as np

KINDS = STATE_KINDS[4]


def named_values(model: Any) -> dict[str, Any]:
    """The newest values of all variables, by kind and path, and of workers."""
    own = _own_state(model)
    values = {name: value for name, _, value in _all_of(model)}
    return values if own is None else values | own.own_values()


def named_variables(model: Any) -> dict[str, Any]:
    """All variables, by the same names."""
    return {name: variable for name, variable, _ in _all_of(model)}


def targets_of(model: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes, types and places that values of these names are to have."""
    own = _own_state(model)
    targets = {name: _target(value) for name, _, value in _all_of(model)}
    return targets if own is None else targets | own.own_targets()


def give_named_values(model: Any, values: Mapping[str, Any]) -> None:
    """Gives all variables the values of their names, where these are."""
    for name, variable, _ in _all_of(model):
        variable._value = values[name]
    model._jax_state_synced = True
    own = _own_state(model)
    if own is not None:
        own.give_own_values(values, newest_values(model))


def all_finite(model: Any) -> bool:
    """Whether no weight is NaN or infinite, in any process; waits for the devices."""
    # Stages of a pipeline have devices of their own, and so programs.
    groups: dict[Any, list[Any]] = {}
    for value in newest_values(model)[0]:
        if value.addressable_shards:
            groups.setdefault(frozenset(value.sharding.device_set), []).append(value)
    here = all(bool(_compiled_are_all_finite(values)) for values in groups.values())
    return "False" not in say_to_all("finite weights", str(here))


def placed_values(model: Any) -> Iterator[tuple[str, str, Any]]:
    """Kind, path and newest value of all variables but metrics."""
    for name, _, value in _all_of(model):
        kind, _, path = name.partition("/")
        if kind != KINDS[-1]:
            yield kind, path, value


def poison(model: Any) -> None:
    """Makes a weight NaN, as a fault that is injected."""
    model.jax_state_sync()
    for variable in model.trainable_variables:
        if jnp.issubdtype(variable._value.dtype, jnp.floating):
            variable._value = variable._value * np.nan
            return


def _are_all_finite(values: list[Any]) -> Any:
    return jnp.all(jnp.stack([jnp.isfinite(value).all() for value in values]))


_compiled_are_all_finite = jax.jit(_are_all_finite)


def _own_state(model: Any) -> Any:
    """The training step of a model, if it has a state beside that of the model."""
    step = getattr(model.train_function, "guarded", None)
    return step if hasattr(step, "own_values") else None


def _all_of(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, variable and value of all variables."""
    lists: list[Any] = [()] * len(KINDS)
    groups = zip(KINDS, variables_of(model, lists), newest_values(model), strict=True)
    for kind, variables, values in groups:
        seen: Counter[str] = Counter()
        for variable, value in zip(variables, values, strict=True):
            seen[variable.path] += 1
            number = seen[variable.path]
            again = f"#{number}" if number > 1 else ""
            yield f"{kind}/{variable.path}{again}", variable, value


def _target(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
