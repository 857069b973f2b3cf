"""Where the speed of a machine is known from: measured here, or typical figures."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.devices.catalog import Accelerator
from meshwright.planner.machines import Machine
from meshwright.planner.speed import (
    CollectivePoint,
    CrowdPoint,
    ProductPoint,
    Speed,
    StreamPoint,
)

import jax
import numpy as np

FOLDER_VARIABLE = "MESHWRIGHT_CALIBRATION"
"""The environment variable that names the folder of measured speeds."""

_FORMAT = 4
"""Speeds that were written down in another way are measured again."""

_TYPICAL = {"CPU": "cpu.json", "GPU": "h200.json", "TPU": "h200.json"}

_PEAKS = {
    "float32": ("tfloat32", "float32", "bfloat16"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float16": ("float16", "bfloat16", "float32"),
}
"""By what layers compute in: the peaks that tell how fast, the best first."""


@dataclass(frozen=True, kw_only=True)
class KnownSpeed:
    """A speed, and what it rests on."""

    speed: Speed
    source: str
    """In words."""
    error: float | None = None
    """The share that nine of ten predictions were within, where that was measured."""


def known_speed(machine: Machine) -> KnownSpeed:
    """What is known of a machine: measured here, or typical of its kind."""
    if machine.is_here and (stored := load_speed(machine)) is not None:
        return stored
    typical, record = _typical(machine.kind)
    if machine.kind == "CPU":
        cores = os.cpu_count() or 1
        speed = _faster(typical, cores / record["cores"], 1.0)
        said = f"typical figures of a CPU with {cores} cores, not calibrated"
        return KnownSpeed(speed=speed, source=said)
    known = machine.accelerator
    if known is None:
        said = f"typical figures of {record['title']}, since {machine.title} is unknown"
        return KnownSpeed(speed=typical, source=said)
    if known.name == record["accelerator"]:
        said = f"measured on one {known.title} on {record['date']}"
        return KnownSpeed(speed=typical, source=said, error=record.get("error"))
    said = f"catalog peaks of {known.title} at the efficiency of {record['title']}"
    return KnownSpeed(speed=_scaled(typical, known, record), source=said)


def _typical(kind: str) -> tuple[Speed, dict[str, Any]]:
    file = resources.files("meshwright.planner") / _TYPICAL[kind]
    record = json.loads(file.read_text(encoding="utf-8"))
    return speed_from_json(record["speed"]), record


def _scaled(typical: Speed, known: Accelerator, record: dict[str, Any]) -> Speed:
    """The speed of another accelerator: as efficient, with its own peaks."""
    memory = (known.memory_bandwidth or 0.0) / record["memory_bandwidth"] or 1.0
    moving = typical.stream_seconds(np.array([p.bytes for p in typical.products]))
    points = []
    for point, waiting in zip(typical.products, moving, strict=True):
        ratio = _peak_ratio(known.peak_flops, record["peak_flops"], point.dtype)
        waiting = min(float(waiting), point.seconds)
        seconds = (point.seconds - waiting) / ratio + waiting / memory
        points.append(point._replace(seconds=seconds))
    return replace(_faster(typical, 1.0, memory), products=tuple(points))


def _peak_ratio(
    peaks: Mapping[str, float], measured: Mapping[str, float], dtype: str
) -> float:
    names = [name for name in _PEAKS[dtype] if name in peaks]
    return peaks[names[0]] / measured[_PEAKS[dtype][0]] if names else 1.0


def _faster(speed: Speed, compute: float, memory: float) -> Speed:
    least = max(compute, memory)
    return replace(
        speed,
        products=tuple(p._replace(seconds=p.seconds / compute) for p in speed.products),
        streams=tuple(p._replace(seconds=p.seconds / memory) for p in speed.streams),
        per_dear={name: each / least for name, each in speed.per_dear.items()},
        per_summed={name: each / least for name, each in speed.per_summed.items()},
        per_number=speed.per_number / least,
        per_random=speed.per_random / least,
    )


def fingerprint(machine: Machine) -> dict[str, Any]:
    """What a measured speed depends on."""
    return {
        "format": _FORMAT,
        "device": machine.title,
        "kind": machine.kind,
        "num_devices": machine.num_devices,
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.machine(),
        "jax": jax.__version__,
    }


def store_speed(machine: Machine, speed: Speed) -> Path:
    """Remembers a measured speed; returns the file."""
    file = _file(machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "fingerprint": fingerprint(machine),
        "date": date.today().isoformat(),
        "speed": speed_to_json(speed),
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return file


def load_speed(machine: Machine) -> KnownSpeed | None:
    """The speed that was measured on this machine, if there is one."""
    try:
        record = json.loads(_file(machine).read_text(encoding="utf-8"))
        speed = speed_from_json(record["speed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    source = f"calibrated on this machine on {record['date']}"
    _, typical = _typical(machine.kind)
    error = typical.get("calibrated_error")
    return KnownSpeed(speed=speed, source=source, error=error)


def _file(machine: Machine) -> Path:
    key = json.dumps(fingerprint(machine), sort_keys=True).encode()
    return _folder() / f"speed-{hashlib.sha256(key).hexdigest()[:16]}.json"


def _folder() -> Path:
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    usual = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(usual) / "meshwright"


def speed_to_json(speed: Speed) -> dict[str, Any]:
    """A speed as JSON values."""
    return asdict(speed)


def speed_from_json(record: dict[str, Any]) -> Speed:
    """A speed from JSON values."""
    return Speed(
        **{
            **record,
            "products": tuple(ProductPoint(*each) for each in record["products"]),
            "streams": tuple(StreamPoint(*each) for each in record["streams"]),
            "collectives": tuple(
                CollectivePoint(*each) for each in record["collectives"]
            ),
            "crowding": tuple(CrowdPoint(*each) for each in record["crowding"]),
        }
    )
