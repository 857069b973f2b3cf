"""The machine that is planned for: devices that are here, or `4x8xH100`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import isfinite
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.devices.catalog import Accelerator, LinkSpeed, accelerator_of
from meshwright.devices.device import Device
from meshwright.devices.discovery import devices
from meshwright.devices.inventory import parse_inventory
from meshwright.devices.names import parse_device_name
from meshwright.devices.sizes import format_bytes, parse_bytes
from meshwright.errors import MachineError

GPU_FRACTION = 0.75
"""What JAX's allocator takes of a GPU if nobody sets a limit."""

OTHER_FRACTION = 0.9
"""Of the memory of CPUs and TPUs, which have no such allocator: the rest is for the
operating system, the runtime and Python."""

UNKNOWN_LINK = LinkSpeed()

TOLERANCE = 1.1
"""A card of "80 GB" may have less by its driver; more than that is a mistake."""

MOST_DEVICES = 100_000
"""More than any machine has."""

DeviceSpec = str | Sequence[str | Device] | None
"""`'8xH200'`, some of the devices that are here, or None for the best of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Equal hosts with equal devices; `None` means unknown.

    >>> machine = parse_machine("4x8xH100", memory="40GiB")
    >>> machine.num_devices, machine.usable_memory
    (32, 42949672960)
    >>> print(machine)
    4 x 8 x H100-SXM, NVLink 4, InfiniBand NDR 400 Gb/s between hosts
    """

    title: str
    """What one device is called."""
    kind: str
    """`'CPU'`, `'GPU'` or `'TPU'`."""
    num_hosts: int
    devices_per_host: int
    accelerator: Accelerator | None = None
    """What the catalog knows of the devices."""
    memory: int | None = None
    """Bytes of one device."""
    memory_limit: int | None = None
    """Bytes of it that somebody said a step may use."""
    limit_source: str = ""
    """Who did."""
    price: float | None = None
    """US dollars for one device for one hour."""
    price_date: date | None = None
    """When the catalog's price was read; None for one that was given."""
    link: LinkSpeed = UNKNOWN_LINK
    """Between devices of one host."""
    network: LinkSpeed = UNKNOWN_LINK
    """Between hosts."""
    shares_cores: bool = False
    """Whether all devices are made of one CPU, so that more of them add no speed."""
    is_here: bool = False
    """Whether these are devices of this process."""
    devices: tuple[str, ...] = ()
    """Their names, if they are here; those of one process, if there are several."""

    @property
    def num_devices(self) -> int:
        """Devices of all hosts together."""
        return self.num_hosts * self.devices_per_host

    @property
    def usable_memory(self) -> int | None:
        """Bytes of one device that a step may use: the limit, or a share."""
        if self.memory_limit is not None or self.memory is None:
            return self.memory_limit
        return int(self.memory * self._fraction)

    @property
    def memory_because(self) -> str:
        """Why so many of them."""
        if self.memory_limit is not None:
            return self.limit_source
        if self.memory is None:
            return "the memory of the devices is not known"
        share = f"{self._fraction:.0%} of {format_bytes(self.memory)}"
        if self.kind == "GPU":
            return f"{share}, which is what JAX takes of a GPU without a limit"
        return f"{share}; the rest is for everything else that runs"

    @property
    def _fraction(self) -> float:
        return GPU_FRACTION if self.kind == "GPU" else OTHER_FRACTION

    def dollars_per_hour(self, num_devices: int | None = None) -> float | None:
        """What some of its devices cost, or all of them."""
        number = self.num_devices if num_devices is None else num_devices
        return None if self.price is None else self.price * number

    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices to compare: 1, 2, 4, ... and all of them.

        >>> parse_machine("12xH200").sizes()
        (1, 2, 4, 8, 12)
        """
        powers = [2**i for i in range(self.num_devices.bit_length())]
        fewer = [n for n in powers if n < self.num_devices and self._hosts_of(n)]
        return (*fewer, self.num_devices)

    def part(self, num_devices: int) -> "Machine":
        """The same machine with fewer devices, on as few hosts as can be.

        >>> print(parse_machine("4x8xH100").part(4))
        4 x H100-SXM, NVLink 4
        """
        hosts = self._hosts_of(num_devices)
        assert hosts is not None, f"{num_devices} of {self}"
        per_host = num_devices // hosts
        memory = self.memory
        if memory is not None and self.shares_cores:
            # Devices of one CPU share its memory too.
            memory = memory * self.devices_per_host // per_host
        return replace(
            self,
            num_hosts=hosts,
            devices_per_host=per_host,
            memory=memory,
            devices=self.devices[:per_host],
        )

    def _hosts_of(self, num_devices: int) -> int | None:
        """The fewest hosts that have so many devices in equal parts."""
        for hosts in range(1, self.num_hosts + 1):
            rest = num_devices % hosts
            if not rest and num_devices // hosts <= self.devices_per_host:
                return hosts
        return None

    def __str__(self) -> str:
        counts = f"{self.devices_per_host} x {self.title}"
        parts = [f"{self.num_hosts} x {counts}" if self.num_hosts > 1 else counts]
        if self.shares_cores and self.num_devices > 1:
            parts.append("which share their cores")
        if self.link.name and self.devices_per_host > 1:
            parts.append(self.link.name)
        if self.network.name and self.num_hosts > 1:
            parts.append(f"{self.network.name} between hosts")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        return {
            "name": str(self),
            "kind": self.kind,
            "num_hosts": self.num_hosts,
            "devices_per_host": self.devices_per_host,
            "num_devices": self.num_devices,
            "memory": self.memory,
            "usable_memory": self.usable_memory,
            "memory_because": self.memory_because,
            "price": self.price,
            "price_date": None if self.price_date is None else str(self.price_date),
            "shares_cores": self.shares_cores,
            "is_here": self.is_here,
        }


def parse_machine(
    spec: DeviceSpec | Machine = None,
    *,
    memory: int | str | None = None,
    price: float | None = None,
) -> Machine:
    """Reads what is to be planned for; starts and claims nothing.

    Arguments:
        spec: `'8xH200'`, `'4x8xH100'` for four hosts of eight, a list of devices that
            are here, or None for all of the best kind.
        memory: Bytes that a step may use on each device, or a text such as `'40GiB'`;
            if left out, the limit of `meshwright.configure`, or else a share of what a
            device has (`GPU_FRACTION`, `OTHER_FRACTION`).
        price: US dollars for one device for one hour; the catalog's if left out.

    Raises:
        CatalogError: A text of another form, or an accelerator that is not known.
        ConfigurationError: `memory` is no size.
        MachineError: Devices that make no machine, more memory than a device has, a
            price that is none.

    >>> machine = parse_machine("8xH200")
    >>> machine.num_devices, machine.link.name
    (8, 'NVLink 4')
    """
    if isinstance(spec, Machine):
        machine = spec
    elif isinstance(spec, str):
        machine = _from_catalog(spec)
    else:
        machine = _of_devices(_devices_here(spec))
    if memory is not None:
        machine = _with_memory(machine, parse_bytes(memory, "memory"))
    if price is not None:
        machine = replace(machine, price=_checked_price(price), price_date=None)
    return machine


def _from_catalog(spec: str) -> Machine:
    inventory = parse_inventory(spec)
    if inventory.num_devices > MOST_DEVICES:
        raise MachineError(
            f"{spec!r} has {inventory.num_devices:,} devices.",
            f"A machine has at most {MOST_DEVICES:,}.",
            "Write, for example, '4x8xH100' for four hosts of eight.",
        )
    known = inventory.accelerator
    return Machine(
        title=known.name,
        kind=known.kind,
        num_hosts=inventory.hosts,
        devices_per_host=inventory.devices_per_host,
        accelerator=known,
        memory=known.memory,
        price=known.price.value if known.price else None,
        price_date=known.price.date if known.price else None,
        link=known.link,
        network=known.network,
    )


def _of_devices(chosen: list[Device]) -> Machine:
    first = chosen[0]
    known = _slowest([accelerator_of(device) for device in chosen])
    shares = first.kind == "CPU" or first.stand_in
    share = len(chosen) if first.kind == "CPU" else 1
    memories = [d.memory // share for d in chosen if d.memory is not None]
    memory = min(memories) if len(memories) == len(chosen) else None
    limits = [d.memory_limit for d in chosen if d.memory_limit is not None]
    return Machine(
        title=known.name if known else f"{first.kind} ({first.model})",
        kind=first.kind,
        # Processes are taken for hosts: a process sees only its own devices.
        num_hosts=process_count(),
        devices_per_host=len(chosen),
        accelerator=known,
        memory=memory,
        memory_limit=min(limits, default=None),
        limit_source="the memory_limit of meshwright.configure" if limits else "",
        price=known.price.value if known and known.price else None,
        price_date=known.price.date if known and known.price else None,
        link=known.link if known else UNKNOWN_LINK,
        network=known.network if known else UNKNOWN_LINK,
        shares_cores=shares,
        is_here=True,
        devices=tuple(device.name for device in chosen),
    )


def _devices_here(wanted: Sequence[str | Device] | None) -> list[Device]:
    existing = devices()
    if wanted is None:
        return [d for d in existing if d.kind != "CPU"] or existing
    if not isinstance(wanted, list | tuple) or not wanted:
        raise MachineError(
            f"devices received {wanted!r} (a {type(wanted).__name__}).",
            "It takes a text such as '8xH200', a list of at least one device that is "
            "here, or None for all of the best kind.",
            f"Write, for example, devices='8xH200' or devices=[{existing[0].name!r}].",
        )
    names = tuple(device.name for device in existing)
    by_name = dict(zip(names, existing, strict=True))
    asked = [str(parse_device_name(str(each), names)) for each in wanted]
    chosen = [by_name[name] for name in asked if name in by_name]
    kinds = {device.kind for device in chosen}
    if len(set(asked)) < len(wanted) or len(chosen) < len(asked) or len(kinds) > 1:
        raise MachineError(
            f"devices received {asked}.",
            "They are devices of one kind that exist here, each named once.",
            f"Name some of: {', '.join(names)}.",
        )
    return chosen


def _slowest(found: list[Accelerator | None]) -> Accelerator | None:
    """The one that the others wait for; None if one of them is not known."""
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    return min(known, key=lambda each: max(each.peak_flops.values(), default=0.0))


def _with_memory(machine: Machine, wanted: int) -> Machine:
    known = None if machine.shares_cores else machine.memory
    if known is not None and wanted > TOLERANCE * known:
        raise MachineError(
            f"memory received {format_bytes(wanted)} for {machine.title}.",
            f"One such device has {format_bytes(known)}.",
            "Use less, or other devices.",
        )
    return replace(machine, memory_limit=wanted, limit_source="as memory= says")


def _checked_price(price: Any) -> float:
    is_number = isinstance(price, int | float) and not isinstance(price, bool)
    if not is_number or not isfinite(price) or price < 0:
        raise MachineError(
            f"price received {price!r} (a {type(price).__name__}).",
            "A price is US dollars for one device for one hour, from 0.",
            "Write, for example, price=2.5.",
        )
    return float(price)
