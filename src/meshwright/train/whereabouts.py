"""Where a model in training lies, and what that takes, as JSON values."""

import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

from meshwright.devices.runtime import name_of, usable_memory
from meshwright.errors import MonitorWarning
from meshwright.train.model_state import placed_values

PLACEMENT, MEMORY, OCCUPATION = "placement.json", "memory.json", "devices.json"
"""Files of a run folder: where variables lie, what a step takes, what devices did."""


def files_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Where a model lies and what its step takes, under the names of their files."""
    yield PLACEMENT, whereabouts(model)
    try:
        yield MEMORY, memory_in_use(model)
    except Exception as error:  # what cannot be told must not stop a training
        warnings.warn(
            f"The memory of a step of {model.name!r} cannot be told: {error!r}. The "
            "training goes on.",
            MonitorWarning,
            stacklevel=2,
        )


def whereabouts(model: Any) -> list[dict[str, Any]]:
    """Where each variable lies and what it takes there; no metrics."""
    return [
        {
            "kind": kind,
            "name": name,
            "shape": list(value.shape),
            "dtype": str(value.dtype),
            "shard": list(value.sharding.shard_shape(value.shape)),
            "bytes": prod(value.sharding.shard_shape(value.shape))
            * value.dtype.itemsize,
            "memory": value.sharding.memory_kind,
            "devices": sorted(name_of(device) for device in value.sharding.device_set),
        }
        for kind, name, value in placed_values(model)
    ]


def memory_in_use(model: Any) -> dict[str, dict[str, Any]]:
    """What the newest training step takes on each device, by the compiler's account.

    Of devices of this process their limit and what their allocator gave away at the
    most are told too, where these are known.
    """
    step: Any = getattr(model.train_function, "guarded", None)
    if not hasattr(step, "memory_in_use"):
        return {}
    return {
        name_of(device): {"kinds": dict(kinds), **_allocator(device)}
        for devices, kinds in step.memory_in_use()
        for device in devices
    }


def _allocator(device: Any) -> dict[str, int | None]:
    if device.process_index != device.client.process_index():
        return {"limit": None, "peak": None}
    known = device.memory_stats() or {}
    return {"limit": usable_memory(device), "peak": known.get("peak_bytes_in_use")}
