"""When JAX's runtime starts: whether it has, who did it, and with what settings.

JAX reads the number of CPU devices, the platforms and the memory settings once, when
its first device is asked for. Everything here is about that moment; `runtime` speaks
with the devices afterwards.
"""

import contextlib
import functools
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any, Self

from meshwright.devices.sizes import format_bytes

import jax

# JAX has no public question for "has the runtime started?" nor a public way to be
# told; the few names used here have been stable from 0.4 to 0.12, and the tests watch
# them on both ends of the supported range.
from jax._src import xla_bridge

_XLA_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """What JAX and its GPU allocator read when they start, in their own terms."""

    num_cpu_devices: int
    platforms: str | None
    cuda_visible_devices: str
    client_options: str | dict[str, Any] | None
    """What the makers of GPU and TPU clients are told, over environment variables."""

    @classmethod
    def read(cls) -> Self:
        """The settings in force, or with which the runtime would start now."""
        config = jax.config
        return cls(
            num_cpu_devices=int(config.jax_num_cpu_devices),
            platforms=config.jax_platforms,
            cuda_visible_devices=xla_bridge.CUDA_VISIBLE_DEVICES.value,
            client_options=config.jax_pjrt_client_create_options,
        )

    def write(self) -> None:
        """Hands the settings over; the runtime must not have started."""
        _Start.untouched = untouched_settings()
        jax.config.update("jax_num_cpu_devices", self.num_cpu_devices)
        jax.config.update("jax_platforms", self.platforms)
        jax.config.update("jax_cuda_visible_devices", self.cuda_visible_devices)
        jax.config.update("jax_pjrt_client_create_options", self.client_options)

    def are_in_force(self) -> bool:
        """Whether a start, past or future, gives what these settings ask for."""
        now = type(self).read()
        differing = {
            f.name
            for f in fields(self)
            if getattr(self, f.name) != getattr(now, f.name)
        }
        if has_started() and self.num_cpu_devices == _num_started_cpu_devices():
            differing.discard("num_cpu_devices")
        return not differing


class _Start:
    """What is remembered about the start of the runtime, which the process shares."""

    count: int = 1
    """Which start of the runtime this is, or will be."""
    place: str | None = None
    """`file:line` of the start; None before, or if it was not seen."""
    untouched: RuntimeSettings | None = None
    """What was in force before Meshwright first wrote settings; None until then."""


def watch_start() -> None:
    """Notes from now on which line of the user's starts the runtime."""
    start: Callable[[str], Any] = xla_bridge._init_backend
    if hasattr(start, "_noted_by_meshwright"):
        return

    @functools.wraps(start)
    def start_and_note(platform: str) -> Any:
        line = user_line()
        if line and _Start.place is None:
            _Start.place = f"{line[0]}:{line[1]}"
        return start(platform)

    start_and_note._noted_by_meshwright = True  # type: ignore[attr-defined]
    xla_bridge._init_backend = start_and_note


def has_started() -> bool:
    """Whether JAX's runtime holds devices."""
    return bool(xla_bridge.backends_are_initialized())


def start_place() -> str:
    """The line that started the runtime, in words."""
    return _Start.place or "a line that ran before `import meshwright`"


def stop() -> None:
    """Gives the devices back; JAX starts again when it is next used."""
    import jax.extend.backend

    jax.extend.backend.clear_backends()
    # Cycles may still hold the old client, and with it the memory of a GPU.
    gc.collect()
    _Start.place = None
    _Start.count += 1


def num_starts() -> int:
    """Counts the starts of the runtime; what was learnt in one is void in the next."""
    return _Start.count


def living_arrays() -> list[str]:
    """The arrays that live on the devices, in words; empty before the start."""
    if not has_started():
        return []
    import jax.extend.backend

    gc.collect()
    clients = jax.extend.backend.backends().values()
    arrays = [array for client in clients for array in client.live_arrays()]
    return [f"{a.dtype}{list(a.shape)}, {format_bytes(a.nbytes)}" for a in arrays]


def untouched_settings() -> RuntimeSettings:
    """What JAX would start with, had Meshwright written nothing."""
    return _Start.untouched or RuntimeSettings.read()


def num_cpu_devices() -> int:
    """How many CPU devices JAX has, or would have, had Meshwright written nothing."""
    if has_started() and _Start.untouched is None:
        return _num_started_cpu_devices()
    configured = untouched_settings().num_cpu_devices
    if configured > 0:
        return configured
    forced = _XLA_FLAG.search(os.environ.get("XLA_FLAGS", ""))
    return int(forced[1]) if forced else 1


def _num_started_cpu_devices() -> int:
    return len(jax.local_devices(backend="cpu"))


def user_line() -> tuple[str, int] | None:
    """The innermost line outside Meshwright, JAX and Keras, as (file, line)."""
    foreign = _foreign_files()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*foreign, "<frozen")):
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def user_line_of(error: BaseException) -> tuple[str, int] | None:
    """The innermost line outside Meshwright, JAX and Keras where an error came up."""
    foreign = _foreign_files()
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((*foreign, "<frozen"))
    ]
    return lines[-1] if lines else None


def _foreign_files() -> tuple[str, ...]:
    """Beginnings of the paths of code that only passes a user's call on."""
    packages = [sys.modules.get(n) for n in ("meshwright", "jax", "jaxlib", "keras")]
    folders = [
        str(Path(p.__file__).parent) + os.sep for p in packages if p and p.__file__
    ]
    return (*folders, contextlib.__file__, functools.__file__)
