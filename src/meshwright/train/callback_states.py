"""What callbacks remember, so that it can be saved and given back.

A callback keeps it in its attributes: the best value so far, how long to wait, weights.
Those that changed since its `fit` began and that are plain data are saved.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

Arrays = dict[str, "np.ndarray[Any, Any]"]

_NOT_SAVED = {"params", "model", "_model"}
"""What Keras tells callbacks anew when a `fit` begins."""


class _NotPlain(Exception):
    """A value that cannot be saved."""


class CallbackStates:
    """The states of the callbacks of one `fit`.

    Arguments:
        callbacks: They, before the `fit` begins.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        names = (f"{i}:{type(each).__name__}" for i, each in enumerate(callbacks))
        self._callbacks = dict(zip(names, callbacks, strict=True))
        self._before = {n: _plain(n, each) for n, each in self._callbacks.items()}

    def add(self, name: str, callback: Any) -> None:
        """Adds a callback that is made by Keras when its `fit` begins."""
        self._callbacks.setdefault(name, callback)
        self._before.setdefault(name, {})

    def to_save(self) -> tuple[dict[str, Any], Arrays]:
        """What changed, as JSON values by callback and attribute, and the arrays."""
        facts: dict[str, Any] = {}
        arrays: Arrays = {}
        for name, callback in self._callbacks.items():
            before, changed = self._before[name], {}
            for attribute, (value, parts) in _plain(name, callback).items():
                if not _are_same(before.get(attribute), (value, parts)):
                    changed[attribute] = value
                    arrays |= parts
            facts[name] = changed
        return facts, arrays

    def restore(self, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Gives callbacks back what they remembered; others than these stay."""
        for name, attributes in facts.items():
            callback = self._callbacks.get(name)
            for attribute, value in attributes.items():
                if callback is not None:
                    setattr(callback, attribute, _decode(value, arrays))


def _plain(name: str, callback: Any) -> dict[str, tuple[Any, Arrays]]:
    found = {}
    for attribute, value in vars(callback).items():
        if attribute in _NOT_SAVED:
            continue
        arrays: Arrays = {}
        try:
            found[attribute] = (_encode(value, f"{name}/{attribute}", arrays), arrays)
        except _NotPlain:
            continue
    return found


def _encode(value: Any, name: str, arrays: Arrays) -> Any:
    """A value in JSON; what JSON does not know is a dict with one key of ours.

    Operations of Keras' are how its callbacks remember whether less is better.
    """
    import keras

    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        host = np.asarray(value)
        if host.dtype.hasobject:
            raise _NotPlain
        # Of its own: the callback may go on writing into its array.
        arrays[name] = host.copy()
        return {"scalar" if isinstance(value, np.generic) else "array": name}
    if type(value) in (list, tuple):
        parts = [_encode(v, f"{name}/{i}", arrays) for i, v in enumerate(value)]
        return {type(value).__name__: parts}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {
            "dict": {k: _encode(v, f"{name}/{k}", arrays) for k, v in value.items()}
        }
    name_of_operation = getattr(value, "__name__", None)
    if name_of_operation and getattr(keras.ops, name_of_operation, None) is value:
        return {"operation": name_of_operation}
    raise _NotPlain


def _decode(value: Any, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "operation":
        import keras

        return getattr(keras.ops, inside)
    if kind == "float":
        return float(inside)
    if kind in ("array", "scalar"):
        array = np.array(arrays[inside])
        return array if kind == "array" else array[()]
    if kind == "dict":
        return {key: _decode(each, arrays) for key, each in inside.items()}
    parts = [_decode(each, arrays) for each in inside]
    return tuple(parts) if kind == "tuple" else parts


def _are_same(before: tuple[Any, Arrays] | None, now: tuple[Any, Arrays]) -> bool:
    if before is None or before[0] != now[0] or before[1].keys() != now[1].keys():
        return False
    return all(np.array_equal(before[1][k], array) for k, array in now[1].items())
