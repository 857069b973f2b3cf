"""Is this machine ready? One check per function, and one verdict."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshwright.devices.compile_cache import current_compile_cache, entries_of
from meshwright.devices.discovery import devices
from meshwright.devices.nvidia import read_nvml
from meshwright.devices.sizes import format_bytes
from meshwright.launch.loopback import all_reduce_over_loopback, free_port

import psutil

OK, WARN, FAIL = "ok", "warn", "fail"

_FLOORS = {"keras": (3, 15, 1), "jax": (0, 10), "orbax-checkpoint": (0, 12)}
_SHOWN = ("meshwright", "keras", "jax", "jaxlib", "numpy", "orbax-checkpoint")
_LITTLE_DISK = 2 * 2**30
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
_PROBE_SECONDS = 300
_PROBE = (
    "import jax, json; d = jax.devices(); "
    "print(json.dumps([jax.default_backend(), [str(x.device_kind) for x in d]]))"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str
    detail: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks; it prints as a block that can be pasted into a report."""

    checks: tuple[Check, ...]

    @property
    def status(self) -> str:
        """The worst status of all checks."""
        found = {check.status for check in self.checks}
        return FAIL if FAIL in found else WARN if WARN in found else OK

    @property
    def verdict(self) -> str:
        """One line: ready or not, and what to do first."""
        worst = [c for c in self.checks if c.status == self.status]
        names = ", ".join(c.name for c in worst)
        return {
            OK: "verdict: ready",
            WARN: f"verdict: ready, with warnings: {names}",
            FAIL: f"verdict: not ready: {names}",
        }[self.status]

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            first, *rest = check.detail.splitlines()
            lines.append(f"{check.status:<4}  {check.name:<11}  {first}")
            lines += [f"{'':<19}{line}" for line in rest]
            if check.fix:
                lines.append(f"{'':<19}fix: {check.fix}")
        return "\n".join(["```text", *lines, self.verdict, "```"])

    def to_json(self) -> dict[str, Any]:
        """The checks and the verdict as JSON values."""
        return {
            "status": self.status,
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
        }


def diagnose() -> Diagnosis:
    """Looks at everything that training on this machine stands on."""
    checks: list[Callable[[], Check]] = [
        check_versions,
        check_machine,
        check_devices,
        check_nvml,
        check_runtime,
        check_disk,
        check_cache,
        check_port,
        check_proxies,
        check_all_reduce,
    ]
    return Diagnosis(tuple(check() for check in checks))


def check_versions() -> Check:
    """Python and the packages that matter, against the oldest that work."""
    found = {name: _version(name) for name in _SHOWN}
    old = [
        f"{name} {found[name]} < {'.'.join(map(str, floor))}"
        for name, floor in _FLOORS.items()
        if _numbers(found[name]) < floor
    ]
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    return Check(
        name="versions",
        status=FAIL if old else OK,
        detail=f"Python {platform.python_version()}, {shown}",
        fix=f"too old: {'; '.join(old)}; run pip install -U meshwright"
        if old
        else None,
    )


def check_machine() -> Check:
    """Operating system, cores and memory."""
    memory = psutil.virtual_memory()
    return Check(
        name="machine",
        status=OK,
        detail=f"{platform.platform()}, {psutil.cpu_count()} cores, "
        f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory free",
    )


def check_devices() -> Check:
    """The devices as Meshwright lists them, without starting any."""
    return Check(
        name="devices",
        status=OK,
        detail="\n".join(device.describe() for device in devices()),
    )


def check_nvml() -> Check:
    """Whether NVML answers."""
    nvml = read_nvml()
    if nvml.because:
        return Check(name="nvml", status=OK, detail=f"no GPU found: {nvml.because}")
    return Check(
        name="nvml",
        status=OK,
        detail=f"driver {nvml.driver}, visible GPUs: {len(nvml.gpus)}",
    )


def check_runtime() -> Check:
    """What JAX itself starts with, seen in a process of its own."""
    plugins = sorted(p.name for p in metadata.entry_points(group="jax_plugins"))
    gpus = read_nvml().gpus
    # Growing memory, so that looking does not take it from somebody who computes.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ran = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=_PROBE_SECONDS,
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            name="runtime",
            status=FAIL,
            detail=f"JAX does not start: {last}",
            fix="run python -c 'import jax; jax.devices()' to see all of it",
        )
    backend, kinds = json.loads(ran.stdout.strip().splitlines()[-1])
    known = f"plugins: {', '.join(plugins) or 'none'}"
    detail = f"JAX starts on {backend} with {', '.join(kinds)} ({known})"
    if gpus and backend == "cpu":
        return Check(
            name="runtime",
            status=WARN,
            detail=f"{detail}; {len(gpus)} GPUs stay unused",
            fix=_unused_gpu_fix(plugins),
        )
    return Check(name="runtime", status=OK, detail=detail)


def _unused_gpu_fix(plugins: list[str]) -> str:
    if any("cuda" in plugin for plugin in plugins):
        return (
            "the CUDA plugin is there but was not used: look at JAX_PLATFORMS and "
            "CUDA_VISIBLE_DEVICES, and at the driver's version"
        )
    return "pip install 'meshwright[cuda13]' (or [cuda12] for older drivers)"


def check_disk() -> Check:
    """Free space where runs are written, and whether writing works."""
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    try:
        with tempfile.NamedTemporaryFile(dir=here, prefix=".meshwright-") as file:
            began = time.monotonic()
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
            took = time.monotonic() - began
    except OSError as error:
        return Check(
            name="disk",
            status=FAIL,
            detail=f"cannot write here: {error}",
            fix="change to a folder that you may write to",
        )
    return Check(
        name="disk",
        status=OK if free >= _LITTLE_DISK else WARN,
        detail=f"{format_bytes(free)} free here; 1 MiB written and synced "
        f"in {took * 1000:.0f} ms",
        fix=None if free >= _LITTLE_DISK else "make room: checkpoints need it",
    )


def check_cache() -> Check:
    """Whether compiled programs are kept for the next start, and where."""
    kept = current_compile_cache()
    if kept.folder is None:
        return Check(
            name="cache",
            status=WARN if kept.is_broken else OK,
            detail=f"compiled programs are not kept: {kept.because}",
            fix="set MESHWRIGHT_COMPILE_CACHE to a folder that can be written to"
            if kept.is_broken
            else None,
        )
    entries = entries_of(kept.folder)
    size = format_bytes(sum(entry.bytes for entry in entries))
    bound = f" of at most {format_bytes(kept.size)}" if kept.size else ""
    return Check(
        name="cache",
        status=OK,
        detail=f"compiled programs take {size}{bound}, entries: {len(entries)}, in "
        f"{_without_home(kept.folder)} ({kept.because})",
    )


def _without_home(folder: Path) -> str:
    try:
        return f"~/{folder.relative_to(Path.home()).as_posix()}"
    except (ValueError, RuntimeError):
        return str(folder)


def check_port() -> Check:
    """Whether a coordinator can listen on the loopback interface."""
    try:
        port = free_port()
        with (
            socket.create_server(("127.0.0.1", port)),
            socket.create_connection(("127.0.0.1", port), timeout=5),
        ):
            return Check(name="ports", status=OK, detail=f"127.0.0.1:{port} answers")
    except OSError as error:
        return Check(
            name="ports",
            status=FAIL,
            detail=f"the loopback interface does not answer: {error}",
            fix="allow connections to 127.0.0.1 in the firewall or container",
        )


def check_proxies() -> Check:
    """Proxy variables, which can make processes miss each other."""
    proxies = {k: v for k, v in os.environ.items() if k.lower() in _PROXIES and v}
    exempt = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    if not proxies:
        return Check(name="proxies", status=OK, detail="none set")
    shown = ", ".join(f"{k}={_without_password(v)}" for k, v in sorted(proxies.items()))
    if {"127.0.0.1", "localhost", "*"} & {entry.strip() for entry in exempt}:
        return Check(name="proxies", status=OK, detail=f"{shown}; loopback is exempt")
    return Check(
        name="proxies",
        status=WARN,
        detail=f"{shown}; connections to this machine's own processes may hang",
        fix="export no_proxy=127.0.0.1,localhost",
    )


def check_all_reduce() -> Check:
    """Two real processes add up their numbers."""
    result = all_reduce_over_loopback()
    return Check(
        name="all-reduce",
        status=OK if result.ok else FAIL,
        detail=f"{result.detail} ({result.seconds:.1f} s with start-up)",
        fix=None if result.ok else "see the checks on ports and proxies above",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
