"""`meshwright.configure`: settings that take effect at once, or say why they cannot."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from meshwright.devices import start
from meshwright.devices.compile_cache import use_compile_cache
from meshwright.devices.device import Device
from meshwright.devices.discovery import list_devices
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.nvidia import read_nvml
from meshwright.devices.scope import current_device
from meshwright.devices.settings import (
    Settings,
    current_settings,
    keep_settings,
    parse_compile_cache,
    parse_virtual,
)
from meshwright.devices.sizes import parse_bytes
from meshwright.devices.start import RuntimeSettings
from meshwright.errors import (
    ConfigurationError,
    LateConfigurationError,
    PlacementWarning,
)

import jax


def configure(
    visible: str | Device | Sequence[str | Device] | None = None,
    virtual: int | str | None = None,
    memory_limit: int | str | None = None,
    memory_growth: bool | None = None,
    compile_cache: str | os.PathLike[str] | None = None,
    compile_cache_size: int | str | None = None,
) -> None:
    """Sets up the devices of this process; what is left out stays as it is.

    It may be called at any time. While nothing lives on the devices it takes effect
    even after the runtime has started; later it raises an error that names the line
    that started the runtime. Setting the value in force is always fine.

    Arguments:
        visible: The devices that may be used, by name or kind; they are renumbered in
            this order. Accelerators that are not named are hidden; CPUs are hidden
            only if other CPUs are named. `[]` hides all accelerators.
        virtual: `4` or `'CPU:4'` makes four devices of the CPU; `'GPU:4'` makes four
            stand-in GPUs, for developing multi-GPU code without any. The environment
            variable MESHWRIGHT_VIRTUAL does the same.
        memory_limit: Bytes, or a text such as `'24MiB'`, that a step may use on each
            device. GPU allocators are bounded by it; on every device a compiled step
            that needs more is refused before it runs.
        memory_growth: True takes GPU memory as it is needed, False takes it at once.
            It can be combined with `memory_limit`. CPUs always grow.
        compile_cache: Where compiled programs are kept for the next start: `'on'`
            (the default: the user's folder for caches), `'off'`, or a folder. This
            can change at any time. The environment variable MESHWRIGHT_COMPILE_CACHE
            does the same.
        compile_cache_size: Bytes, or a text such as `'2GiB'` (the default), that these
            programs may take; the environment variable MESHWRIGHT_COMPILE_CACHE_SIZE
            does the same.

    Raises:
        ConfigurationError: A value has the wrong type or does not exist.
        LateConfigurationError: Arrays already live on the devices.

    >>> import meshwright as mw
    >>> mw.configure(memory_limit="2GiB")
    >>> mw.devices("CPU")[0].memory_limit
    2147483648
    """
    before = current_settings()
    given = {
        "visible": visible,
        "virtual": virtual,
        "memory_limit": memory_limit,
        "memory_growth": memory_growth,
        "compile_cache": compile_cache,
        "compile_cache_size": compile_cache_size,
    }
    settings = Settings(
        visible=before.visible if visible is None else _parse_visible(visible),
        virtual=before.virtual
        if virtual is None
        else parse_virtual(virtual, "virtual"),
        memory_limit=before.memory_limit
        if memory_limit is None
        else parse_bytes(memory_limit, "memory_limit"),
        memory_growth=before.memory_growth
        if memory_growth is None
        else _parse_growth(memory_growth),
        compile_cache=before.compile_cache
        if compile_cache is None
        else parse_compile_cache(compile_cache, "compile_cache"),
        compile_cache_size=before.compile_cache_size
        if compile_cache_size is None
        else parse_bytes(compile_cache_size, "compile_cache_size"),
    )
    call = ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None)
    apply(settings, f"configure({call})")


def apply(settings: Settings, source: str) -> None:
    """Puts settings into force.

    Arguments:
        settings: All of them.
        source: Who asks for them, for the error message.
    """
    # Listing under the new settings also checks the names in `visible`.
    wanted = _runtime_settings(settings, list_devices(settings))
    if not wanted.are_in_force():
        if start.has_started():
            _stop_runtime(source)
        wanted.write()
    before = current_settings()
    keep_settings(settings)
    if _cache_of(settings) != _cache_of(before):
        use_compile_cache(settings)
    if settings.memory_limit is not None:
        install_keras_hooks()
    _warn_of_hidden_gpus(settings)


def _cache_of(settings: Settings) -> tuple[str | None, int | None]:
    return settings.compile_cache, settings.compile_cache_size


def _runtime_settings(settings: Settings, listed: list[Device]) -> RuntimeSettings:
    """Translates settings into what JAX reads."""
    untouched = start.untouched_settings()
    gpus = [d for d in listed if d.kind == "GPU" and not d.stand_in]
    num_cpus = len(listed) - len(gpus)
    restricted = settings.virtual is not None or settings.visible is not None
    hides_gpus = settings.visible is not None and not gpus
    plays_gpus = settings.virtual is not None and settings.virtual.kind == "GPU"
    return RuntimeSettings(
        num_cpu_devices=num_cpus if restricted else untouched.num_cpu_devices,
        platforms="cpu" if hides_gpus or plays_gpus else untouched.platforms,
        cuda_visible_devices=_cuda_positions(gpus)
        if gpus and settings.visible is not None
        else untouched.cuda_visible_devices,
        client_options=_client_options(settings, gpus, untouched.client_options),
    )


def _client_options(
    settings: Settings, gpus: list[Device], untouched: str | dict[str, Any] | None
) -> str | dict[str, Any] | None:
    """What the GPU allocator is told. CPUs have none, and always grow."""
    memory: dict[str, Any] = {}
    totals = [gpu.memory for gpu in gpus if gpu.memory]
    if settings.memory_limit is not None and totals:
        # One fraction holds for all GPUs: the largest must keep the limit too.
        memory["memory_fraction"] = min(settings.memory_limit / max(totals), 1.0)
    if settings.memory_growth is not None and gpus:
        memory["preallocate"] = not settings.memory_growth
    if not memory:
        return untouched
    if isinstance(untouched, str):
        # JAX's own format: "name:value;name:value".
        untouched = dict(pair.split(":") for pair in untouched.split(";") if pair)
    return {**(untouched or {}), **memory}


def _cuda_positions(visible: list[Device]) -> str:
    """The GPUs as CUDA counts them before `visible` renumbers them."""
    uuids = [gpu.uuid for gpu in read_nvml().gpus]
    return ",".join(str(uuids.index(d.uuid)) for d in visible if d.uuid in uuids)


def _stop_runtime(source: str) -> None:
    place = start.start_place()
    living = start.living_arrays()
    rule = (
        "Devices can be configured before the runtime starts, or while nothing lives "
        "on them."
    )
    if jax.distributed.is_initialized():
        raise LateConfigurationError(
            f"{source} came after {place} had started a runtime of several processes.",
            rule,
            f"Move {source} before {place}.",
        )
    if current_device() is not None:
        raise LateConfigurationError(
            f"{source} was called inside of meshwright.device({current_device()!r}).",
            "The devices cannot change while a scope holds on to one of them.",
            f"Move {source} out of the scope.",
        )
    if living:
        more = f" and {len(living) - 3} more" if len(living) > 3 else ""
        live = "1 array lives" if len(living) == 1 else f"{len(living)} arrays live"
        raise LateConfigurationError(
            f"{source} came after {place} had started the runtime, and {live} on its "
            f"devices: {'; '.join(living[:3])}{more}.",
            rule,
            f"Move {source} before {place}, or delete these arrays first "
            "(keras.utils.clear_session() drops Keras' own).",
        )
    start.stop()


def _warn_of_hidden_gpus(settings: Settings) -> None:
    if settings.virtual is None or settings.virtual.kind != "GPU":
        return
    real = [gpu.model for gpu in read_nvml().gpus]
    if real:
        warnings.warn(
            f"virtual='GPU:{settings.virtual.count}' replaces the real GPUs of this "
            f"machine ({', '.join(real)}) by stand-ins that compute on the CPU.",
            PlacementWarning,
            stacklevel=4,
        )


def _parse_visible(
    visible: str | Device | Sequence[str | Device],
) -> tuple[str, ...]:
    given = [visible] if isinstance(visible, str | Device) else visible
    if not isinstance(given, Sequence) or not all(
        isinstance(entry, str | Device) for entry in given
    ):
        raise ConfigurationError(
            f"visible received {visible!r} (a {type(visible).__name__}).",
            "It takes names or kinds of devices: one, or a list of them.",
            "Write, for example, visible=['GPU:0', 'GPU:1'] or visible='CPU'.",
        )
    return tuple(_unrestricted_name(entry) for entry in given)


def _unrestricted_name(entry: str | Device) -> str:
    """A device's name before `visible` renumbers it; real GPUs are told by their id."""
    if isinstance(entry, Device) and entry.uuid is not None:
        uuids = [gpu.uuid for gpu in read_nvml().gpus]
        if entry.uuid in uuids:
            return f"GPU:{uuids.index(entry.uuid)}"
    return str(entry)


def _parse_growth(growth: object) -> bool:
    if isinstance(growth, bool):
        return growth
    raise ConfigurationError(
        f"memory_growth received {growth!r} (a {type(growth).__name__}).",
        "It takes True (GPU memory is taken as needed) or False (at once).",
        "Write memory_growth=True.",
    )
