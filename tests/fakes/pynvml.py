"""Stands in for NVML: a machine with four GPUs, the first two joined by NVLink."""

from types import SimpleNamespace

NVML_NVLINK_MAX_LINKS = 4


class NVMLError(Exception):
    pass


MODELS = ["NVIDIA H200", "NVIDIA H200", "NVIDIA L4", "NVIDIA L4"]
MEMORY = [150 * 2**30, 150 * 2**30, 24 * 2**30, 24 * 2**30]
is_open = 0


def nvmlInit() -> None:
    global is_open
    is_open += 1


def nvmlShutdown() -> None:
    global is_open
    is_open -= 1


def nvmlSystemGetDriverVersion() -> str:
    return "580.1"


def nvmlDeviceGetCount() -> int:
    return len(MODELS)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}{handle}{handle}"


def nvmlDeviceGetName(handle: int) -> str:
    return MODELS[handle]


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(total=MEMORY[handle])


def nvmlDeviceGetCudaComputeCapability(handle: int) -> tuple[int, int]:
    return (9, 0) if handle < 2 else (8, 9)


def nvmlDeviceGetMaxPcieLinkGeneration(handle: int) -> int:
    if handle == 3:
        raise NVMLError("hidden by the virtual machine")
    return 5 if handle < 2 else 4


def nvmlDeviceGetMaxPcieLinkWidth(handle: int) -> int:
    return 16


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"0000:0{handle}:00.0".encode())


def nvmlDeviceGetNvLinkState(handle: int, link: int) -> int:
    if handle >= 2:
        raise NVMLError("not supported")
    return link < 3


def nvmlDeviceGetNvLinkVersion(handle: int, link: int) -> int:
    return 4


def nvmlDeviceGetNvLinkRemotePciInfo(handle: int, link: int) -> SimpleNamespace:
    # Two links to the other GPU, one to a switch.
    bus = f"0000:0{1 - handle}:00.0" if link < 2 else "0000:ff:00.0"
    return SimpleNamespace(busId=bus.encode())
