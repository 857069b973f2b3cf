"""`tf.device`: the scope of `meshwright.device`, with TensorFlow's refusals."""

import re
import types
import warnings
from contextlib import AbstractContextManager
from typing import Any

from meshwright.devices.device import Device
from meshwright.devices.names import KINDS
from meshwright.devices.placement import is_placement_soft
from meshwright.devices.runtime import usable_devices
from meshwright.errors import DeviceNameError, PlacementWarning, UnknownDeviceError
from meshwright.strategies.by_hand import device as meshwright_device
from meshwright.tf.errors import InvalidArgumentError
from meshwright.tf.started import initialize
from meshwright.tf.tensors import full_name

_UNKNOWN_KIND = re.compile(r"(/job:localhost.*)?/?device:(\w+):\d+", re.IGNORECASE)


class DeviceScope(AbstractContextManager[None]):
    """What `tf.device` returns."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        initialize()
        scope = _scope(self._name)
        try:
            scope.__enter__()
        except UnknownDeviceError as error:
            raise _not_there(str(self._name)) from error
        self._entered.append(scope)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def device(device_name: Any) -> DeviceScope:
    """Puts operations, variables and layers on a device.

    Unlike in TensorFlow, layers that are made inside compute there too.

    Arguments:
        device_name: `'/GPU:1'` in any spelling, a logical device, or None for
            automatic placement.

    >>> from meshwright import tf
    >>> with tf.device("/CPU:1"):
    ...     print(tf.constant(1.0).device)
    /job:localhost/replica:0/task:0/device:CPU:1
    """
    if isinstance(device_name, types.FunctionType):
        raise RuntimeError("tf.device does not support functions.")
    name = getattr(device_name, "name", device_name)
    if name is not None and not isinstance(name, str):
        raise ValueError(
            f"Expecting a string device name. Got {type(device_name)}({device_name})"
        )
    return DeviceScope(name)


def _scope(name: str | None) -> Any:
    try:
        return meshwright_device(name)
    except UnknownDeviceError as error:
        raise InvalidArgumentError(None, None, f"{name} unknown device.") from error
    except DeviceNameError as error:
        unknown = _UNKNOWN_KIND.fullmatch(str(name))
        if unknown is None or unknown[2].upper() in KINDS:
            attribute = str(name).strip("/").split("/")[-1]
            raise ValueError(
                f"Unknown attribute '{attribute}' is encountered while parsing the "
                f"device spec: '{name}'. {error.rule}"
            ) from error
        if not is_placement_soft():
            raise _not_there(str(name)) from error
        instead = _default()
        warnings.warn(
            f"{name} is not there (Meshwright knows no {unknown[2]}); {instead} takes "
            "its place.",
            PlacementWarning,
            stacklevel=4,
        )
        return meshwright_device(instead)


def _default() -> str:
    return usable_devices()[0].name


def _not_there(name: str) -> InvalidArgumentError:
    """TensorFlow's error, with the words of its guide."""
    wanted = name.removeprefix("/").removeprefix("device:")
    if not wanted.startswith("job:"):
        wanted = full_name(f"/device:{wanted.upper()}")
    usable = usable_devices()
    return InvalidArgumentError(
        None,
        None,
        f"{wanted} unknown device. Could not satisfy device specification "
        f"'{wanted}'. enable_soft_placement=0. Supported device types "
        f"[{', '.join(sorted({d.kind for d in usable}))}]. All available devices "
        f"[{', '.join(_full(d) for d in usable)}]. "
        "tf.config.set_soft_device_placement(True) lets an existing one take its "
        "place.",
    )


def _full(device: Device) -> str:
    return full_name(device.name)
