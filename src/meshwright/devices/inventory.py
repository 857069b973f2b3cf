"""Machines in a few letters: `8xH200`, `2x8xH100`."""

import re
from dataclasses import dataclass

from meshwright.devices.catalog import Accelerator, accelerator
from meshwright.errors import CatalogError

_INVENTORY = re.compile(
    r"(?:(?:(\d{1,5})\s*x\s*)?(\d{1,5})\s*x\s*)?([A-Z][\w .-]*)", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """Equal hosts with equal devices, which need not be here."""

    hosts: int
    devices_per_host: int
    accelerator: Accelerator

    @property
    def num_devices(self) -> int:
        """Devices of all hosts together."""
        return self.hosts * self.devices_per_host

    def __str__(self) -> str:
        hosts = f"{self.hosts}x" if self.hosts > 1 else ""
        return f"{hosts}{self.devices_per_host}x{self.accelerator.name}"


def parse_inventory(text: str) -> Inventory:
    """Reads `NAME`, `DEVICESxNAME` or `HOSTSxDEVICESxNAME`.

    Raises:
        CatalogError: The text has another form, or the catalog does not know the name.

    >>> inventory = parse_inventory("2x8xH100")
    >>> inventory.num_devices, inventory.accelerator.name
    (16, 'H100-SXM')
    """
    match = _INVENTORY.fullmatch(text.strip()) if isinstance(text, str) else None
    counts = [int(n) if n else 1 for n in match.groups()[:2]] if match else [0]
    if match is None or 0 in counts:
        raise CatalogError(
            f"{text!r} (a {type(text).__name__}) does not describe devices.",
            "Write NAME, DEVICESxNAME or HOSTSxDEVICESxNAME, with counts from 1.",
            "For example '8xH200', or '2x8xH100' for two hosts of eight.",
        )
    hosts, per_host = counts
    return Inventory(
        hosts=hosts,
        devices_per_host=per_host,
        accelerator=accelerator(match[3].strip()),
    )
