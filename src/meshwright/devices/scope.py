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

from meshwright.devices.runtime import jax_devices, name_of
from meshwright.errors import UnknownDeviceError

import jax

_current: ContextVar[str | None] = ContextVar("meshwright_device", default=None)
_HOME = "_meshwright_device"

HOME_MARK = "@"
"""What the name of a device begins with among the names of layers in a trace."""

_marking: ContextVar[bool] = ContextVar("meshwright_marking", default=False)


@contextlib.contextmanager
def enter(name: str | None) -> Iterator[None]:
    """Enters the scope of a device that is known to exist; None is automatic."""
    target = None if name is None else _existing(name)
    token = _current.set(name)
    try:
        with jax.default_device(target):
            yield
    finally:
        _current.reset(token)


def _existing(name: str) -> jax.Device:
    available = jax_devices()
    if name not in available:
        raise UnknownDeviceError(
            f"{name} unknown device: something was made for it, and it is gone.",
            "What was made in a scope lives on that device for good.",
            f"Configure the devices first; now there are {', '.join(available)}.",
        )
    return available[name]


def current_device() -> str | None:
    """The name of the innermost scope's device, or None for automatic placement."""
    return _current.get()


@contextlib.contextmanager
def marking_homes() -> Iterator[None]:
    """Lets traces tell by names for which device an operation was written."""
    token = _marking.set(True)
    try:
        yield
    finally:
        _marking.reset(token)


def mark_home(name: str) -> contextlib.AbstractContextManager[None]:
    """The scope of a trace in which a layer computes that lives on a device."""
    if not _marking.get():
        return contextlib.nullcontext()
    return jax.named_scope(HOME_MARK + name.removeprefix("/device:"))


def remember_home(thing: Any) -> None:
    """Makes the current scope the home of a variable, layer or operation."""
    # Past Keras' own __setattr__, which expects a fully made layer.
    object.__setattr__(thing, _HOME, current_device())


def home_of(thing: Any) -> str | None:
    """The name of the device that a variable, layer or operation was made for."""
    return getattr(thing, _HOME, None)


def homes_of(model: Any) -> list[tuple[str, str]]:
    """Which layer or operation of a model lives on which device, as (path, name).

    Variables decide where there are any: one that nobody placed lives on the default
    device. What has no variables counts only if it was placed, else it follows.
    """
    homes = []
    for layer in model._flatten_layers():
        path = layer.path or layer.name
        own = own_variables(layer)
        homes += [(path, home_of(v) or default_device()) for v in own]
        is_leaf = not layer._flatten_layers(include_self=False)
        if not own and is_leaf and not is_input(layer) and home_of(layer):
            homes.append((path, str(home_of(layer))))
        homes += [
            (operation.name, str(home_of(operation)))
            for operation in getattr(layer, "operations", ())
            if not hasattr(operation, "_flatten_layers") and home_of(operation)
        ]
    return list(dict.fromkeys(homes)) if any_placed(model) else []


def any_placed(model: Any) -> bool:
    """Whether anything of a model was made inside of a scope."""
    layers = model._flatten_layers()
    operations = [o for layer in layers for o in getattr(layer, "operations", ())]
    things = [*layers, *operations, *model.variables]
    return any(home_of(thing) for thing in things if not is_input(thing))


def own_variables(layer: Any) -> list[Any]:
    """The variables of a layer that belong to none of the layers inside it."""
    inner = layer._flatten_layers(include_self=False)
    theirs = {id(variable) for other in inner for variable in other.variables}
    return [variable for variable in layer.variables if id(variable) not in theirs]


def is_input(layer: Any) -> bool:
    """Whether a layer only stands for an input."""
    return bool(type(layer).__name__ == "InputLayer")


def default_device() -> str:
    """The name of the device that work goes to here, unless it was placed."""
    configured = jax.config.jax_default_device
    if isinstance(configured, str):
        configured = jax.devices(configured)[0]
    return name_of(configured or jax.devices()[0])
