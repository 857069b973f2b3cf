"""`meshwright.device`, and what happens when the device is not there."""

import warnings
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any

from meshwright.devices.device import Device
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.names import DeviceName, parse_device_name
from meshwright.devices.placement_log import switch_log
from meshwright.devices.runtime import name_of, usable_devices, why_unusable
from meshwright.devices.scope import enter
from meshwright.devices.start import user_line
from meshwright.errors import (
    ConfigurationError,
    PlacementWarning,
    UnknownDeviceError,
)

import jax


class _SoftPlacement:
    # Switchable for the whole process at any time, as in TensorFlow.
    on = True
    warned: frozenset[str] = frozenset()


class DeviceScope(ContextDecorator):
    """What `meshwright.device` returns; it can be entered again and again."""

    def __init__(self, wanted: DeviceName | None) -> None:
        self._wanted = wanted
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> str | None:
        install_keras_hooks()
        name = None if self._wanted is None else _resolve(self._wanted)
        entered = enter(name)
        entered.__enter__()
        self._entered.append(entered)
        return name

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def device(
    name: str | Device | jax.Device | None,
) -> DeviceScope:
    """Puts eager work, variables and layers on a device, for as long as they live.

    Variables keep their device, also when values from elsewhere are assigned. Layers
    compute where they were made. Scopes nest, the innermost counts; `None` (or `''`)
    returns to automatic placement. Used as a decorator it wraps a function.

    Arguments:
        name: `'GPU:1'` in any of TensorFlow's spellings, a device from
            `meshwright.devices()`, or one of JAX's.

    Raises:
        DeviceNameError: `name` spells no device.
        UnknownDeviceError: The device does not exist and soft placement is off.

    >>> import meshwright as mw
    >>> import jax.numpy as jnp
    >>> with mw.device("CPU:0"):
    ...     print(jnp.ones(3).device)
    cpu:0
    """
    if isinstance(name, jax.Device):
        name = name_of(name)
    if name is None or name == "":
        return DeviceScope(None)
    text = str(name) if isinstance(name, Device) else name
    return DeviceScope(parse_device_name(text, tuple(d.name for d in usable_devices())))


def set_soft_placement(enabled: bool) -> None:
    """Chooses what happens when a named device is not there.

    On, which is the default: an existing device takes its place, with one warning
    that names both. Off: an error that lists what exists.

    >>> import meshwright as mw
    >>> mw.set_soft_placement(False)
    >>> with mw.device("GPU:7"):
    ...     pass
    Traceback (most recent call last):
        ...
    meshwright.errors.UnknownDeviceError: /device:GPU:7 unknown device.
    ...
    >>> mw.set_soft_placement(True)
    """
    _SoftPlacement.on = _parse_switch(enabled, "set_soft_placement")
    _SoftPlacement.warned = frozenset()


def is_placement_soft() -> bool:
    """Whether an existing device takes the place of one that is not there."""
    return _SoftPlacement.on


def set_placement_log(enabled: bool) -> None:
    """Switches the log of placements on or off, at any time.

    On, every eager operation gives a line
    `Executing op MatMul in device /device:GPU:0` (TensorFlow's names for the common
    operations), and every compiled step of a model a line per layer with its devices
    and the shapes of its shards. The lines go to the logger `meshwright.placement` at
    level INFO, and to standard error if logging was not set up. Of eager work, that of
    this thread and of threads started from now on is seen; switch it off in the thread
    that switched it on.

    >>> import meshwright as mw
    >>> mw.set_placement_log(True)
    >>> mw.set_placement_log(False)
    """
    enabled = _parse_switch(enabled, "set_placement_log")
    install_keras_hooks()
    switch_log(enabled)


def _parse_switch(enabled: object, what: str) -> bool:
    if isinstance(enabled, bool):
        return enabled
    raise ConfigurationError(
        f"{what} received {enabled!r} (a {type(enabled).__name__}).",
        "It takes True or False.",
        f"Write {what}(True).",
    )


def _resolve(wanted: DeviceName) -> str:
    """The name of the device to use for the one that was asked for."""
    name = str(DeviceName(wanted.kind, wanted.index or 0))
    usable = usable_devices()
    if any(d.name == name for d in usable):
        return name
    because = why_unusable(wanted.kind)
    if not _SoftPlacement.on:
        raise UnknownDeviceError(
            f"{name} unknown device.",
            f"Soft placement is off, so the device must exist: {because}.",
            f"Use one of {', '.join(d.name for d in usable)}, "
            "or call meshwright.set_soft_placement(True).",
        )
    same_kind = [d.name for d in usable if d.kind == wanted.kind]
    instead = (same_kind or [name_of(jax.devices()[0])])[0]
    _warn_once(name, instead, because)
    return instead


def _warn_once(name: str, instead: str, because: str) -> None:
    if name in _SoftPlacement.warned:
        return
    _SoftPlacement.warned |= {name}
    file, line = user_line() or ("<unknown>", 1)
    warnings.warn_explicit(
        f"{name} is not there ({because}); {instead} takes its place. "
        "meshwright.set_soft_placement(False) makes this an error.",
        PlacementWarning,
        file,
        line,
    )
