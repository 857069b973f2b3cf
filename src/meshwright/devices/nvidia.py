"""NVIDIA GPUs as NVML tells of them, without claiming any of their memory."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from meshwright.devices.device import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of this machine; `links` name their peers by position in the list."""

    uuid: str
    model: str
    memory: int
    compute_capability: str
    pcie: Link
    nvlinks: tuple[tuple[int | None, int | None, int], ...]
    """(position of the peer or None for a switch, generation, number of links)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvml:
    """What NVML answered: the driver and the GPUs, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    because: str | None = None


def read_nvml() -> Nvml:
    """Lists the GPUs that CUDA would show to this process, in PCI order."""
    try:
        import pynvml
    except ImportError:
        return Nvml(because="the package nvidia-ml-py is not installed")
    try:
        with _nvml_session(pynvml):
            return Nvml(gpus=_visible_gpus(pynvml), driver=_driver_version(pynvml))
    except pynvml.NVMLError as error:
        return Nvml(because=f"NVML answered: {error}")


def read_utilisation() -> tuple[float, ...]:
    """How busy each visible GPU was of late, from 0 to 1; empty if NVML is silent."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        with _nvml_session(pynvml):
            return _utilisation(pynvml)
    except pynvml.NVMLError:
        return ()


@contextmanager
def _nvml_session(nvml: ModuleType) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _utilisation(nvml: ModuleType) -> tuple[float, ...]:
    rates = map(nvml.nvmlDeviceGetUtilizationRates, _visible_handles(nvml))
    return tuple(rate.gpu / 100 for rate in rates)


def _driver_version(nvml: ModuleType) -> str:
    return str(nvml.nvmlSystemGetDriverVersion())


def _visible_handles(nvml: ModuleType) -> list[Any]:
    handles = [
        nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
    ]
    uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    chosen = visible_positions(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [handles[i] for i in chosen]


def _visible_gpus(nvml: ModuleType) -> tuple[Gpu, ...]:
    handles = _visible_handles(nvml)
    buses = [_bus_of(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
    return tuple(_read_gpu(nvml, handle, buses) for handle in handles)


def visible_positions(uuids: list[str], variable: str | None) -> list[int]:
    """Which GPUs CUDA shows, in its order, for a value of CUDA_VISIBLE_DEVICES.

    CUDA reads numbers or beginnings of UUIDs and stops at the first that is wrong.

    >>> visible_positions(["GPU-aa", "GPU-bb", "GPU-cc"], "2,GPU-a,7,1")
    [2, 0]
    >>> visible_positions(["GPU-aa", "GPU-bb"], None)
    [0, 1]
    """
    if variable is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdecimal():
            found = [int(entry)] if int(entry) < len(uuids) else []
        else:
            found = [i for i, u in enumerate(uuids) if entry and u.startswith(entry)]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _read_gpu(nvml: ModuleType, handle: Any, buses: list[str]) -> Gpu:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        model=str(nvml.nvmlDeviceGetName(handle)),
        memory=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=f"{major}.{minor}",
        pcie=_read_pcie(nvml, handle),
        nvlinks=_read_nvlinks(nvml, handle, buses),
    )


def _read_pcie(nvml: ModuleType, handle: Any) -> Link:
    try:
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        lanes = int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    except nvml.NVMLError:
        # Virtual machines often hide the bus; unknown is not zero.
        generation, lanes = None, 0
    return Link(kind="PCIe", generation=generation, lanes=lanes, peer=None)


def _read_nvlinks(
    nvml: ModuleType, handle: Any, buses: list[str]
) -> tuple[tuple[int | None, int | None, int], ...]:
    ends: Counter[tuple[int | None, int | None]] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            generation = int(nvml.nvmlDeviceGetNvLinkVersion(handle, link))
            remote = _bus_of(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
        except nvml.NVMLError:
            continue
        peer = buses.index(remote) if remote in buses else None
        ends[peer, generation] += 1
    return tuple((peer, gen, count) for (peer, gen), count in ends.items())


def _bus_of(pci_info: Any) -> str:
    bus = pci_info.busId
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()
