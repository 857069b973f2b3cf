"""What more devices bring, and what they cost: measured here, predicted elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.bench.comparison import Tell, judged, plan_of, tell_nobody
from meshwright.bench.fleet import Fleet
from meshwright.bench.table import Column, Table
from meshwright.planner.candidates import Candidate
from meshwright.planner.figures import (
    count,
    format_dollars,
    format_seconds,
    format_share,
)
from meshwright.planner.money import ScalingRow, scaling_rows
from meshwright.planner.speeds import known_speed
from meshwright.planner.workload import Workload
from meshwright.strategies.planning import check_question, fastest_plans, strategy_of
from meshwright.strategies.timing import time_steps

MEASURED, PREDICTED = "measured here", "predicted"
"""Where the figures of a table come from; no table has both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """A training on 1, 2, 4, ... devices.

    Attributes:
        model: Its name.
        fleet: The devices.
        samples: Those of an epoch.
        epochs: How many there are.
        source: What predictions rest on.
        strategy: The strategy whose plans these are; the fastest ones if it is None.
        predicted: The plan of each number of devices, strong and weak.
        measured: The same plans with the steps that were timed here.
    """

    model: str
    fleet: Fleet
    samples: int
    epochs: int
    source: str
    strategy: str | None
    predicted: tuple[ScalingRow, ...]
    measured: tuple[ScalingRow, ...]

    def tables(self) -> tuple[Table, ...]:
        """Strong and weak scaling, what was measured and what is predicted."""
        tables = []
        for is_weak in (False, True):
            for origin, rows in self._by_origin(is_weak):
                tables.append(self._table(is_weak, origin, rows))
        return tuple(tables)

    def costs(self) -> tuple[Table, ...]:
        """What the whole training takes and costs, at the same global batch."""
        price = self.fleet.all.price
        dear = (
            f"A device costs {format_dollars(price)} an hour, and all of them are paid "
            "for until the training ends."
        )
        if price is None:
            dear = "The price of these devices is not known; give one with --price."
        best = "The best return has the greatest product of speed-up and efficiency."
        told = (dear,) if self._is_shared else (dear, best)
        what = f"{count(self.epochs, 'epoch')} of {self.samples:,} samples"
        return tuple(
            Table(
                f"{self.model}, the cost of {what}, {origin}",
                _COST_COLUMNS,
                tuple(map(self._figures, rows)),
                (*told, *self._notes(origin)),
                wide="plan",
            )
            for origin, rows in self._by_origin(is_weak=False)
        )

    def _by_origin(self, is_weak: bool) -> list[tuple[str, list[ScalingRow]]]:
        predicted = () if self.fleet.is_of_stand_ins else self.predicted
        both = ((MEASURED, self.measured), (PREDICTED, predicted))
        chosen = [(o, [r for r in rows if r.is_weak == is_weak]) for o, rows in both]
        return [(origin, rows) for origin, rows in chosen if rows]

    def _table(self, is_weak: bool, origin: str, rows: list[ScalingRow]) -> Table:
        what = "weak scaling (the batch grows with the devices)"
        if not is_weak:
            what = f"strong scaling (a global batch of {rows[0].batch_size:,})"
        return Table(
            f"{self.model}, {what}, {origin}",
            _SCALING_COLUMNS,
            tuple(map(self._figures, rows)),
            (
                f"An epoch has {self.samples:,} samples.",
                self._plans,
                *(("Bottlenecks are predicted.",) if self._tells_parts(origin) else ()),
                *self._notes(origin),
            ),
            wide="plan",
        )

    @property
    def _plans(self) -> str:
        if self.strategy is not None:
            return f"The plans are those of {self.strategy}."
        return "Each number of devices has the plan that is predicted to be fastest."

    @property
    def _is_shared(self) -> bool:
        return self.fleet.here is not None and self.fleet.here.shares_cores

    def _tells_parts(self, origin: str) -> bool:
        return origin == MEASURED and not self.fleet.is_of_stand_ins

    def _notes(self, origin: str) -> tuple[str, ...]:
        if origin == PREDICTED:
            return (f"Predictions: {self.source}.",)
        return self.fleet.notes

    def _figures(self, row: ScalingRow) -> dict[str, Any]:
        """What a row knows, by the keys of columns."""
        candidate = row.candidate
        knows_parts = not (candidate.fits and self.fleet.is_of_stand_ins)
        return {
            "devices": candidate.num_devices,
            "plan": candidate.plan.describe(),
            "batch_per_device": row.batch_size / candidate.num_devices,
            "global_batch": row.batch_size,
            "step_seconds": candidate.seconds if candidate.fits else None,
            "epoch_seconds": row.epoch_seconds,
            "epoch_dollars": row.epoch_dollars,
            "job_seconds": row.job_seconds,
            "job_dollars": row.job_dollars,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
            "bottleneck": bottleneck(candidate) if knows_parts else None,
            # Of devices that share cores none is worth more than another.
            "best_return": (row.is_best_return and not self._is_shared) or None,
        }


def measure_scaling(
    model: Any,
    batch_size: int,
    fleet: Fleet,
    *,
    samples: int | None = None,
    epochs: int = 1,
    data: Any = None,
    weak: bool = True,
    strategy: str | None = None,
    tell: Tell = tell_nobody,
) -> Scaling:
    """Times a plan of each number of devices that are here, and predicts all.

    Arguments:
        model: A built and compiled model; with values, if devices are here.
        batch_size: The global batch of strong scaling; in weak scaling each device has
            as many samples as the greatest number of devices gives it there.
        fleet: The devices.
        samples: Samples of an epoch; a hundred batches if left out.
        epochs: Epochs of the whole training, for what it costs.
        data: A batch as `(x, y)`, or its shapes, for models that do not say what they
            take.
        weak: Whether weak scaling is wanted too.
        strategy: One of `NAMED`, whose plans these are; the plans that are predicted to
            be fastest if left out.
        tell: Called with what is about to be timed.
    """
    check_question("bench", model, batch_size)
    samples = samples or 100 * batch_size
    own = max(batch_size // fleet.counts[-1], 1)
    batches = {False: dict.fromkeys(fleet.counts, batch_size)}
    if weak:
        batches[True] = {number: own * number for number in fleet.counts}
    work = Workload.of(model, fleet.all.kind, data)
    predicted: list[ScalingRow] = []
    measured: list[ScalingRow] = []
    timed: dict[Any, float] = {}
    for is_weak, sizes in batches.items():
        if strategy is None:
            found = _fastest(work, fleet, sizes)
        else:
            found = _named(strategy, work, fleet, sizes)
        first = own if is_weak else batch_size
        for rows, best in (
            (predicted, found),
            (measured, _timed(model, found, fleet, sizes, data, timed, tell)),
        ):
            rows += scaling_rows(
                best, batch_size=first, samples=samples, epochs=epochs, is_weak=is_weak
            )
    return Scaling(
        model=model.name,
        fleet=fleet,
        samples=samples,
        epochs=epochs,
        source=known_speed(fleet.part(fleet.counts[0])).source,
        strategy=strategy,
        predicted=tuple(predicted),
        measured=tuple(measured),
    )


def bottleneck(candidate: Candidate) -> str | None:
    """What most of a step goes into, by prediction.

    >>> from meshwright.parallel.plan import Plan
    >>> bottleneck(Candidate(plan=Plan(), parts={"compute": 3.0, "update": 1.0}))
    'compute, 75 %'
    """
    if not candidate.fits:
        return candidate.because
    total = sum(candidate.parts.values())
    if not total:
        return None
    part = max(candidate.parts, key=lambda each: candidate.parts[each])
    return f"{part}, {format_share(candidate.parts[part] / total)}"


def _fastest(
    work: Workload, fleet: Fleet, sizes: Mapping[int, int]
) -> dict[int, Candidate]:
    found: dict[int, Candidate] = {}
    for number, size in sizes.items():
        machine = fleet.part(number)
        found |= fastest_plans(work, machine, known_speed(machine), {number: size})
    return found


def _named(
    name: str, work: Workload, fleet: Fleet, sizes: Mapping[int, int]
) -> dict[int, Candidate]:
    return {
        number: judged(work, fleet.part(number), plan_of(name, number), size)
        for number, size in sizes.items()
    }


def _timed(
    model: Any,
    found: Mapping[int, Candidate],
    fleet: Fleet,
    sizes: Mapping[int, int],
    data: Any,
    timed: dict[Any, float],
    tell: Tell,
) -> dict[int, Candidate]:
    """The plans that can be measured; what was timed before is not timed again."""
    here = {}
    for number, candidate in found.items():
        if not (fleet.is_here(number) and candidate.fits):
            continue
        key = candidate.plan, sizes[number]
        if key not in timed:
            plan, size = candidate.plan.describe(), sizes[number]
            tell(f"timing {plan}, a batch of {size:,}")
            strategy = strategy_of(candidate.plan, fleet.part(number))
            timed[key] = time_steps(model, strategy, sizes[number], data)
        here[number] = replace(candidate, measured_seconds=timed[key])
    return here


def _show_batch(samples: float) -> str:
    return f"{samples:,.0f}" if samples == int(samples) else f"{samples:,.1f}"


_DEVICES = (Column("devices", "devices"), Column("plan", "plan"))
_GAIN = (
    Column("speed_up", "speed-up", "{:.2f} x".format),
    Column("efficiency", "efficiency", format_share),
)

_SCALING_COLUMNS = (
    *_DEVICES,
    Column("batch_per_device", "batch each", _show_batch),
    Column("global_batch", "global batch", "{:,}".format),
    Column("epoch_seconds", "epoch", format_seconds),
    *_GAIN,
    Column("bottleneck", "bottleneck"),
)

_COST_COLUMNS = (
    *_DEVICES,
    Column("job_seconds", "time", format_seconds),
    Column("epoch_dollars", "$/epoch", format_dollars),
    Column("job_dollars", "$", format_dollars),
    *_GAIN,
    Column("best_return", "return", lambda _: "best"),
)
