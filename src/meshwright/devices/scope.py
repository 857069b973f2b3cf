"""The device scope itself: which device is current, and who remembers which.

Arrays made in a scope stay *uncommitted* in JAX's sense: they live on the scope's
device, and an operation takes its inputs to the device of the scope it runs in. That
is TensorFlow's rule (a silent copy), and JAX offers it for free. Variables and layers
remember the scope they were made in; `keras_hooks` brings them back to it.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from meshwright.devices.runtime import jax_devices

import jax

_current: ContextVar[str | None] = ContextVar("meshwright_device", default=None)
_HOME = "_meshwright_device"


@contextlib.contextmanager
def enter(name: str | None) -> Iterator[None]:
    """Enters the scope of a device that is known to exist; None is automatic."""
    token = _current.set(name)
    try:
        with jax.default_device(None if name is None else jax_devices()[name]):
            yield
    finally:
        _current.reset(token)


def current_device() -> str | None:
    """The name of the innermost scope's device, or None for automatic placement."""
    return _current.get()


def remember_home(thing: Any) -> None:
    """Makes the current scope the home of a variable, layer or operation."""
    # Past Keras' own __setattr__, which expects a fully made layer.
    object.__setattr__(thing, _HOME, current_device())


def home_of(thing: Any) -> str | None:
    """The name of the device that a variable, layer or operation was made for."""
    return getattr(thing, _HOME, None)


def homes_of(model: Any) -> dict[str, str]:
    """The layers of a model that were made for a device, and which: path → name.

    A layer that only holds others counts through these.
    """
    homes = {}
    for layer in model._flatten_layers():
        holds_others = any(layer._flatten_layers(include_self=False, recursive=False))
        home = home_of(layer)
        if home is not None and not holds_others:
            homes[layer.path or layer.name] = home
    return homes
