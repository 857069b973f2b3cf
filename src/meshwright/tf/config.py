"""`tf.config`: devices, asked for in TensorFlow's words, set by `meshwright.configure`.

TensorFlow's settings may be changed until its runtime starts; then they raise its
errors, unless they ask for what is in force.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.devices.configuration import apply, configure
from meshwright.devices.discovery import list_devices
from meshwright.devices.placement import is_placement_soft, set_soft_placement
from meshwright.devices.runtime import jax_devices, usable_devices
from meshwright.devices.settings import Virtual, current_settings
from meshwright.errors import ConfigurationError
from meshwright.tf.absent import refuse
from meshwright.tf.errors import NotFoundError
from meshwright.tf.started import before_start, initialize, is_initialized

import jax

_MIB = 2**20


@dataclass(frozen=True)
class PhysicalDevice:
    """Hardware, or a stand-in for it.

    >>> PhysicalDevice("/physical_device:GPU:0", "GPU")
    PhysicalDevice(name='/physical_device:GPU:0', device_type='GPU')
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDevice:
    """A device that operations can be put on.

    >>> LogicalDevice("/device:GPU:0", "GPU").name
    '/device:GPU:0'
    """

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """A part of a physical device; the limit is in MiB.

    >>> LogicalDeviceConfiguration(memory_limit=1024).memory_limit
    1024
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None
    experimental_device_ordinal: int | None = None


@dataclass(frozen=True)
class _Asked:
    """What was asked for; the process has one value of it."""

    visible: tuple[str, ...] | None = None
    """Names of visible physical devices; None for all."""
    logical: tuple[tuple[str, tuple[LogicalDeviceConfiguration, ...]], ...] = ()
    """By physical device: its parts."""
    growth: tuple[tuple[str, bool], ...] = ()
    physical: tuple[PhysicalDevice, ...] = ()
    """The hardware, as it was before anything was hidden or split."""


class _Holder:
    asked = _Asked()


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The hardware, hidden or not; stand-ins count. Starts nothing.

    >>> from meshwright import tf
    >>> tf.config.list_physical_devices("CPU")[0]
    PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')
    """
    found = _Holder.asked.physical or _physical()
    return [d for d in found if device_type in (None, d.device_type)]


def _physical() -> tuple[PhysicalDevice, ...]:
    everything = list_devices(replace(current_settings(), visible=None))
    ordered = sorted(everything, key=lambda d: d.kind != "CPU")
    return tuple(
        PhysicalDevice(f"/physical_device:{d.kind}:{d.index}", d.kind) for d in ordered
    )


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that operations can be put on; starts the runtime.

    >>> from meshwright import tf
    >>> tf.config.list_logical_devices()[0].name
    '/device:CPU:0'
    """
    initialize()
    ordered = sorted(usable_devices(), key=lambda d: d.kind != "CPU")
    shown = [d for d in ordered if not _is_hidden_cpu(d.kind)]
    return [
        LogicalDevice(d.name, d.kind) for d in shown if device_type in (None, d.kind)
    ]


def _is_hidden_cpu(kind: str) -> bool:
    visible = _Holder.asked.visible
    return kind == "CPU" and visible is not None and not _of_kind(visible, "CPU")


def _of_kind(names: Sequence[str], kind: str) -> list[str]:
    return [name for name in names if f":{kind}:" in name]


def set_visible_devices(devices: Any, device_type: str | None = None) -> None:
    """Chooses the physical devices that become logical ones.

    CPUs always stay usable: with none visible they are not listed.

    Arguments:
        devices: A physical device, or a list of them.
        device_type: The kind that this is about; all kinds if left out.
    """
    chosen = devices if isinstance(devices, list | tuple) else [devices]
    names = tuple(_known(device).name for device in chosen)
    everything = [d.name for d in list_physical_devices()]
    if device_type is not None:
        before = _Holder.asked.visible
        others = everything if before is None else before
        kept = [n for n in others if f":{device_type}:" not in n]
        names = tuple(n for n in everything if n in kept or n in names)
    before_now = _Holder.asked.visible
    if names == (tuple(everything) if before_now is None else before_now):
        return
    if is_initialized():
        raise RuntimeError("Visible devices cannot be modified after being initialized")
    _apply(replace(_Holder.asked, visible=names))


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The physical devices that become logical ones."""
    visible = _Holder.asked.visible
    return [
        d
        for d in list_physical_devices(device_type)
        if visible is None or d.name in visible
    ]


def set_logical_device_configuration(
    device: PhysicalDevice,
    logical_devices: Sequence[LogicalDeviceConfiguration] | None,
) -> None:
    """Makes one or several logical devices of a physical one.

    A CPU or a stand-in GPU can be split; a GPU cannot, but its memory can be limited.
    The smallest limit holds for all devices, CPUs included, and growth can be combined
    with it.

    Arguments:
        device: The physical device.
        logical_devices: Its parts; None or empty for the device as it is.
    """
    kind = _known(device).device_type
    parts = tuple(logical_devices or ())
    if kind not in ("CPU", "GPU"):
        raise ValueError(f"Virtual devices are not supported for {kind}")
    if kind == "GPU" and any(part.memory_limit is None for part in parts):
        raise ValueError("Setting memory limit is required for GPU virtual devices")
    asked = dict(_Holder.asked.logical)
    if asked.get(device.name, ()) == parts:
        return
    if is_initialized():
        raise RuntimeError("Virtual devices cannot be modified after being initialized")
    asked[device.name] = parts
    _apply(replace(_Holder.asked, logical=tuple(asked.items())))


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """The parts of a physical device; None if it was not split."""
    return list(dict(_Holder.asked.logical).get(_known(device).name, ())) or None


def _known(device: Any) -> PhysicalDevice:
    if not isinstance(device, PhysicalDevice) or device not in list_physical_devices():
        raise ValueError(
            f"Unrecognized device: {device!r}\nPass one of "
            "tf.config.list_physical_devices()."
        )
    return device


def _apply(asked: _Asked) -> None:
    """Hands over to `meshwright.configure`, before anything has started."""
    asked = replace(asked, physical=asked.physical or _physical())
    visible = [
        d for d in asked.physical if asked.visible is None or d.name in asked.visible
    ]
    parts = dict(asked.logical)
    limits = [p.memory_limit for ps in parts.values() for p in ps if p.memory_limit]
    settings = current_settings()
    counts = {
        kind: sum(
            max(1, len(parts.get(d.name, ()))) for d in visible if d.device_type == kind
        )
        for kind in ("CPU", "GPU")
    }
    if limits:
        settings = replace(settings, memory_limit=min(limits) * _MIB)
    if _plays_gpus():
        settings = replace(settings, virtual=Virtual("GPU", max(counts["GPU"], 1)))
        if not counts["GPU"]:
            settings = replace(settings, virtual=Virtual("CPU", max(counts["CPU"], 1)))
    else:
        settings = _for_hardware(settings, visible, parts, counts)
    apply(settings, "tf.config")
    _Holder.asked = asked


def _plays_gpus() -> bool:
    """Whether the GPUs are stand-ins, played by the CPU."""
    physical = _Holder.asked.physical or _physical()
    has_gpus = any(d.device_type == "GPU" for d in physical)
    virtual = current_settings().virtual
    return has_gpus and virtual is not None


def _for_hardware(settings: Any, visible: Any, parts: Any, counts: Any) -> Any:
    gpus = [d for d in visible if d.device_type == "GPU"]
    split = [d.name for d in gpus if len(parts.get(d.name, ())) > 1]
    if split:
        raise ConfigurationError(
            f"tf.config was asked to make several GPUs of {', '.join(split)}.",
            "One process uses a GPU as one device.",
            "To develop for several GPUs set MESHWRIGHT_VIRTUAL=GPU:2; to let programs "
            "share a GPU, give each a memory limit.",
        )
    everything = [d for d in _physical() if d.device_type == "GPU"]
    if len(gpus) < len(everything):
        names = tuple(d.name.replace("/physical_", "/") for d in gpus)
        settings = replace(settings, visible=names)
    if any(":CPU:" in name and part for name, part in parts.items()):
        settings = replace(settings, virtual=Virtual("CPU", max(counts["CPU"], 1)))
    return settings


def set_soft_device_placement(enabled: bool) -> None:
    """Whether an existing device takes the place of one that is not there."""
    set_soft_placement(bool(enabled))


def get_soft_device_placement() -> bool:
    """Whether an existing device takes the place of one that is not there."""
    return is_placement_soft()


def set_memory_growth(device: PhysicalDevice, enable: bool) -> None:
    """Whether the memory of a GPU is taken as it is needed, or at once."""
    kind = _known(device).device_type
    if kind == "CPU":
        raise ValueError(
            "Cannot set memory growth on non-GPU and non-Pluggable devices"
        )
    growth = dict(_Holder.asked.growth)
    if growth.get(device.name) == enable:
        return
    if is_initialized():
        raise RuntimeError(
            "Physical devices cannot be modified after being initialized"
        )
    growth[device.name] = bool(enable)
    _Holder.asked = replace(_Holder.asked, growth=tuple(growth.items()))
    wanted = _wanted_growth()
    if len(wanted) == 1:
        configure(memory_growth=wanted.pop())


def _wanted_growth() -> set[bool]:
    growth = dict(_Holder.asked.growth)
    visible = get_visible_devices("GPU")
    return {growth.get(d.name, False) for d in visible} if growth else set()


def get_memory_growth(device: PhysicalDevice) -> bool:
    """Whether the memory of a device is taken as it is needed; CPUs always do so."""
    if _known(device).device_type == "CPU":
        return True
    growth = dict(_Holder.asked.growth)
    return growth.get(device.name, bool(current_settings().memory_growth))


def _settle() -> None:
    """At the start there is a device, and all GPUs grow alike."""
    if _Holder.asked.visible == ():
        raise NotFoundError(None, None, "No CPU devices are available in this process")
    if len(_wanted_growth()) > 1:
        raise ValueError("Memory growth cannot differ between GPU devices")


def get_device_details(device: PhysicalDevice) -> dict[str, Any]:
    """What is known of a GPU; nothing of a CPU."""
    kind = _known(device).device_type
    if kind == "CPU":
        return {}
    everything = list_devices(replace(current_settings(), visible=None))
    index = int(device.name.rpartition(":")[2])
    same_kind = [d for d in everything if d.kind == kind]
    if index >= len(same_kind):
        return {}
    found = same_kind[index]
    details: dict[str, Any] = {"device_name": found.model}
    if found.compute_capability:
        details["compute_capability"] = tuple(
            int(part) for part in found.compute_capability.split(".")
        )
    return details


class _Peak:
    by_device: dict[str, int] = {}  # noqa: RUF012  what was seen, for stand-ins


def get_memory_info(device: str) -> dict[str, int]:
    """Bytes in use on a GPU now and at most.

    Of a stand-in, the arrays that live on it; at most means at most when asked.

    Arguments:
        device: As in `'GPU:0'`.
    """
    kind, _, index = device.removeprefix("/").removeprefix("device:").partition(":")
    if not index.isdigit():
        raise ValueError(
            f"Failed parsing device name: '{device}'. Note a valid device string "
            "should "
            'at least contain a device type and a device index, like "GPU:0".'
        )
    initialize()
    name = f"/device:{kind.upper()}:{index}"
    found = jax_devices().get(name)
    if found is None:
        raise ValueError(f"No matching devices found for '{device}'")
    if kind.upper() == "CPU":
        raise ValueError(f"Allocator stats not available for device '{device}'")
    stats = found.memory_stats()
    if stats:
        return {"current": stats["bytes_in_use"], "peak": stats["peak_bytes_in_use"]}
    current = sum(
        shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == found
    )
    peak = max(current, _Peak.by_device.get(name, 0))
    _Peak.by_device[name] = peak
    return {"current": current, "peak": peak}


def reset_memory_stats(device: str) -> None:
    """Lets the peak of a stand-in begin anew."""
    get_memory_info(device)
    _Peak.by_device.clear()


class _Experimental:
    """`tf.config.experimental`."""

    set_memory_growth = staticmethod(set_memory_growth)
    get_memory_growth = staticmethod(get_memory_growth)
    get_device_details = staticmethod(get_device_details)
    get_memory_info = staticmethod(get_memory_info)
    reset_memory_stats = staticmethod(reset_memory_stats)
    list_physical_devices = staticmethod(list_physical_devices)
    list_logical_devices = staticmethod(list_logical_devices)
    set_visible_devices = staticmethod(set_visible_devices)
    get_visible_devices = staticmethod(get_visible_devices)
    set_virtual_device_configuration = staticmethod(set_logical_device_configuration)
    get_virtual_device_configuration = staticmethod(get_logical_device_configuration)
    VirtualDeviceConfiguration = LogicalDeviceConfiguration

    def __getattr__(self, name: str) -> Any:
        return refuse("tf.config.experimental", {})(name)


experimental = _Experimental()


class _Threading:
    """`tf.config.threading`; what it asks for before the start is up to XLA."""

    def __init__(self) -> None:
        self._asked = {"Intra": 0, "Inter": 0}

    def _set(self, kind: str, count: int) -> None:
        if self._asked[kind] == count:
            return
        if is_initialized():
            raise RuntimeError(
                f"{kind} op parallelism cannot be modified after initialization."
            )
        self._asked[kind] = count

    def set_intra_op_parallelism_threads(self, num_threads: int) -> None:
        """Kept, and not used: XLA uses all cores that the process may run on."""
        self._set("Intra", num_threads)

    def set_inter_op_parallelism_threads(self, num_threads: int) -> None:
        """Kept, and not used: XLA uses all cores that the process may run on."""
        self._set("Inter", num_threads)

    def get_intra_op_parallelism_threads(self) -> int:
        """What was asked for."""
        return self._asked["Intra"]

    def get_inter_op_parallelism_threads(self) -> int:
        """What was asked for."""
        return self._asked["Inter"]


threading = _Threading()


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Whether `tf.function` leaves functions as they are."""
    from meshwright.tf.functions import run_eagerly as switch

    switch(run_eagerly)


def use_environment(environment: Any = os.environ) -> None:
    """Heeds TF_FORCE_GPU_ALLOW_GROWTH, when the façade is imported."""
    forced = environment.get("TF_FORCE_GPU_ALLOW_GROWTH", "").lower()
    if forced in ("true", "false") and not is_initialized():
        configure(memory_growth=forced == "true")


before_start(_settle)

__getattr__ = refuse(
    "tf.config",
    {
        "experimental_connect_to_cluster": "meshwright train --hosts a,b script.py",
        "experimental_run_functions_eagerly": "tf.config.run_functions_eagerly",
        "optimizer": "XLA optimizes what is compiled",
        "set_optimizer": "XLA optimizes what is compiled",
    },
)
