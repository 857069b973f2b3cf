"""The planner's answer: the best plan, and the argument for it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from meshwright.devices.sizes import format_bytes
from meshwright.parallel.plan import Plan
from meshwright.planner.argument import Considered, figures_of, least_bad, walk
from meshwright.planner.candidates import Candidate, Reason
from meshwright.planner.figures import (
    count,
    draw_table,
    format_dollars,
    format_seconds,
    format_share,
    indent,
)
from meshwright.planner.machines import Machine
from meshwright.planner.money import ScalingRow, scaling_table

SHOWN = 5
"""Of plans of one sort so many are printed; the report has them all."""

_HEADINGS: dict[Reason, str] = {
    "memory": "need more memory than a device has",
    "division": "cannot be split in this way",
    "parts": "compute statistics and random numbers of parts of a batch",
    "bubble": "leave too much of a pipeline idle",
    "slower": "are slower than a plan like them",
    "larger": "need more than a plan like them",
    "deadline": "take too long",
    "budget": "cost too much",
    "": "are out for other reasons",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """Which plan to use for a model, a batch and a machine, and why.

    Printed it is the argument: the plans that fit, why the others do not, the decision
    step by step, and what more devices bring.
    """

    model: str
    """Its name."""
    batch_size: int
    machine: Machine
    best: Candidate | None
    """None if nothing fits."""
    candidates: tuple[Candidate, ...]
    """The plans that fit, the best one first."""
    rejected: tuple[Candidate, ...] = ()
    """The plans that do not, each with its reason."""
    objective: str = "fastest"
    error_band: float | None = None
    """The measured error of predictions, as a share: 0.1 is 10 %; None if unknown."""
    source: str = "catalog peaks, not calibrated"
    """What the predictions rest on."""
    samples: int | None = None
    """Samples of an epoch."""
    epochs: int | None = None
    scaling: tuple[ScalingRow, ...] = ()
    """The best plan for 1, 2, 4, ... devices."""

    @property
    def least_bad(self) -> Candidate | None:
        """If nothing fits, the plan that comes closest."""
        return None if self.best else least_bad(self.rejected)

    @property
    def code(self) -> str | None:
        """The line that puts the best plan to use; None if nothing fits."""
        return None if self.best is None else _code(self.best.plan, self.machine)

    def timeline(self) -> str:
        """The timetable of the best plan's pipeline, or that there is none."""
        shown = self.best or self.least_bad
        if shown is None or shown.plan.stages == 1:
            return "The plan has no stages, so there is no timetable."
        return shown.plan.schedule_of().timeline()

    def to_json(self) -> dict[str, Any]:
        """What is known, as JSON values; None is unknown."""
        closest = self.least_bad
        return {
            "best": None if self.best is None else self.best.to_json(),
            "candidates": [each.to_json() for each in self.candidates],
            "rejected": [each.to_json() for each in self.rejected],
            "least_bad": None if closest is None else closest.to_json(),
            "model": self.model,
            "batch_size": self.batch_size,
            "machine": self.machine.to_json(),
            "objective": self.objective,
            "error_band": self.error_band,
            "source": self.source,
            "samples": self.samples,
            "epochs": self.epochs,
            "scaling": [row.to_json() for row in self.scaling],
            "code": self.code,
        }

    def decision(self) -> list[str]:
        """The walked decision tree, a line for each question."""
        rows = [row.candidate for row in self.scaling if not row.is_weak]
        known = {each.plan for each in (*self.candidates, *self.rejected)}
        # If nothing is as wished, a plan that only fits is no answer.
        others = [
            each
            for each in rows
            if each.plan not in known and (self.best or not each.fits)
        ]
        considered = Considered(
            self.machine,
            self.objective,
            (*self.candidates, *(each for each in others if each.fits)),
            (*self.rejected, *(each for each in others if not each.fits)),
        )
        return walk(considered)

    def __str__(self) -> str:
        return "\n".join([self.argument(), *self.how_to_go_on()])

    def how_to_go_on(self) -> list[str]:
        """The lines that say how to use the best plan; none if nothing fits."""
        return ["", f"Use it: {self.code}"] if self.code else []

    def argument(self) -> str:
        """What fits, what does not, the decision, and what more devices bring."""
        lines = [*self._headline(), "", *self._table()]
        if self.rejected:
            lines += ["", *self._rejections()]
        lines += ["", "The decision, step by step"]
        for line in self.decision():
            lines += indent(line)
        for is_weak in (False, True):
            rows = [row for row in self.scaling if row.is_weak == is_weak]
            lines += self._scaling(rows) if rows else []
        return "\n".join(lines)

    def _headline(self) -> Iterator[str]:
        machine = self.machine
        yield from indent(
            f"Plans for {self.model!r}, a global batch of {self.batch_size:,}, on "
            f"{machine}",
            0,
        )
        memory = machine.usable_memory
        room = "unknown" if memory is None else format_bytes(memory)
        yield from indent(
            f"usable memory of a device: {room} ({machine.memory_because})"
        )
        if machine.price is not None:
            when = f", catalog of {machine.price_date}" if machine.price_date else ""
            yield f"  price of a device: {format_dollars(machine.price)} an hour{when}"
        yield f"  wanted: the {self.objective}"
        error = self.error_band
        sure = "their error is not known"
        if error is not None:
            sure = (
                f"nine of ten were within {format_share(error)} where it was measured"
            )
        yield from indent(f"predictions: {self.source}; {sure}")

    def _table(self) -> list[str]:
        if self.best is None:
            return self._nothing_fits()
        measured = any(each.measured_seconds is not None for each in self.candidates)
        head = ["", "plan", "predicted step", "memory", "bubble", "$/hour"]
        head[3:3] = ["measured"] if measured else []
        rows = []
        for number, each in enumerate(self.candidates[:SHOWN], start=1):
            cells = [str(number), *_cells(each, measured)]
            rows.append([*cells, f"   {each.because}"])
        title = f"{count(len(self.candidates), 'plan')} fit; predicted, the best first"
        if len(self.candidates) == 1:
            title = "1 plan fits; predicted"
        more = len(self.candidates) - SHOWN
        left = [f"  and {more:,} more"] if more > 0 else []
        return [title, *draw_table(head, rows, wide=1), *left]

    def _nothing_fits(self) -> list[str]:
        closest = self.least_bad
        if closest is None:
            return ["No plan fits, and none could be looked at."]
        lines = ["No plan fits. The least bad one, predicted:"]
        text = f"{closest.plan.describe()}: {closest.because}"
        lines += indent(text)
        lines += indent(figures_of(closest))
        needed, usable = closest.memory_bytes, self.machine.usable_memory
        if needed is not None and usable is not None and needed > usable:
            lines += indent(
                f"predicted {format_bytes(needed - usable)} too much for a device"
            )
        return lines

    def _rejections(self) -> list[str]:
        lines = [f"{count(len(self.rejected), 'plan')} rejected"]
        for reason, heading in _HEADINGS.items():
            group = [each for each in self.rejected if each.reason == reason]
            if not group:
                continue
            lines.append(f"  {len(group):,} {heading}")
            alike: dict[str, list[Candidate]] = {}
            for each in sorted(group, key=lambda each: each.memory_bytes or 0):
                alike.setdefault(each.because, []).append(each)
            for because, plans in list(alike.items())[:SHOWN]:
                others = f" (and {len(plans) - 1:,} like it)" if plans[1:] else ""
                text = f"{plans[0].plan.describe()}: {because}{others}"
                lines += indent(text, 2)
            if len(alike) > SHOWN:
                lines.append(f"    and {len(alike) - SHOWN:,} more")
        return lines

    def _scaling(self, rows: list[ScalingRow]) -> list[str]:
        first = rows[0]
        if first.is_weak:
            what = "Weak scaling, predicted: the batch grows with the devices"
        else:
            what = f"Strong scaling, predicted: a batch of {first.batch_size:,}"
        if self.samples is not None:
            what += f", epochs of {self.samples:,} samples"
        if self.epochs is not None:
            what += f", {count(self.epochs, 'epoch')}"
        return ["", what, *scaling_table(rows, self.error_band)]


def _cells(candidate: Candidate, measured: bool) -> list[str]:
    memory = candidate.memory_bytes
    cells = [candidate.plan.describe(), format_seconds(candidate.step_seconds)]
    cells += [format_seconds(candidate.measured_seconds)] if measured else []
    return [
        *cells,
        "-" if memory is None else format_bytes(memory),
        format_share(candidate.bubble),
        format_dollars(candidate.dollars_per_hour),
    ]


def _code(plan: Plan, machine: Machine) -> str:
    usual = Plan()
    if plan.stages > 1:
        # Its schedule has a usual number of chunks, which need not be said.
        usual = Plan(stages=2, schedule=plan.schedule, microbatches=2)
    always = ("stages", "microbatches", "schedule") if plan.stages > 1 else ()
    given = [
        f"{name}={getattr(plan, name)!r}"
        for name in (field.name for field in fields(plan))
        if name in always or getattr(plan, name) != getattr(usual, name)
    ]
    if 1 < plan.num_devices < machine.num_devices:
        given.append(f"devices=mw.devices({machine.kind!r})[:{plan.num_devices}]")
    strategy = "Single" if plan.num_devices == 1 else "Hybrid"
    return f"mw.distribute(model, mw.{strategy}({', '.join(given)}))"
