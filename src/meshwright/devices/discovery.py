"""Lists the devices of this process without claiming any of them."""

import platform
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path

from meshwright.devices.device import Device, Link
from meshwright.devices.names import parse_device_name, parse_kind
from meshwright.devices.nvidia import Gpu, read_nvml
from meshwright.devices.settings import Settings, current_settings
from meshwright.devices.start import num_cpu_devices
from meshwright.errors import ConfigurationError


def devices(kind: str | None = None) -> list[Device]:
    """Lists the devices that this process may use; starts and claims nothing.

    GPUs are found through NVML, CPUs through the operating system. Virtual devices
    and restrictions from `meshwright.configure` count.

    Arguments:
        kind: `'CPU'`, `'GPU'` or `'TPU'` to list only these.

    Returns:
        Accelerators first, then CPUs, each kind numbered from zero.

    >>> import meshwright as mw
    >>> mw.devices("cpu")[0].name
    '/device:CPU:0'
    """
    wanted = parse_kind(kind) if kind is not None else None
    listed = list_devices(current_settings())
    return [d for d in listed if wanted is None or d.kind == wanted]


def list_devices(settings: Settings) -> list[Device]:
    """The devices under some settings, which need not be the ones in force."""
    existing = _existing_devices(settings)
    return _renumber(_restrict(existing, settings.visible), settings.memory_limit)


def _existing_devices(settings: Settings) -> list[Device]:
    """Every device, before `visible` takes some away."""
    virtual = settings.virtual
    if virtual and virtual.kind == "GPU":
        return [_stand_in_gpu(i) for i in range(virtual.count)] + [_cpu(0)]
    gpus = read_nvml().gpus
    num_cpus = virtual.count if virtual else num_cpu_devices()
    return [_real_gpu(i, g) for i, g in enumerate(gpus)] + [
        _cpu(i) for i in range(num_cpus)
    ]


def _restrict(existing: list[Device], visible: tuple[str, ...] | None) -> list[Device]:
    """Keeps what `visible` names, in its order.

    Accelerators that are not named are hidden. CPUs are hidden only if others of them
    are named, because the host is always there.
    """
    if visible is None:
        return existing
    chosen: list[Device] = []
    for text in visible:
        chosen += _named(text, existing)
    if len({d.name for d in chosen}) < len(chosen):
        raise ConfigurationError(
            f"visible received {list(visible)}, which names a device twice.",
            "Each device is visible once.",
            f"Name each once, out of: {', '.join(d.name for d in existing)}.",
        )
    hosts = [d for d in existing if d.kind == "CPU"]
    if not any(d.kind == "CPU" for d in chosen):
        chosen += hosts
    return sorted(chosen, key=lambda d: d.kind == "CPU")


def _named(text: str, existing: list[Device]) -> list[Device]:
    names = tuple(d.name for d in existing)
    name = parse_device_name(text, names)
    found = [d for d in existing if d.kind == name.kind]
    if name.index is not None:
        found = [d for d in found if d.index == name.index]
    if not found:
        raise ConfigurationError(
            f"visible names {name}, which does not exist.",
            "Only existing devices can be made visible.",
            f"Name some of: {', '.join(names)}.",
        )
    return found


def _renumber(listed: list[Device], limit: int | None) -> list[Device]:
    renumbered: list[Device] = []
    new_names: dict[str, str] = {}
    for device in listed:
        index = sum(d.kind == device.kind for d in renumbered)
        name = f"/device:{device.kind}:{index}"
        new_names[device.name] = name
        memory = limit if device.stand_in else device.memory
        renumbered.append(
            replace(device, name=name, index=index, memory_limit=limit, memory=memory)
        )
    return [replace(d, links=_follow_links(d.links, new_names)) for d in renumbered]


def _follow_links(
    links: tuple[Link, ...], new_names: dict[str, str]
) -> tuple[Link, ...]:
    """Links under the new names, without those that lead to hidden devices."""
    return tuple(
        replace(link, peer=new_names[link.peer]) if link.peer else link
        for link in links
        if link.peer is None or link.peer in new_names
    )


def _real_gpu(index: int, gpu: Gpu) -> Device:
    nvlinks = tuple(
        Link(
            kind="NVLink",
            generation=generation,
            lanes=count,
            peer=None if peer is None else f"/device:GPU:{peer}",
        )
        for peer, generation, count in gpu.nvlinks
    )
    return Device(
        name=f"/device:GPU:{index}",
        kind="GPU",
        index=index,
        host=_host(),
        memory=gpu.memory,
        model=gpu.model,
        compute_capability=gpu.compute_capability,
        uuid=gpu.uuid,
        links=(gpu.pcie, *nvlinks) if gpu.pcie.lanes else nvlinks,
    )


def _stand_in_gpu(index: int) -> Device:
    return Device(
        name=f"/device:GPU:{index}",
        kind="GPU",
        index=index,
        host=_host(),
        memory=None,
        model=f"stand-in GPU ({_cpu_model()})",
        stand_in=True,
    )


def _cpu(index: int) -> Device:
    import psutil

    return Device(
        name=f"/device:CPU:{index}",
        kind="CPU",
        index=index,
        host=_host(),
        memory=psutil.virtual_memory().total,
        model=_cpu_model(),
    )


@cache
def _host() -> str:
    return socket.gethostname()


@cache
def _cpu_model() -> str:
    import psutil

    cores = psutil.cpu_count() or 1
    return f"{_cpu_name()}, {cores} core{'s' if cores > 1 else ''}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
