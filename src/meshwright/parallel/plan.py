"""The Plan: one point in the space of all ways to split a training."""

from dataclasses import dataclass, fields
from math import prod
from typing import Any

from meshwright.errors import PlanError

AXES = ("data", "fsdp", "tensor")
"""Axes of the mesh, outermost first: neighbours talk most along the last."""

BATCH_AXES = ("data", "fsdp")
"""Axes over which the batch is split."""

Spec = tuple[str | None, ...]
"""One axis name or None per dim."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a model and its batch are split over devices.

    >>> plan = Plan(data=2, fsdp=4)
    >>> plan.num_devices, plan.num_replicas
    (8, 8)
    """

    data: int = 1
    """Ways the batch is split, each with a replica of the state."""
    fsdp: int = 1
    """Ways parameters and optimizer state are sharded; the batch is split too."""
    tensor: int = 1
    """Ways single weights are split inside a layer."""
    stages: int = 1
    """Pipeline stages; more than one is not there yet."""
    rules: tuple[tuple[str, Spec], ...] = ()
    """Ordered placement rules: a pattern in a variable's path, and its spec."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "stages"):
            degree = getattr(self, axis)
            is_count = isinstance(degree, int) and not isinstance(degree, bool)
            if not is_count or degree < 1:
                raise PlanError(
                    f"A plan received {axis}={degree!r} (a {type(degree).__name__}).",
                    "The degree of an axis is a whole number from 1.",
                    f"Use {axis}=1 to leave that axis out.",
                )

        if self.stages > 1:
            raise PlanError(
                f"A plan received stages={self.stages}.",
                "Pipeline stages are not there yet.",
                "Use stages=1, and fsdp or tensor to fit a large model.",
            )

    @property
    def num_devices(self) -> int:
        """The product of all degrees."""
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def num_replicas(self) -> int:
        """Into how many parts a batch is split."""
        return self.data * self.fsdp

    def describe(self) -> str:
        """The degrees in words, without those of 1."""
        parts = [f"{a}={getattr(self, a)}" for a in AXES if getattr(self, a) > 1]
        return " x ".join(parts) or "one device"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "rules": [[p, list(spec)] for p, spec in self.rules]}
