"""What the user asked for: one value for the whole process, and how it is spelled."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.devices.sizes import is_count, parse_bytes
from meshwright.errors import ConfigurationError

ENVIRONMENT_VARIABLE = "MESHWRIGHT_VIRTUAL"
CACHE_VARIABLE = "MESHWRIGHT_COMPILE_CACHE"
CACHE_SIZE_VARIABLE = "MESHWRIGHT_COMPILE_CACHE_SIZE"
CACHE_ON, CACHE_OFF = "on", "off"
MOST_VIRTUAL_DEVICES = 1024

_VIRTUAL = re.compile(r"(?:(?P<kind>CPU|GPU):)?(?P<count>\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Virtual:
    """A number of devices made of the CPU, listed as CPUs or as stand-in GPUs."""

    kind: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The configuration of devices; `None` leaves a matter to the runtime."""

    visible: tuple[str, ...] | None = None
    """Names or kinds of the devices that may be used, in their new order."""
    virtual: Virtual | None = None
    """Devices to be made of the CPU."""
    memory_limit: int | None = None
    """Bytes that a step may use on each device."""
    memory_growth: bool | None = None
    """True: GPU memory is taken as it is needed; False: at once."""
    compile_cache: str | None = None
    """`'on'`, `'off'`, or the absolute path of its folder."""
    compile_cache_size: int | None = None
    """Bytes that the folder may take."""


class _Holder:
    # Devices and their configuration belong to the process, as JAX's runtime does.
    settings = Settings()


def current_settings() -> Settings:
    """The settings in force."""
    return _Holder.settings


def keep_settings(settings: Settings) -> None:
    """Makes `settings` the ones in force; `configure` decides whether they may be."""
    _Holder.settings = settings


def parse_virtual(value: int | str, source: str) -> Virtual:
    """Reads a request for virtual devices.

    Arguments:
        value: A count of CPU devices, or a text: `'GPU:4'`, `'CPU:8'`, `'8'`.
        source: Where it was written, for the error message.

    >>> parse_virtual("gpu:4", "virtual"), parse_virtual(8, "virtual")
    (Virtual(kind='GPU', count=4), Virtual(kind='CPU', count=8))
    """
    usable = isinstance(value, str) or is_count(value)
    match = _VIRTUAL.fullmatch(str(value).strip()) if usable else None
    if match is None or not 1 <= int(match["count"]) <= MOST_VIRTUAL_DEVICES:
        raise ConfigurationError(
            f"{source} received {value!r} (a {type(value).__name__}).",
            f"It takes a count from 1 to {MOST_VIRTUAL_DEVICES}, or a text with a "
            "kind: '8' and 'CPU:8' make eight devices of the CPU, 'GPU:4' makes four "
            "stand-in GPUs.",
            f"Write, for example, {source}='GPU:4'.",
        )
    return Virtual((match["kind"] or "CPU").upper(), int(match["count"]))


def parse_compile_cache(value: str | os.PathLike[str], source: str) -> str:
    """Reads where the compile cache shall be.

    Arguments:
        value: `'on'`, `'off'` or a folder.
        source: Where it was written, for the error message.

    >>> parse_compile_cache("off", "compile_cache")
    'off'
    >>> parse_compile_cache("/scratch/programs", "compile_cache")
    '/scratch/programs'
    """
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(
            f"{source} received {value!r} (a {type(value).__name__}).",
            "It takes 'on' (the folder for caches of this user), 'off', or a folder.",
            f"Write, for example, {source}='/scratch/compiled'.",
        )
    if value in (CACHE_ON, CACHE_OFF):
        return str(value)
    return os.path.abspath(os.path.expanduser(value))


def settings_from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that environment variables ask for."""
    virtual, place, size = (
        environment.get(name)
        for name in (ENVIRONMENT_VARIABLE, CACHE_VARIABLE, CACHE_SIZE_VARIABLE)
    )
    return Settings(
        virtual=parse_virtual(virtual, ENVIRONMENT_VARIABLE) if virtual else None,
        compile_cache=parse_compile_cache(place, CACHE_VARIABLE) if place else None,
        compile_cache_size=parse_bytes(size, CACHE_SIZE_VARIABLE) if size else None,
    )
