"""Which plan is wanted, and what a training with it takes and costs."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from meshwright.devices.sizes import format_bytes, is_count
from meshwright.errors import ObjectiveError
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import PARTS, Candidate
from meshwright.planner.figures import (
    UNKNOWN,
    draw_table,
    format_dollars,
    format_seconds,
    format_share,
)

OBJECTIVES = ("fastest", "cheapest", "smallest")
"""The least time, the least money, the least memory of a device."""

CLOSE = 1.02
"""Predictions within this ratio are too close to tell plans apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What is wanted of a plan.

    Arguments:
        objective: One of `OBJECTIVES`; None is `'cheapest'` under a deadline, and
            `'fastest'` otherwise.
        finish_by: Hours that the whole training may take.
        at_most: US dollars that it may cost.
        samples: Samples of an epoch, for both.
        epochs: How many there are; 1 if left out.

    Raises:
        ObjectiveError: They contradict themselves, or miss something.

    >>> Wishes(finish_by=1, samples=50_000, epochs=90).objective
    'cheapest'
    """

    objective: str | None = None
    finish_by: float | None = None
    at_most: float | None = None
    samples: int | None = None
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.objective is None:
            usual = "fastest" if self.finish_by is None else "cheapest"
            object.__setattr__(self, "objective", usual)
        self._check_objective()
        _check_amount("finish_by", self.finish_by, "hours, from the start to the end")
        _check_amount("at_most", self.at_most, "US dollars, for the whole training")
        _check_count(self.samples, "samples", "An epoch has")
        _check_count(self.epochs, "epochs", "A training has")
        needing = ("finish_by", "at_most", "epochs")
        named = [name for name in needing if getattr(self, name) is not None]
        if self.samples is None and named:
            raise ObjectiveError(
                f"A plan was asked for with {' and '.join(named)} and without samples.",
                "How long a training takes depends on the samples of an epoch.",
                "Pass their number, for example samples=50_000.",
            )

    def _check_objective(self) -> None:
        if self.objective in OBJECTIVES:
            return
        named = str(self.objective).lower()
        near = difflib.get_close_matches(named, OBJECTIVES, n=1, cutoff=0.5)
        raise ObjectiveError(
            f"{self.objective!r} is not an objective.",
            f"The objectives are {', '.join(map(repr, OBJECTIVES))}; finish_by and "
            "at_most bound time and money.",
            f"Did you mean {near[0]!r}?" if near else "Use 'fastest'.",
        )

    @property
    def deadline(self) -> float | None:
        """Seconds that the whole training may take."""
        return None if self.finish_by is None else 3600 * self.finish_by

    def num_steps(self, batch_size: int) -> int | None:
        """Steps of the whole training; None if its samples are not known."""
        if self.samples is None:
            return None
        return -(-self.samples // batch_size) * (self.epochs or 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Plans in their order, each with the reason why it stands where it does."""

    best: Candidate | None
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]


def choose(
    candidates: Iterable[Candidate], wishes: Wishes, *, batch_size: int
) -> Choice:
    """Ranks the plans that fit by what is wanted, and says why others lose.

    Arguments:
        candidates: Plans with their predictions; what does not fit stays out.
        wishes: What is wanted.
        batch_size: Samples of a step.

    Raises:
        ObjectiveError: There is a budget, and the price of the devices is not known.

    >>> from meshwright.parallel.plan import Plan
    >>> made = [Candidate(plan=Plan(data=1), step_seconds=3.0),
    ...         Candidate(plan=Plan(data=2), step_seconds=2.0)]
    >>> choose(made, Wishes(objective="cheapest"), batch_size=32).best.plan.data
    1
    """
    kept: list[Candidate] = []
    out: list[Candidate] = []
    for candidate in candidates:
        checked = _keep_bounds(candidate, wishes, batch_size)
        (kept if checked.fits else out).append(checked)
    kept.sort(key=lambda each: _rank(each, wishes.objective))
    because = f"the {wishes.objective} of the plans that fit"
    if _put_plainest_first(kept, wishes.objective):
        because = f"the plainest of the {wishes.objective} plans that fit"
    ranked = tuple(
        _with_because(each, kept[0], wishes.objective, because) for each in kept
    )
    best = ranked[0] if ranked else None
    return Choice(best=best, candidates=ranked, rejected=tuple(out))


def _keep_bounds(candidate: Candidate, wishes: Wishes, batch_size: int) -> Candidate:
    """The same candidate, or one that does not fit because of time or money."""
    steps = wishes.num_steps(batch_size)
    if not candidate.fits or candidate.seconds is None or steps is None:
        return candidate
    job = candidate.seconds * steps
    if wishes.deadline is not None and job > wishes.deadline:
        because = (
            f"the training takes {_predicted(candidate)} {format_seconds(job)} > "
            f"{format_seconds(wishes.deadline)}"
        )
        return replace(candidate, fits=False, reason="deadline", because=because)
    if wishes.at_most is None:
        return candidate
    if candidate.dollars_per_hour is None:
        raise ObjectiveError(
            f"A budget of {format_dollars(wishes.at_most)} was given for devices whose "
            "price is not known.",
            "The catalog has prices of accelerators, and none of this one.",
            "Leave at_most out, or write the price into a catalog of your own and set "
            "MESHWRIGHT_CATALOG to it.",
        )
    cost = candidate.dollars_per_hour * job / 3600
    if cost > wishes.at_most:
        because = (
            f"the training costs {_predicted(candidate)} {format_dollars(cost)} > "
            f"{format_dollars(wishes.at_most)}"
        )
        return replace(candidate, fits=False, reason="budget", because=because)
    return candidate


def _rank(candidate: Candidate, objective: str | None) -> tuple[float, ...]:
    seconds = _or_last(candidate.seconds)
    device_seconds = _or_last(candidate.device_seconds)
    memory = _or_last(candidate.memory_bytes)
    wanted = {"cheapest": device_seconds, "smallest": memory}.get(str(objective))
    first = seconds if wanted is None else wanted
    return first, seconds, device_seconds, num_special(candidate.plan), memory


def _put_plainest_first(ranked: list[Candidate], objective: str | None) -> bool:
    """Predictions that are close to each other do not decide; plainness does.

    Returns whether another plan would be first otherwise.
    """
    if not ranked or objective == "smallest":
        return False
    most = CLOSE * _rank(ranked[0], objective)[0]
    close = [each for each in ranked if _rank(each, objective)[0] <= most]
    plainest = min(close, key=lambda each: (num_special(each.plan), each.num_devices))
    first = ranked[0]
    ranked.remove(plainest)
    ranked.insert(0, plainest)
    return plainest is not first


def num_special(plan: Plan) -> int:
    """How many things about a plan are special.

    >>> num_special(Plan(data=8)), num_special(Plan(fsdp=2, remat=True))
    (0, 2)
    """
    degrees = (plan.fsdp, plan.tensor, plan.stages, plan.accumulate)
    special = sum(degree > 1 for degree in degrees)
    return special + plan.remat + plan.offload + (plan.precision is not None)


def _with_because(
    candidate: Candidate, best: Candidate, objective: str | None, best_because: str
) -> Candidate:
    if candidate is best:
        because = best_because
    else:
        because = why_behind(candidate, best, objective)
    known = f"; {candidate.because}" if candidate.because else ""
    return replace(candidate, because=because + known)


def why_behind(candidate: Candidate, best: Candidate, objective: str | None) -> str:
    """By how much a plan is behind the best one, and what makes the difference."""
    if objective == "smallest":
        if candidate.memory_bytes is None or best.memory_bytes is None:
            return "its memory is not known"
        more = candidate.memory_bytes - best.memory_bytes
        return f"predicted {format_bytes(more)} more per device" if more else "as small"
    is_cheap = objective == "cheapest"
    own = candidate.device_seconds if is_cheap else candidate.seconds
    least = best.device_seconds if is_cheap else best.seconds
    if own is None or least is None:
        return "its time is not known"
    word = "dearer" if is_cheap else "slower"
    if own < least * 0.9995:
        better = (
            f"{format_share(1 - own / least)} {'cheaper' if is_cheap else 'faster'}"
        )
        return f"{_predicted(candidate)} {better}, too close to tell, and less plain"
    if own <= least * 1.0005:
        return f"as {'cheap' if is_cheap else 'fast'}, and less plain"
    share = own / least - 1
    how = f"{share + 1:.1f} x as dear" if is_cheap else f"{share + 1:.1f} x the time"
    text = f"{format_share(share)} {word}" if share < 1 else how
    reason = None if is_cheap else _largest_difference(candidate, best)
    return f"{_predicted(candidate)} {text}" + (f": {reason}" if reason else "")


def _largest_difference(candidate: Candidate, best: Candidate) -> str | None:
    """The part of a step that takes longest beyond the best plan's."""
    more = {
        part: candidate.parts.get(part, 0.0) - best.parts.get(part, 0.0)
        for part in PARTS
    }
    part = max(more, key=lambda each: more[each])
    return f"{format_seconds(more[part])} more {part}" if more[part] > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRow:
    """A training with the best plan for so many devices; all figures are predicted."""

    candidate: Candidate
    """That plan; the least bad one if none fits."""
    batch_size: int
    """Of the global batch; it grows with the devices in weak scaling."""
    is_weak: bool = False
    speed_up: float | None = None
    """Samples in a second, over those of the fewest devices that fit."""
    efficiency: float | None = None
    """The share of a perfect speed-up."""
    epoch_seconds: float | None = None
    epoch_dollars: float | None = None
    job_seconds: float | None = None
    """Of all epochs."""
    job_dollars: float | None = None
    is_best_return: bool = False
    """Whether speed-up times efficiency is the greatest of all rows."""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; None is unknown."""
        return {
            "num_devices": self.candidate.num_devices,
            "batch_size": self.batch_size,
            "scaling": "weak" if self.is_weak else "strong",
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "epoch_seconds": self.epoch_seconds,
            "epoch_dollars": self.epoch_dollars,
            "job_seconds": self.job_seconds,
            "job_dollars": self.job_dollars,
            "is_best_return": self.is_best_return,
            **self.candidate.to_json(),
        }


def scaling_rows(
    best_by_devices: Mapping[int, Candidate],
    *,
    batch_size: int,
    samples: int | None = None,
    epochs: int | None = None,
    is_weak: bool = False,
) -> tuple[ScalingRow, ...]:
    """What more devices bring.

    Arguments:
        best_by_devices: By a number of devices the best plan for it; the least bad one
            if none fits.
        batch_size: The global batch; in weak scaling that of one device, and the plans
            are for so many samples times the devices.
        samples: Samples of an epoch; time and money are unknown if left out.
        epochs: Epochs of the whole training; 1 if left out.
        is_weak: Whether the batch grows with the devices.

    >>> from meshwright.parallel.plan import Plan
    >>> made = {n: Candidate(plan=Plan(data=n), step_seconds=s)
    ...         for n, s in ((1, 8.0), (2, 5.0), (4, 4.0))}
    >>> [row.efficiency for row in scaling_rows(made, batch_size=32)]
    [1.0, 0.8, 0.5]
    """
    rows = []
    base: tuple[float, int] | None = None
    for number, candidate in sorted(best_by_devices.items()):
        batch = batch_size * number if is_weak else batch_size
        row = ScalingRow(candidate=candidate, batch_size=batch, is_weak=is_weak)
        if candidate.fits and candidate.seconds:
            rate = batch / candidate.seconds
            base = base or (rate, number)
            row = replace(
                row,
                speed_up=rate / base[0],
                efficiency=rate / base[0] * base[1] / number,
            )
            row = _with_costs(row, samples, epochs)
        rows.append(row)
    returns = [(row.speed_up or 0.0) * (row.efficiency or 0.0) for row in rows]
    # Of equals the fewest devices.
    winner = returns.index(max(returns)) if any(returns) else None
    return tuple(replace(r, is_best_return=i == winner) for i, r in enumerate(rows))


def _with_costs(row: ScalingRow, samples: int | None, epochs: int | None) -> ScalingRow:
    seconds = row.candidate.seconds
    if samples is None or seconds is None:
        return row
    epoch = seconds * -(-samples // row.batch_size)
    job = epoch * (epochs or 1)
    price = row.candidate.dollars_per_hour
    return replace(
        row,
        epoch_seconds=epoch,
        epoch_dollars=None if price is None else price * epoch / 3600,
        job_seconds=job,
        job_dollars=None if price is None else price * job / 3600,
    )


def band(predicted: float, error: float) -> tuple[float, float]:
    """Between what a figure lies if predictions are off by a share of the truth.

    >>> band(3.0, 0.5)
    (2.0, 6.0)
    """
    most = predicted / (1 - error) if error < 1 else inf
    return predicted / (1 + error), most


def scaling_table(
    rows: Iterable[ScalingRow], error_band: float | None = None
) -> list[str]:
    """The lines of a table of predicted figures, with the best return marked."""
    cells = [_cells(row, error_band) for row in rows]
    # Columns of which nothing is known are left out.
    used = [i for i in range(len(_HEAD)) if any(row[i] != UNKNOWN for row in cells)]
    shown = [[row[i] for i in used] + row[len(_HEAD) :] for row in cells]
    return draw_table([_HEAD[i] for i in used], shown)


_HEAD = (
    *("devices", "batch", "step", "speed-up", "efficiency"),
    *("epoch", "$/epoch", "job", "$/job"),
)


def _cells(row: ScalingRow, error_band: float | None) -> list[str]:
    candidate = row.candidate
    note = candidate.plan.describe()
    if not candidate.fits:
        note += f": {candidate.because}"
    elif candidate.step_seconds and error_band is not None:
        low, high = band(candidate.step_seconds, error_band)
        note += f": {format_seconds(low)} to {format_seconds(high)} a step"
    if row.is_best_return:
        note += "; the best return, as speed-up times efficiency is the greatest"
    return [
        str(candidate.num_devices),
        f"{row.batch_size:,}",
        format_seconds(candidate.seconds if candidate.fits else None),
        UNKNOWN if row.speed_up is None else f"{row.speed_up:.2f} x",
        format_share(row.efficiency),
        format_seconds(row.epoch_seconds),
        format_dollars(row.epoch_dollars),
        format_seconds(row.job_seconds),
        format_dollars(row.job_dollars),
        note,
    ]


def _predicted(candidate: Candidate) -> str:
    return "predicted" if candidate.measured_seconds is None else "measured"


def _or_last(number: float | None) -> float:
    return inf if number is None else number


def _check_amount(name: str, value: Any, unit: str) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value <= 0:
        raise ObjectiveError(
            f"A plan was asked for with {name}={value!r} (a {type(value).__name__}).",
            f"It takes a number above zero of {unit}.",
            f"Write, for example, {name}=2.5, or leave it out.",
        )


def _check_count(value: Any, name: str, having: str) -> None:
    if value is not None and (not is_count(value) or value < 1):
        raise ObjectiveError(
            f"A plan was asked for with {name}={value!r} (a {type(value).__name__}).",
            f"{having} a whole number of {name} from 1.",
            f"Use {name}=1 or more, or leave it out.",
        )
