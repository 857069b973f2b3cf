"""One plan with what it is predicted to take, and why it won or lost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from meshwright.parallel.plan import Plan

PARTS = ("compute", "communication", "bubble", "update", "input", "overhead")
"""What a step spends its seconds on, in the order in which they are shown."""

Reason = Literal[
    "memory",
    "division",
    "parts",
    "bubble",
    "slower",
    "larger",
    "deadline",
    "budget",
    "",
]
"""Why a plan is out: it needs too much memory; something does not divide; it computes
statistics of parts of a batch without need; too much of the pipeline stands idle; a
plan like it is faster, or needs less; it takes or costs too much."""

_JSON_FIELDS = (
    *("data", "fsdp", "tensor", "stages", "microbatches", "schedule", "accumulate"),
    *("remat", "precision"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan, and what the planner knows of it; `None` means unknown.

    >>> candidate = Candidate(plan=Plan(data=8), step_seconds=0.125, memory_bytes=2**30,
    ...                       dollars_per_hour=63.3, because="the fastest")
    >>> candidate.num_devices, candidate.device_seconds
    (8, 1.0)
    """

    plan: Plan
    step_seconds: float | None = None
    """Predicted."""
    memory_bytes: int | None = None
    """Predicted, of the device that needs most."""
    memory_by_kind: Mapping[str, int] = field(default_factory=dict)
    """How it divides: parameters, gradients, optimizer, activations, ..."""
    bubble: float | None = None
    """The idle share of the stages' time; None without stages."""
    dollars_per_hour: float | None = None
    """Of all its devices."""
    fits: bool = True
    """Whether memory suffices, everything divides as it must, and wishes are kept."""
    because: str = ""
    """Why it won or lost, with the number; without the name of the plan."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of a step by part, of `PARTS`; they sum to `step_seconds`."""
    reason: Reason = ""
    """Under which heading a rejected plan is shown."""
    measured_seconds: float | None = None
    """What a step took, if it was measured here."""

    @property
    def num_devices(self) -> int:
        """Devices of its plan."""
        return self.plan.num_devices

    @property
    def seconds(self) -> float | None:
        """Of a step: measured, or else predicted."""
        measured = self.measured_seconds
        return self.step_seconds if measured is None else measured

    @property
    def device_seconds(self) -> float | None:
        """Of a step, which all its devices are paid for."""
        return None if self.seconds is None else self.seconds * self.num_devices

    def to_json(self) -> dict[str, Any]:
        """The entry of a report."""
        plan = {name: getattr(self.plan, name) for name in _JSON_FIELDS}
        return {
            "plan": plan,
            "step_seconds": self.step_seconds,
            "memory_bytes": self.memory_bytes,
            "bubble": self.bubble,
            "dollars_per_hour": self.dollars_per_hour,
            "fits": self.fits,
            "because": self.because,
            "memory_by_kind": dict(self.memory_by_kind),
            "parts": dict(self.parts),
            "measured_seconds": self.measured_seconds,
        }
