"""The Plan: one point in the space of all ways to split a training."""

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Literal, TypedDict

from meshwright.errors import PlanError
from meshwright.parallel.schedules import DEFAULT_SCHEDULE, Schedule, make_schedule

AXES = ("data", "fsdp", "tensor")
"""Axes of the mesh, outermost first: neighbours talk most along the last."""

BATCH_AXES = ("data", "fsdp")
"""Axes over which the batch is split."""

Spec = tuple[str | None, ...]
"""One axis name or None per dim."""

MICROBATCHES = 4
"""So many for each stage if nobody says otherwise; the bubble is then under a fifth."""

Precision = Literal["float32", "bfloat16", "float16"]
_FLAGS = {"remat": "Rematerialisation", "offload": "Offloading"}

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")


class Levers(TypedDict, total=False):
    """The fields of a Plan that every strategy takes: they trade memory for time."""

    accumulate: int
    remat: bool
    precision: Precision | None
    offload: bool


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
    """Pieces that the model is cut into, each on devices of its own."""
    microbatches: int | None = None
    """Parts of a batch that flow through the stages; None without stages."""
    schedule: str | None = None
    """In which order they do: one of `SCHEDULES`; None without stages."""
    chunks: int | None = None
    """Pieces on each stage, for the schedule `interleaved`."""
    cuts: tuple[str, ...] = ()
    """Names of the layers at which a piece begins; without the first."""
    accumulate: int = 1
    """Microbatches that a batch is computed in, one after the other, for one update."""
    remat: bool = False
    """Activations inside of blocks are computed again for the gradients, not kept."""
    precision: Precision | None = None
    """What layers compute in; None leaves it as the model has it."""
    offload: bool = False
    """The optimizer's state lies in the memory of the host between updates."""
    rules: tuple[tuple[str, Spec], ...] = ()
    """Ordered placement rules: a pattern in a variable's path, and its spec."""

    def __post_init__(self) -> None:
        for axis in (*AXES, "stages"):
            if not _is_count(getattr(self, axis)):
                self._refuse(
                    axis,
                    "The degree of an axis is a whole number from 1.",
                    f"Use {axis}=1 to leave that axis out.",
                )
        self._check_stages()
        self._check_levers()

    def _check_stages(self) -> None:
        if self.stages == 1:
            for field in ("microbatches", "schedule", "chunks", "cuts"):
                if getattr(self, field) not in (None, ()):
                    self._refuse(
                        field,
                        "It says how a batch flows through several stages.",
                        "Use stages=2 or more, or leave it out.",
                    )
            return
        if self.accumulate != 1:
            self._refuse(
                "accumulate",
                "The microbatches of a pipeline add up their gradients already.",
                "Use microbatches= of Pipeline or Hybrid for it.",
            )
        if self.offload:
            self._refuse(
                "offload",
                "The stages of a pipeline update their weights on their own, with the "
                "optimizer's state beside them.",
                "Leave offload out, or use fsdp= or tensor= instead of stages.",
            )
        object.__setattr__(self, "schedule", self.schedule or DEFAULT_SCHEDULE)
        if self.microbatches is None:
            object.__setattr__(self, "microbatches", MICROBATCHES * self.stages)
        object.__setattr__(self, "chunks", self.schedule_of().num_chunks)
        if not all(isinstance(name, str) for name in self.cuts):
            self._refuse(
                "cuts",
                "Pieces begin at layers, which have names.",
                "Use, for example, cuts=('block3', 'head').",
            )
        if self.cuts and len(self.cuts) != self.num_pieces - 1:
            self._refuse(
                "cuts",
                f"{self.num_pieces} pieces begin at {self.num_pieces - 1} layers; the "
                "first begins at the inputs.",
                "Name as many layers, or none.",
            )

    def _check_levers(self) -> None:
        if not _is_count(self.accumulate):
            self._refuse(
                "accumulate",
                "A batch is computed in a whole number of microbatches from 1.",
                "Use accumulate=1 to compute it at once.",
            )
        for field, name in _FLAGS.items():
            if not _is_flag(getattr(self, field)):
                self._refuse(
                    field,
                    f"{name} is on or off.",
                    f"Use {field}=True or {field}=False.",
                )
        if self.precision not in (None, *PRECISIONS):
            self._refuse(
                "precision",
                f"Layers compute in {', '.join(PRECISIONS)}, or, with None, in what "
                "the model says.",
                "Use, for example, precision='bfloat16'.",
            )

    def _refuse(self, field: str, rule: str, change: str) -> None:
        value = getattr(self, field)
        kind = type(value).__name__
        raise PlanError(f"A plan received {field}={value!r} (a {kind}).", rule, change)

    @property
    def num_devices(self) -> int:
        """The product of all degrees."""
        return self.stages * prod(getattr(self, axis) for axis in AXES)

    @property
    def num_pieces(self) -> int:
        """Pieces that the model is cut into."""
        return self.stages * (self.chunks or 1)

    def schedule_of(self, num_microbatches: int | None = None) -> Schedule:
        """The schedule of a batch.

        Arguments:
            num_microbatches: Those of the batch, if it is a tail that has fewer.
                `interleaved` wants a multiple of the stages; then the last ones of such
                a schedule are left out.
        """
        assert self.schedule is not None
        assert self.microbatches is not None
        number = num_microbatches or self.microbatches
        is_tail = number != self.microbatches and self.schedule == "interleaved"
        wanted = -(-number // self.stages) * self.stages if is_tail else number
        made = make_schedule(self.schedule, self.stages, wanted, self.chunks)
        if wanted == number:
            return made
        left = tuple(a for a in made.actions if a.microbatch < number)
        return replace(made, num_microbatches=number, actions=left)

    @property
    def num_replicas(self) -> int:
        """Into how many parts a batch is split."""
        return self.data * self.fsdp

    def describe(self) -> str:
        """The degrees in words, without those of 1, and what else is special.

        >>> Plan(data=2, tensor=2, accumulate=4, remat=True).describe()
        'data=2 x tensor=2, accumulate=4, remat'
        """
        axes = (*AXES, "stages")
        degrees = [f"{a}={getattr(self, a)}" for a in axes if getattr(self, a) > 1]
        parts = [" x ".join(degrees) or "one device"]
        if self.stages > 1:
            parts.append(f"microbatches={self.microbatches}, {self.schedule}")
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.remat:
            parts.append("remat")
        if self.precision:
            parts.append(self.precision)
        if self.offload:
            parts.append("offload")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        rules = [[p, list(spec)] for p, spec in self.rules]
        return {**values, "rules": rules, "cuts": list(self.cuts)}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)
