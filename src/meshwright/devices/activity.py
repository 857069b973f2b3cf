"""What the devices of this process do and hold at a moment."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.devices.nvidia import read_utilisation
from meshwright.devices.runtime import name_of

import jax

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One device; what nobody knows is None."""

    name: str
    memory: int | None = None
    """Bytes that are in use."""
    limit: int | None = None
    """Bytes that there are."""
    busy: float | None = None
    """The share of the time in which it worked, from 0 to 1."""


class ActivityMeter:
    """Looks at the devices now and then.

    GPUs count one by one. The CPU devices of a process share its cores and its memory,
    so they count together, as what the process takes.
    """

    def __init__(self) -> None:
        self._cores = len(os.sched_getaffinity(0))
        self._looked, self._worked = time.monotonic(), time.process_time()

    def look(self) -> list[Activity]:
        """What they do; how busy cores were counts from the last look."""
        devices = jax.local_devices()
        if devices[0].platform == "cpu":
            return [self._processor(len(devices))]
        rates = read_utilisation() if devices[0].platform == "gpu" else ()
        return [
            _accelerator(device, dict(enumerate(rates)).get(device.local_hardware_id))
            for device in devices
        ]

    def _processor(self, number: int) -> Activity:
        now, worked = time.monotonic(), time.process_time()
        passed = max(now - self._looked, 1e-9)
        busy = (worked - self._worked) / passed / self._cores
        self._looked, self._worked = now, worked
        name = "CPU" if number == 1 else f"{number} CPUs on {self._cores} cores"
        return Activity(name=name, memory=_resident_bytes(), busy=min(busy, 1.0))


def _accelerator(device: jax.Device, busy: float | None) -> Activity:
    held = device.memory_stats() or {}
    return Activity(
        name=name_of(device).removeprefix("/device:"),
        memory=held.get("bytes_in_use"),
        limit=held.get("bytes_limit"),
        busy=busy,
    )


def _resident_bytes() -> int | None:
    """What the process has in memory, where the system says so."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
