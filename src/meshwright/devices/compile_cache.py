"""The compile cache: what one process compiled, the next one loads.

The cache is JAX's own. Here is decided in which folder it lies, that small programs are
kept too (building a model compiles dozens of them, one by one), and how large it may
grow. JAX could bound it itself, but looks at every entry whenever it writes one; here
that is done once, at the end of a process that wrote.
"""

import atexit
import contextlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from meshwright.devices.settings import (
    CACHE_OFF,
    CACHE_ON,
    CACHE_VARIABLE,
    Settings,
)
from meshwright.devices.sizes import format_bytes
from meshwright.devices.start import has_started, user_line
from meshwright.errors import CompileCacheWarning

import jax

DEFAULT_SIZE = 2 * 2**30
"""Bytes that the cache may take if nobody says otherwise."""

_LEAST_FREE = 64 * 2**20
_ENTRY = re.compile(r".*-[0-9a-f]{64}-cache")
_AUTOTUNE_FOLDER = "xla_gpu_per_fusion_autotune_cache_dir"
_WRITE_EVENT = "/jax/compilation_cache/cache_misses"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_MIN_SECONDS_OF_JAX = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCache:
    """Where this process keeps what it compiles."""

    folder: Path | None
    """None if nothing is kept."""
    size: int | None
    """Bytes that the folder may take; None if that is not up to Meshwright."""
    because: str
    """Who decided so, or what stands in the way."""
    is_broken: bool = False
    """Whether there is no folder although one was asked for."""


class _State:
    """What the process shares, as it shares JAX's cache."""

    cache = CompileCache(folder=None, size=None, because="nothing was set up")
    has_written = False


def current_compile_cache() -> CompileCache:
    """The cache in force."""
    return _State.cache


def start_compile_cache(settings: Settings) -> Settings:
    """Sets the cache up at import, and returns the settings that are in force.

    A folder that JAX was told of stays, whatever Meshwright's variables say.
    """
    theirs = jax.config.jax_compilation_cache_dir
    is_enabled = jax.config.jax_enable_compilation_cache
    if not theirs and is_enabled:
        use_compile_cache(settings)
        return settings
    _State.cache = CompileCache(
        folder=Path(theirs) if theirs and is_enabled else None,
        size=None,
        because="JAX was told so",
    )
    return replace(settings, compile_cache=None, compile_cache_size=None)


def use_compile_cache(settings: Settings) -> None:
    """Sets the cache up as the settings say; warns if their folder cannot be used."""
    _State.cache = _choose_cache(settings)
    folder = _State.cache.folder
    if _State.cache.is_broken:
        _warn(_State.cache.because)
    jax.config.update("jax_compilation_cache_dir", folder and str(folder))
    jax.config.update("jax_enable_compilation_cache", True)
    if has_started():
        # JAX keeps the folder of its first compilation until it is told.
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()
    if folder is not None:
        _keep_small_programs()
        _watch_writes()


def _choose_cache(settings: Settings) -> CompileCache:
    asked = settings.compile_cache or CACHE_ON
    if asked == CACHE_OFF:
        return CompileCache(folder=None, size=None, because="it was switched off")
    try:
        folder = default_folder(os.environ) if asked == CACHE_ON else Path(asked)
    except RuntimeError:
        return _broken("there is no home folder for it")
    if obstacle := _obstacle(folder):
        return _broken(f"{folder} cannot be used: {obstacle}")
    # Two that delete would get in each other's way.
    is_bounded_by_jax = jax.config.jax_compilation_cache_max_size != -1
    return CompileCache(
        folder=folder,
        size=None if is_bounded_by_jax else settings.compile_cache_size or DEFAULT_SIZE,
        because="the default" if asked == CACHE_ON else "it was asked for",
    )


def _broken(because: str) -> CompileCache:
    return CompileCache(folder=None, size=None, because=because, is_broken=True)


def default_folder(
    environment: Mapping[str, str], platform: str = sys.platform
) -> Path:
    """The folder for compiled programs among the user's other caches.

    Raises:
        RuntimeError: The user has no home.

    >>> default_folder({"XDG_CACHE_HOME": "/scratch/me"}, "linux").as_posix()
    '/scratch/me/meshwright/compiled'
    """
    named = environment.get("XDG_CACHE_HOME", "")
    local = environment.get("LOCALAPPDATA", "")
    if os.path.isabs(named):
        caches = Path(named)
    elif platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif platform == "win32" and local:
        caches = Path(local)
    else:
        caches = Path.home() / ".cache"
    return caches / "meshwright" / "compiled"


def _obstacle(folder: Path) -> str | None:
    """Why nothing can be kept in a folder, which is made if need be."""
    try:
        # Whoever can write here can make this user run code.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"room for a program?")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    return None if free >= _LEAST_FREE else f"only {format_bytes(free)} are free"


def _warn(because: str) -> None:
    file, line = user_line() or ("<unknown>", 1)
    warnings.warn_explicit(
        f"The compile cache is off, because {because}. Every start compiles all its "
        f"programs again. Set {CACHE_VARIABLE} to a folder that can be written to, or "
        f"to '{CACHE_OFF}'.",
        CompileCacheWarning,
        file,
        line,
    )


def _keep_small_programs() -> None:
    is_theirs = _MIN_SECONDS.upper() in os.environ
    if not is_theirs and getattr(jax.config, _MIN_SECONDS) == _MIN_SECONDS_OF_JAX:
        jax.config.update(_MIN_SECONDS, 0.0)


@cache
def _watch_writes() -> None:
    jax.monitoring.register_event_listener(_note_write)
    atexit.register(_sweep_at_exit)


def _note_write(event: str, **_: str | int) -> None:
    if event == _WRITE_EVENT:
        _State.has_written = True


def _sweep_at_exit() -> None:
    in_force = _State.cache
    if _State.has_written and in_force.folder and in_force.size is not None:
        # A folder that has become unreadable is met again, with words, at next start.
        with contextlib.suppress(OSError):
            sweep(in_force.folder, in_force.size)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache."""

    path: Path
    bytes: int
    used: float


def entries_of(folder: Path) -> list[Entry]:
    """The files of JAX's cache in a folder; other files are none of our business."""
    files = [f for f in _files(folder) if _ENTRY.fullmatch(f.name)]
    found = []
    for file in [*files, *_files(folder / _AUTOTUNE_FOLDER)]:
        with contextlib.suppress(FileNotFoundError):  # another process sweeps, too
            status = file.stat()
            # The time of reading is not kept everywhere; that of writing is.
            used = max(status.st_atime, status.st_mtime)
            found.append(Entry(file, status.st_size, used))
    return found


def _files(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if path.is_file()]


def sweep(folder: Path, size: int) -> None:
    """Deletes entries, those first that were used longest ago, until the rest fits.

    An empty one is left by a process that was stopped while it wrote; JAX would
    stumble over it at every start.
    """
    entries = sorted(entries_of(folder), key=lambda entry: entry.used)
    total = sum(entry.bytes for entry in entries)
    for entry in entries:
        if total > size or not entry.bytes:
            entry.path.unlink(missing_ok=True)
            total -= entry.bytes
