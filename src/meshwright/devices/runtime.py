"""The devices of the started runtime, under Meshwright's names.

JAX numbers what it finds per platform. Meshwright lists a stand-in GPU as a GPU
although JAX sees a CPU device there, so every translation between the two goes through
this file: GPUs that are real are JAX's CUDA devices; all others are its CPU devices,
stand-in GPUs first, so that the default device is `GPU:0`, as in TensorFlow.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from meshwright.devices.apart import is_apart
from meshwright.devices.device import Device
from meshwright.devices.discovery import devices, list_devices
from meshwright.devices.nvidia import read_nvml
from meshwright.devices.settings import Settings, current_settings
from meshwright.devices.start import num_starts

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def jax_devices() -> dict[str, jax.Device]:
    """Starts the runtime; the usable devices by name, in the order of `devices()`."""
    return {name: jax_device for name, (_, jax_device) in _table().items()}


def usable_devices() -> list[Device]:
    """Starts the runtime; the listed devices that JAX can use."""
    return [device for device, _ in _table().values()]


def jax_devices_of_all() -> dict[str, jax.Device]:
    """Starts the runtime; the usable devices of all processes by name.

    In a run of several processes names tell the process too, as in
    `/process:1/device:GPU:0`. Processes are taken to have like devices.
    """
    own = jax_devices()
    if jax.process_count() == 1 or is_apart():
        return own
    found: dict[str, jax.Device] = {}
    for process in range(jax.process_count()):
        theirs = jax.local_devices(process)
        found |= {
            f"/process:{process}{name}": theirs[_position(device)]
            for name, device in own.items()
            if device.platform == theirs[0].platform and _position(device) < len(theirs)
        }
    return found


def to_host(array: jax.Array) -> "np.ndarray[Any, Any]":
    """The whole of an array; all processes must ask, if not all of them have it."""
    if belongs_to_some(array.sharding):
        return _from_its_owners(array)
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def belongs_to_some(place: Any) -> bool:
    """Whether arrays in a place are known to some processes of a run and not to others.

    It is said of what lies on a mesh, which all processes know of; what a process made
    for itself is its own.
    """
    is_alone = jax.process_count() == 1 or is_apart()
    if is_alone or not isinstance(place, NamedSharding):
        return False
    return len({d.process_index for d in place.device_set}) < jax.process_count()


def _from_its_owners(array: jax.Array) -> "np.ndarray[Any, Any]":
    from jax.experimental import multihost_utils

    owners = {device.process_index for device in array.sharding.device_set}
    host = np.zeros(array.shape, array.dtype)
    if jax.process_index() in owners:
        mesh = array.sharding.mesh
        whole = NamedSharding(mesh, PartitionSpec())
        host = np.asarray(jax.jit(lambda x: x, out_shardings=whole)(array))
    is_source = jax.process_index() == min(owners)
    return np.asarray(multihost_utils.broadcast_one_to_all(host, is_source=is_source))


def _position(device: jax.Device) -> int:
    return jax.local_devices(backend=device.platform).index(device)


def why_unusable(kind: str) -> str:
    """Why a device of some kind is not among the usable ones."""
    usable = [d for d in usable_devices() if d.kind == kind]
    if usable:
        return f"there {_are(len(usable), kind)} here"
    if devices(kind):
        return (
            f"the hardware is there but JAX does not use it: it has no CUDA plugin, or "
            f"JAX_PLATFORMS={jax.config.jax_platforms or ''!r} excludes it; install "
            "meshwright[cuda13] or meshwright[cuda12]"
        )
    return f"there is no {kind} here"


def name_of(device: jax.Device) -> str:
    """Meshwright's name of one of JAX's devices."""
    for devices_by_name in (jax_devices, jax_devices_of_all):
        for name, jax_device in devices_by_name().items():
            if jax_device == device:
                return name
    # One that appeared behind our back.
    return f"/device:{device.platform.upper()}:{device.id}"


def usable_memory(device: jax.Device) -> int | None:
    """Bytes that a step may use on a device: its limit, or else the memory of a GPU."""
    known = {jax_device: found for found, jax_device in _table().values()}
    found = known.get(device)
    if found is None or found.memory_limit is not None:
        return current_settings().memory_limit
    is_gpu = found.kind == "GPU" and not found.stand_in
    return found.memory if is_gpu else None


def names_of(where: Sharding | Iterable[jax.Device]) -> tuple[str, ...]:
    """Meshwright's names of the devices of a sharding, or of several devices."""
    found = where.device_set if isinstance(where, Sharding) else where
    return tuple(name_of(device) for device in sorted(found, key=lambda d: d.id))


def _are(count: int, kind: str) -> str:
    return f"is only 1 {kind}" if count == 1 else f"are only {count} {kind}s"


def _table() -> dict[str, tuple[Device, jax.Device]]:
    jax.devices()  # starts the runtime, if it has not started
    return _table_since(num_starts(), current_settings())


@lru_cache(maxsize=1)
def _table_since(
    start: int, settings: Settings
) -> dict[str, tuple[Device, jax.Device]]:
    """The devices by name, kept until they change: every placed call asks."""
    cpus = iter(jax.local_devices(backend="cpu"))
    gpus = _cuda_devices()
    table = {}
    for device in list_devices(settings):
        is_real_gpu = device.kind == "GPU" and not device.stand_in
        jax_device = gpus.get(device.uuid) if is_real_gpu else next(cpus, None)
        if jax_device is not None:
            table[device.name] = device, jax_device
    return table


def _cuda_devices() -> dict[str | None, jax.Device]:
    """JAX's GPUs by NVML's identifier."""
    if jax.default_backend() != "gpu":
        return {}
    uuids = [gpu.uuid for gpu in read_nvml().gpus]
    return {uuids[d.local_hardware_id]: d for d in jax.local_devices(backend="cuda")}
