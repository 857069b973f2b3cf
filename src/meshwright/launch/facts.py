"""What must be the same on all hosts of a run, and how they differ in it."""

import hashlib
import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.cluster.redaction import redact_arguments
from meshwright.devices.device import Device
from meshwright.devices.discovery import list_devices
from meshwright.devices.settings import current_settings
from meshwright.errors import RendezvousError
from meshwright.launch.interfaces import find_address, is_loopback

_PACKAGES = ("meshwright", "keras", "jax", "jaxlib", "numpy", "orbax-checkpoint")
_SKEW_SECONDS = 1.0
_STAND_IN = "stand-in"


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """One launcher of a run, as the others need to know it."""

    host: str
    """The name of its host."""
    task: int
    """Its number, from 0."""
    tasks: int
    """How many launchers it thinks there are."""
    processes: int
    """How many workers it starts."""
    script: str
    """The file name and digest of the script."""
    arguments: tuple[str, ...]
    """What the script and the run are given."""
    versions: Mapping[str, str]
    """Of Python and the packages that matter."""
    devices: str
    """How many of which kind its workers have."""
    hidden: str | None = None
    """CUDA_VISIBLE_DEVICES, if it is set."""
    gpus: tuple[str, ...] = ()
    """What the driver calls those that it sees."""
    own_address: str = ""
    """What its host's own name stands for there; nothing if for nothing."""
    folder: str | None = None
    """Which launch the run folder that it sees belongs to."""

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Facts":
        """Those of `to_json`."""
        lists = {name: tuple(values[name]) for name in ("arguments", "gpus")}
        return cls(**{**values, **lists})


def read_facts(
    script: Path,
    arguments: Sequence[str],
    *,
    host: str,
    task: int,
    tasks: int,
    processes: int,
    folder: str | None = None,
) -> Facts:
    """The facts of this process; starts no device."""
    return Facts(
        host=host,
        task=task,
        tasks=tasks,
        processes=processes,
        script=digest_of(script),
        arguments=tuple(redact_arguments(arguments)),
        versions=_versions(),
        devices=_devices(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=tuple(d.uuid for d in _listed() if d.kind == "GPU" and d.uuid),
        own_address=_own_address(),
        folder=folder,
    )


def check_same(all_facts: Sequence[Facts]) -> None:
    """Raises an error that says how hosts differ, if they do."""
    differences = find_differences(all_facts)
    if not differences:
        return
    raise RendezvousError(
        f"The hosts of the run differ: {'; '.join(differences)}.",
        "All hosts run the same script with the same arguments and packages, on as "
        "many devices of the same kind.",
        _advice(differences, all_facts),
    )


def check_folder(all_facts: Sequence[Facts], launch: str) -> None:
    """Raises an error if the run folder of a host is not that of the launch."""
    others = [facts.host for facts in all_facts if facts.folder != launch]
    if others:
        raise RendezvousError(
            f"The run folder on {', '.join(others)} is not the one that the launcher "
            "sees.",
            "All hosts of a run see the same run folder: checkpoints lie in it.",
            "Put it on a disk that all hosts share, with --run DIR.",
        )


def check_reachable(all_facts: Sequence[Facts]) -> None:
    """Raises an error if CPU processes of a host would be reached by nobody."""
    for facts in all_facts:
        address = facts.own_address
        has_gpus = "GPU" in facts.devices and _STAND_IN not in facts.devices
        if not has_gpus and (not address or is_loopback(address)):
            raise RendezvousError(
                f"The name of {facts.host} stands for {address or 'nothing'} there.",
                "CPU processes of several hosts reach each other by what the names of "
                "their hosts stand for (Gloo, in JAX).",
                f"In /etc/hosts of {facts.host}, write its address in the network in "
                "front of its own name.",
            )


def parts_of_gpus(all_facts: Sequence[Facts]) -> dict[int, tuple[int, int]]:
    """Which part of the GPUs a launcher takes that sees the same ones as others.

    Returns:
        By number of the launcher, of those that have to share: which part, of how many.
    """
    parts = {}
    for facts in all_facts:
        sharers = [f for f in all_facts if set(f.gpus) & set(facts.gpus)]
        if len(sharers) < 2:
            continue
        if any(f.gpus != facts.gpus for f in sharers) or len(facts.gpus) % len(sharers):
            seen = "; ".join(f"{len(f.gpus)} by task {f.task}" for f in sharers)
            raise RendezvousError(
                f"GPUs of {facts.host} are seen by several tasks: {seen}.",
                "Tasks of one host see GPUs of their own, or all see the same ones, "
                "which can be divided between them.",
                "Let the scheduler give each task its own (srun --gpus-per-task), or "
                "start one task on each host.",
            )
        parts[facts.task] = (sharers.index(facts), len(sharers))
    return parts


def find_differences(all_facts: Sequence[Facts]) -> list[str]:
    """How hosts differ, one line for each thing that is not the same.

    >>> here = read_facts(Path("no.py"), [], host="a", task=0, tasks=2, processes=1)
    >>> there = Facts(**{**here.to_json(), "host": "b", "task": 1, "tasks": 3})
    >>> find_differences([here, there])
    ['number of launchers 2 on a, 3 on b']
    """
    names = names_of(all_facts)
    hidden = _hides_gpus(all_facts)
    found = []
    for thing in _things(all_facts):
        holders: dict[str, list[str]] = {}
        for facts, name in zip(all_facts, names, strict=True):
            value = _value(facts, thing)
            if thing == "devices" and facts in hidden:
                value += f" (CUDA_VISIBLE_DEVICES={facts.hidden!r})"
            holders.setdefault(value, []).append(name)
        if len(holders) > 1:
            each = (f"{value} on {', '.join(who)}" for value, who in holders.items())
            found.append(f"{thing} {', '.join(each)}")
    return found


def names_of(all_facts: Sequence[Facts]) -> list[str]:
    """What to call the launchers: by host, and by task where a host has several."""
    times = Counter(facts.host for facts in all_facts)
    return [
        facts.host if times[facts.host] == 1 else f"{facts.host} (task {facts.task})"
        for facts in all_facts
    ]


def describe_skew(name: str, seconds: float, uncertain: float) -> str | None:
    """A notice, if the clock of a host is not that of the launcher's.

    >>> describe_skew("b", -90.04, 0.01)
    'the clock of b is 90.0 s behind; times in logs of b are those of its clock'
    """
    if abs(seconds) - uncertain <= _SKEW_SECONDS:
        return None
    way = "ahead" if seconds > 0 else "behind"
    return (
        f"the clock of {name} is {abs(seconds):.1f} s {way}; times in logs of {name} "
        "are those of its clock"
    )


def _things(all_facts: Sequence[Facts]) -> list[str]:
    packages = {name: None for facts in all_facts for name in facts.versions}
    ours = ("number of launchers", "workers", "script", "arguments")
    return [*ours, *packages, "devices"]


def _value(facts: Facts, thing: str) -> str:
    if thing in facts.versions:
        return facts.versions[thing]
    return {
        "number of launchers": str(facts.tasks),
        "workers": str(facts.processes),
        "script": facts.script,
        "arguments": " ".join(facts.arguments) or "none",
        "devices": facts.devices,
    }.get(thing, "none")


def _hides_gpus(all_facts: Sequence[Facts]) -> list[Facts]:
    """Those whose environment hides the GPUs that others have."""
    some = any("GPU" in facts.devices for facts in all_facts)
    return [
        f for f in all_facts if some and f.hidden is not None and "GPU" not in f.devices
    ]


def _advice(differences: Sequence[str], all_facts: Sequence[Facts]) -> str:
    about = {difference.split()[0] for difference in differences}
    parts = []
    if about & {"number", "workers", "arguments"}:
        parts.append("start all of them with the same command")
    if "script" in about:
        parts.append("copy the script to all hosts, or put it on a shared disk")
    if about - {"number", "workers", "arguments", "script", "devices"}:
        parts.append("install the same packages on all hosts")
    if "devices" in about:
        parts.append(
            "unset CUDA_VISIBLE_DEVICES where it hides the GPUs"
            if _hides_gpus(all_facts)
            else "leave out the hosts that differ, or hide devices on the others"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def digest_of(script: Path) -> str:
    """What a script is called, and the beginning of its digest."""
    try:
        return f"{script.name} ({hashlib.sha256(script.read_bytes()).hexdigest()[:12]})"
    except OSError as error:
        return f"{script.name} ({error.strerror})"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _listed() -> list[Device]:
    return list_devices(current_settings())


def _own_address() -> str:
    try:
        return find_address(socket.gethostname(), seconds=2)
    except RendezvousError:
        return ""


def _devices() -> str:
    """Accelerators by model; CPUs only where there are no others."""
    listed = _listed()
    accelerators = [
        f"{d.kind} {_STAND_IN if d.stand_in else d.model}"
        for d in listed
        if d.kind != "CPU"
    ]
    counts = Counter(accelerators or [d.kind for d in listed])
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
