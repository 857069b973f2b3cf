"""The devices of the started runtime, under Meshwright's names.

JAX numbers what it finds per platform. Meshwright lists a stand-in GPU as a GPU
although JAX sees a CPU device there, so every translation between the two goes through
this file: GPUs that are real are JAX's CUDA devices; all others are its CPU devices,
stand-in GPUs first, so that the default device is `GPU:0`, as in TensorFlow.
"""

from collections.abc import Iterable
from functools import lru_cache

from meshwright.devices.device import Device
from meshwright.devices.discovery import devices, list_devices
from meshwright.devices.nvidia import read_nvml
from meshwright.devices.settings import Settings, current_settings
from meshwright.devices.start import num_starts

import jax
from jax.sharding import Sharding


def jax_devices() -> dict[str, jax.Device]:
    """Starts the runtime; the usable devices by name, in the order of `devices()`."""
    return {name: jax_device for name, (_, jax_device) in _table().items()}


def usable_devices() -> list[Device]:
    """Starts the runtime; the listed devices that JAX can use."""
    return [device for device, _ in _table().values()]


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
    for name, jax_device in jax_devices().items():
        if jax_device == device:
            return name
    # Devices of other processes, and any that appeared behind our back.
    return f"/device:{device.platform.upper()}:{device.id}"


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
