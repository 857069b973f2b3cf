"""What accelerators can do and cost: `accelerators.toml` as checked data.

An unknown figure is `None`, never a guess, and each known one names its source. The
file that the environment variable MESHWRIGHT_CATALOG points to, or else
`meshwright/accelerators.toml` in the user's configuration folder, adds to the catalog
and overrides it.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from meshwright.devices.device import Device
from meshwright.devices.names import KINDS
from meshwright.errors import CatalogError

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8", "int8")
ENVIRONMENT_VARIABLE = "MESHWRIGHT_CATALOG"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a figure was read."""

    title: str
    url: str
    read: date


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """A connection between devices, one direction, per device."""

    name: str | None = None
    bandwidth: float | None = None
    """Bytes per second."""
    latency: float | None = None
    """Seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """US dollars for one device for one hour, on demand, as of a date."""

    value: float
    date: date


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One kind of accelerator; `None` means unknown."""

    name: str
    title: str
    kind: str
    peak_flops: Mapping[str, float]
    """Dense peak FLOP/s by dtype; unknown dtypes are absent."""
    memory: int | None
    """Bytes."""
    memory_bandwidth: float | None
    """Bytes per second."""
    link: LinkSpeed
    """Between devices of one host."""
    network: LinkSpeed
    """Between hosts."""
    price: Price | None
    sources: Mapping[str, Source]
    """The source of each figure: `'memory'`, `'peak_flops.bfloat16'`, `'price'`, ..."""


def accelerator(name: str) -> Accelerator:
    """Looks an accelerator up by name or alias, in either case.

    Raises:
        CatalogError: The catalog does not know it; the near misses are named.

    >>> accelerator("h200").peak_flops["bfloat16"]
    989500000000000.0
    >>> accelerator("A100").sources["memory_bandwidth"].read.year
    2026
    """
    catalog = load_catalog(user_catalog_file())
    found = catalog.by_name.get(str(name).upper())
    if found is None:
        near = difflib.get_close_matches(
            str(name).upper(), catalog.by_name, n=3, cutoff=0.5
        )
        raise CatalogError(
            f"{name!r} is not an accelerator of the catalog.",
            f"It knows {', '.join(a.name for a in catalog.accelerators)}.",
            (f"Did you mean {' or '.join(near)}? " if near else "")
            + f"To add one, write it into a file and set {ENVIRONMENT_VARIABLE} to it.",
        )
    return found


def accelerator_of(device: Device) -> Accelerator | None:
    """The catalog's entry for a device of this machine; None if it has none."""
    catalog = load_catalog(user_catalog_file())
    return catalog.by_nvml_name.get(device.model)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All accelerators, and the ways to find one."""

    accelerators: tuple[Accelerator, ...]
    by_name: Mapping[str, Accelerator]
    by_nvml_name: Mapping[str, Accelerator]


def user_catalog_file() -> Path | None:
    """The user's own catalog file, if there is one."""
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    usual = Path(folder) / "meshwright" / "accelerators.toml"
    return usual if usual.is_file() else None


@cache
def load_catalog(user_file: Path | None) -> Catalog:
    """Reads the package's catalog and, over it, the user's file."""
    own = resources.files("meshwright.devices") / "accelerators.toml"
    data = tomllib.loads(own.read_text(encoding="utf-8"))
    if user_file is not None:
        added = _read_user_file(user_file)
        for table in ("sources", "accelerators"):
            data[table] = {**data[table], **added.get(table, {})}
    return _check_catalog(data, str(user_file or "accelerators.toml"))


def _read_user_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogError(
            f"The catalog file {path} could not be read: {error}.",
            f"{ENVIRONMENT_VARIABLE} names a TOML file with tables "
            "[accelerators.NAME] and [sources.ID].",
            "Correct the file, or unset the variable.",
        ) from error


def _check_catalog(data: Mapping[str, Any], file: str) -> Catalog:
    by_name: dict[str, Accelerator] = {}
    by_nvml_name: dict[str, Accelerator] = {}
    accelerators = []
    for name, entry in data["accelerators"].items():
        made = _Reader(file, name, entry, data["sources"]).read()
        accelerators.append(made)
        for spelling in (name, *entry.get("aliases", ())):
            if by_name.setdefault(spelling.upper(), made) is not made:
                raise CatalogError(
                    f"{file}: {spelling!r} is the name of two accelerators, "
                    f"{by_name[spelling.upper()].name} and {name}.",
                    "Names and aliases are unique, whatever their case.",
                    "Rename one of them.",
                )
        by_nvml_name.update(dict.fromkeys(entry.get("nvml_names", ()), made))
    return Catalog(tuple(accelerators), by_name, by_nvml_name)


class _Reader:
    """Reads one accelerator, and remembers where each figure came from."""

    def __init__(
        self,
        file: str,
        name: str,
        entry: Mapping[str, Any],
        sources: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._where = f"{file}: [accelerators.{name}]"
        self._name = name
        self._entry = entry
        self._known_sources = sources
        self._sources: dict[str, Source] = {}

    def read(self) -> Accelerator:
        entry = self._entry
        if entry.get("kind") not in KINDS:
            self._fail(f"kind is {entry.get('kind')!r}", f"kind is one of {KINDS}")
        peaks = entry.get("peak_flops", {})
        if unknown := set(peaks) - set(DTYPES):
            self._fail(f"peak_flops has {sorted(unknown)}", f"dtypes are {DTYPES}")
        flops = {d: self._figure(peaks, d, "peak_flops.") for d in DTYPES}
        memory = self._figure(entry, "memory")
        return Accelerator(
            name=self._name,
            title=entry.get("title", self._name),
            kind=entry["kind"],
            peak_flops={d: value for d, value in flops.items() if value is not None},
            memory=None if memory is None else int(memory),
            memory_bandwidth=self._figure(entry, "memory_bandwidth"),
            link=self._link("link"),
            network=self._link("network"),
            price=self._price(),
            sources=self._sources,
        )

    def _link(self, table: str) -> LinkSpeed:
        entry = self._entry.get(table, {})
        return LinkSpeed(
            name=entry.get("name"),
            bandwidth=self._figure(entry, "bandwidth", f"{table}."),
            latency=self._figure(entry, "latency", f"{table}."),
        )

    def _price(self) -> Price | None:
        value = self._figure(self._entry, "price")
        if value is None:
            return None
        when = self._entry["price"].get("date")
        if not isinstance(when, date):
            self._fail(f"price has date {when!r}", "a price has a date, as 2026-01-31")
        return Price(value=value, date=when)

    def _figure(
        self, table: Mapping[str, Any], key: str, prefix: str = ""
    ) -> float | None:
        figure = table.get(key)
        if figure is None:
            return None
        parts = figure if isinstance(figure, dict) else {}
        value, source = parts.get("value"), parts.get("source", "")
        if not isinstance(value, int | float) or value <= 0:
            self._fail(
                f"{prefix}{key} is {figure!r}", "a figure is { value, source }, above 0"
            )
        if source not in self._known_sources:
            self._fail(
                f"{prefix}{key} has source {source!r}",
                f"each figure names one of the tables [sources.ID]: "
                f"{', '.join(self._known_sources)}",
            )
        self._sources[prefix + key] = Source(**self._known_sources[source])
        return float(value)

    def _fail(self, received: str, rule: str) -> NoReturn:
        raise CatalogError(
            f"{self._where} {received}.",
            f"In a catalog, {rule}.",
            "Correct the entry; leave a figure out if it is unknown.",
        )
