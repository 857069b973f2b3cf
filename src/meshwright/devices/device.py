"""One device and its links, as plain data."""

from dataclasses import dataclass
from typing import Any

from meshwright.devices.sizes import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A connection of a device: to its host, to a switch, or to one of its peers."""

    kind: str
    """`'PCIe'` or `'NVLink'`."""
    generation: int | None
    """The generation of the link, `None` where the driver does not tell."""
    lanes: int
    """PCIe lanes, or NVLink links that go the same way."""
    peer: str | None
    """Name of the device at the other end; `None` for the host or a switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device of this process.

    >>> device = Device(name="/device:CPU:0", kind="CPU", index=0, host="here",
    ...                 memory=2**30, model="generic")
    >>> print(device)
    /device:CPU:0
    """

    name: str
    """The full name, `/device:GPU:0`."""
    kind: str
    """`'CPU'`, `'GPU'` or `'TPU'`."""
    index: int
    """The number among the devices of its kind."""
    host: str
    """The machine it is in."""
    memory: int | None
    """Its memory in bytes; `None` if unknown."""
    model: str
    """What the hardware calls itself."""
    memory_limit: int | None = None
    """The bytes a step may use on it; `None` for no limit."""
    stand_in: bool = False
    """True for a GPU that is played by the CPU."""
    compute_capability: str | None = None
    """NVIDIA's compute capability, `'9.0'`."""
    uuid: str | None = None
    """The driver's identifier."""
    links: tuple[Link, ...] = ()
    """What connects it."""

    def __str__(self) -> str:
        return self.name

    def describe(self) -> str:
        """One line for people: name, model, memory, limit, links."""
        parts = [self.model]
        if self.memory is not None:
            parts.append(format_bytes(self.memory))
        if self.memory_limit is not None:
            parts.append(f"limit {format_bytes(self.memory_limit)}")
        if self.compute_capability:
            parts.append(f"compute {self.compute_capability}")
        parts += [_describe_link(link) for link in self.links]
        return f"{self.name}  {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        fields = {slot: getattr(self, slot) for slot in self.__slots__}
        links = [{s: getattr(k, s) for s in Link.__slots__} for k in self.links]
        return {**fields, "links": links}


def _describe_link(link: Link) -> str:
    generation = f" {link.generation}" if link.generation else ""
    peer = f" to {link.peer}" if link.peer else ""
    return f"{link.kind}{generation} x{link.lanes}{peer}"
