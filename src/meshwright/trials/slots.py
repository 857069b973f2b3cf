"""Where trials run: devices, or shares of them, dealt out to processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.devices.device import Device
from meshwright.devices.discovery import devices as list_devices
from meshwright.devices.names import parse_device_name
from meshwright.devices.settings import ENVIRONMENT_VARIABLE, current_settings
from meshwright.devices.sizes import format_bytes, is_count, parse_bytes
from meshwright.errors import ConfigurationError
from meshwright.launch.shares import share_cores, usable_cores

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FOR_TRIALS = 0.9
"""The part of a GPU's memory that its trials share; the rest is for CUDA itself."""
_EXAMPLE = "Write devices='auto', devices=2 or devices=['GPU:0', 'GPU:1']."

Devices = str | int | Sequence[str | Device]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """A place for one trial at a time."""

    number: int
    device: str
    """`GPU:0`, or `GPU:0/2` for the third share of it; `core 3` without devices."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that show a process this device and no other."""
    cores: tuple[int, ...] = ()
    """The cores that it runs on; any if there are none."""


@dataclass(frozen=True, slots=True)
class Deal:
    """All slots of this launcher, and why there are so many."""

    slots: tuple[Slot, ...]
    because: str


def deal_slots(
    devices: Devices = "auto",
    per_device: int = 1,
    memory: int | str | None = None,
) -> Deal:
    """Deals devices out to trials.

    Arguments:
        devices: `'auto'` takes every GPU, or every core where there is none; a number
            takes so many of them; or names.
        per_device: So many trials share a device.
        memory: What each may have of a GPU's memory; an equal part if left out.

    Raises:
        ConfigurationError: A device that is not there or named twice, or shares that
            it cannot be cut into.
    """
    if not is_count(per_device) or per_device < 1:
        raise ConfigurationError(
            f"per_device received {per_device!r}.",
            "It is how many trials share a device, one at least.",
            "Write per_device=1, or 4 for four trials on each device.",
        )
    chosen = _choose(devices)
    if chosen is None:
        _refuse_budget(memory, "cores")
        count = devices if isinstance(devices, int) else None
        return _deal_cores(count, per_device)
    shares = [(d, share) for d in chosen for share in range(per_device)]
    cores = share_cores(usable_cores(), len(shares))
    is_gpu = chosen[0].kind == "GPU"
    if not is_gpu or chosen[0].stand_in:
        _refuse_budget(memory, chosen[0].model)
    slots = tuple(
        Slot(
            number=number,
            device=f"{d.kind}:{d.index}" + (f"/{share}" if per_device > 1 else ""),
            environment=_environment(d, per_device, memory),
            cores=() if is_gpu and not d.stand_in else cores[number],
        )
        for number, (d, share) in enumerate(shares)
    )
    names = ", ".join(f"{d.kind}:{d.index}" for d in chosen)
    each = f", {per_device} on each" if per_device > 1 else ""
    return Deal(slots, f"one trial for each of {names}{each}")


def _choose(devices: Devices) -> list[Device] | None:
    """The devices that are meant; None for the cores of a host without GPUs."""
    here = list_devices()
    gpus = [d for d in here if d.kind == "GPU"]
    is_virtual = current_settings().virtual is not None
    everything = gpus or (here if is_virtual else None)
    if devices == "auto":
        return everything
    if isinstance(devices, int):
        return None if everything is None else _first(everything, devices)
    names = devices.split(",") if isinstance(devices, str) else [*map(str, devices)]
    if [name.strip().upper() for name in names] == ["CPU"] and not is_virtual:
        return None
    chosen = [found for name in names for found in _named(name.strip(), here)]
    if not chosen or len({d.name for d in chosen}) < len(chosen):
        raise ConfigurationError(
            f"devices received {devices!r}, which names "
            f"{'a device twice' if chosen else 'no device'}.",
            "Each device gets trials of its own.",
            f"{_EXAMPLE} per_device=2 puts two trials on each.",
        )
    if len({d.kind for d in chosen}) > 1:
        raise ConfigurationError(
            f"devices received {devices!r}, devices of several kinds.",
            "The trials of a study are compared, so all run on one kind of device.",
            _EXAMPLE,
        )
    return chosen


def _first(everything: list[Device], count: int) -> list[Device]:
    if isinstance(count, bool) or not 1 <= count <= len(everything):
        names = ", ".join(f"{d.kind}:{d.index}" for d in everything)
        raise ConfigurationError(
            f"devices received {count!r}; there are {len(everything)}: {names}.",
            "A number takes the first so many devices.",
            f"Write a number from 1 to {len(everything)}.",
        )
    return everything[:count]


def _named(text: str, here: list[Device]) -> list[Device]:
    name = parse_device_name(text, tuple(d.name for d in here))
    found = [d for d in here if d.kind == name.kind and name.index in (None, d.index)]
    if not found:
        raise ConfigurationError(
            f"devices names {text}, which is not here.",
            "Trials run on devices of this host.",
            f"Name some of: {', '.join(d.name for d in here)}.",
        )
    return found


def _deal_cores(count: int | None, per_device: int) -> Deal:
    """Every core is a device, or so many equal parts of them."""
    cores = usable_cores()
    available = len(cores) or 1
    if count is not None and (isinstance(count, bool) or not count >= 1):
        raise ConfigurationError(
            f"devices received {count!r}.",
            "A number says into how many parts the cores of this host are dealt.",
            f"Write a number from 1 to {available}, the cores that are here.",
        )
    number = (count or available) * per_device
    parts = share_cores(cores, number)
    slots = tuple(
        Slot(
            number=i,
            device=_name_of(part, i),
            environment={"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            cores=part,
        )
        for i, part in enumerate(parts)
    )
    how = "each has its own" if parts[0] else "they share them"
    words = f"{number} trial{'s' if number > 1 else ''} at a time"
    return Deal(slots, f"{words} on {available} cores without a GPU; {how}")


def _name_of(cores: Sequence[int], number: int) -> str:
    if not cores:
        return f"CPU/{number}"
    return f"core{'s' if len(cores) > 1 else ''} {','.join(map(str, cores))}"


def _environment(
    device: Device, per_device: int, memory: int | str | None
) -> dict[str, str]:
    """What shows a process one device, as its first one, and its share of it."""
    if device.stand_in or device.kind == "CPU":
        return {
            ENVIRONMENT_VARIABLE: f"{device.kind}:1",
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
        }
    shown = {"CUDA_VISIBLE_DEVICES": device.uuid or str(device.index)}
    if per_device > 1 or memory is not None:
        shown[_FRACTION] = f"{_fraction(device, per_device, memory):.4f}"
    return shown


def _fraction(device: Device, per_device: int, memory: int | str | None) -> float:
    if memory is None:
        return _FOR_TRIALS / per_device
    wanted = parse_bytes(memory, "memory")
    if device.memory is None or wanted * per_device > device.memory:
        has = "unknown" if device.memory is None else format_bytes(device.memory)
        raise ConfigurationError(
            f"{per_device} trials with {format_bytes(wanted)} each on {device.name}, "
            f"whose memory is {has}.",
            "The trials that share a device share its memory.",
            "Give each less memory, or put fewer on a device with per_device.",
        )
    return wanted / device.memory


def _refuse_budget(memory: int | str | None, where: str) -> None:
    if memory is not None:
        raise ConfigurationError(
            f"memory received {memory!r} for trials on {where}.",
            "A budget is kept by the allocator of a GPU; a CPU has none.",
            "Leave memory out, and choose how many trials run at a time with devices.",
        )
