"""How long devices take to tell each other something."""

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.machines import Machine
from meshwright.planner.speed import Speed

import numpy as np

LINK_SHARE = 0.8
"""What collectives reach of the bandwidth of a link, by and large."""

HOST_LINK = 20e9
"""Bytes per second between devices whose link nobody knows: a bus of the host."""

LATENCY = 10e-6
"""Seconds of one hop, where nobody knows."""


class Group(NamedTuple):
    """Devices of one axis that talk to each other."""

    size: int
    stride: int
    """How far apart neighbours are in the order of the machine's devices."""


@dataclass(frozen=True)
class Links:
    """The alpha-beta model of a machine: a latency, and a time for each byte.

    Where collectives were timed on this machine, those times are used instead.

    Arguments:
        machine: The machine.
        speed: What was measured.
    """

    machine: Machine
    speed: Speed

    def all_reduce(self, num_bytes: float, group: Group) -> float:
        """Seconds to sum so many bytes over the devices of a group, for all of them."""
        return self._ring("all_reduce", num_bytes, group, 2)

    def all_gather(self, num_bytes: float, group: Group) -> float:
        """Seconds until all have the whole, which has so many bytes."""
        return self._ring("all_gather", num_bytes, group, 1)

    def reduce_scatter(self, num_bytes: float, group: Group) -> float:
        """Seconds to sum so many bytes, of which each keeps a part.

        XLA's programs for CPUs sum all of it everywhere.
        """
        if self.machine.kind == "CPU":
            return self.all_reduce(num_bytes, group)
        return self._ring("all_gather", num_bytes, group, 1)

    def send(self, num_bytes: float, group: Group) -> float:
        """Seconds until a neighbour has so many bytes."""
        timed = self._timed("permute", num_bytes, 2)
        if timed is not None:
            return timed
        bandwidth, latency = self._link(group)
        return latency + num_bytes / bandwidth

    def waiting(self, group: Group) -> float:
        """Seconds that devices wait for each other, whenever they exchange something.

        On CPUs they share cores, so that some are behind; it is timed there.
        """
        return self._timed("wait", 0.0, group.size) or 0.0

    def _ring(self, kind: str, num_bytes: float, group: Group, rounds: int) -> float:
        if group.size == 1 or not num_bytes:
            return 0.0
        timed = self._timed(kind, num_bytes, group.size)
        if timed is not None:
            return timed
        bandwidth, latency = self._link(group)
        hops = rounds * (group.size - 1)
        return hops * (latency + num_bytes / group.size / bandwidth)

    def _link(self, group: Group) -> tuple[float, float]:
        """Bandwidth and latency of the slowest link that a group uses.

        A ring that leaves a host does so once for each device that it has there, each
        over its own part of the network.
        """
        machine = self.machine
        inside = machine.link.bandwidth or HOST_LINK
        per_host = max(1, machine.devices_per_host // group.stride)
        if group.size <= per_host and group.stride < machine.devices_per_host:
            return LINK_SHARE * inside, machine.link.latency or LATENCY
        outside = (machine.network.bandwidth or inside) * min(per_host, group.size)
        latency = machine.network.latency or LATENCY
        return LINK_SHARE * min(inside, outside), latency

    def _timed(self, kind: str, num_bytes: float, num_devices: int) -> float | None:
        points = sorted(
            (point.bytes, point.seconds)
            for point in self.speed.collectives
            if point.kind == kind and point.num_devices == num_devices
        )
        if not points or not self.machine.is_here:
            return None
        sizes, seconds = np.array(points).T
        if num_bytes > sizes[-1]:
            return float(seconds[-1] * num_bytes / sizes[-1])
        return float(np.interp(num_bytes, sizes, seconds))
