"""What came of a study, as plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import TrialError

State = Literal["complete", "pruned", "failed", "running", "waiting"]
Direction = Literal["minimize", "maximize"]

_ROWS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """One point of a study, with all attempts at it."""

    number: int
    """Its number in the study; that of its first attempt."""
    state: State
    value: float | None = None
    """What the objective returned; of a pruned trial, what it reported last."""
    params: Mapping[str, Any] = field(default_factory=dict)
    reports: Mapping[int, float] = field(default_factory=dict)
    """What it reported, by step."""
    user_attrs: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    """Where its last attempt ran."""
    seconds: float | None = None
    """How long that took."""
    attempts: int = 1
    because: str = ""
    """Why it failed, or why it was tried again."""

    def spell_params(self, names: Sequence[str]) -> list[str]:
        """Its parameters as people read them, with a dash for one that it has not."""
        params = self.params
        return [spell(params[name]) if name in params else "-" for name in names]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; what is not finite is a text."""
        return {
            **{slot: getattr(self, slot) for slot in self.__slots__},
            "value": _finite(self.value),
            "params": {name: _finite(value) for name, value in self.params.items()},
            "reports": {str(s): _finite(value) for s, value in self.reports.items()},
            "user_attrs": dict(self.user_attrs),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneReport:
    """What `mw.tune` returns: the trials of a study, and the best of them."""

    study: str
    direction: Direction
    objective: str
    """`FILE.py:NAME`."""
    trials: tuple[TrialRecord, ...]
    n_trials: int
    """How many the study is to have."""
    storage: str
    """The URL of its database, without its password."""
    folder: Path
    """The run folder: logs of all trials, and the report."""
    seconds: float = 0.0
    """How long this call took."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """How much of the differences between values each parameter explains; sums to 1."""
    because: str = ""
    """Why so many trials ran at a time."""

    @property
    def report(self) -> Path:
        """The page with charts, for a browser."""
        return self.folder / "report.html"

    @property
    def complete(self) -> tuple[TrialRecord, ...]:
        """Trials with a value of their own, best first."""
        found = [t for t in self.trials if t.state == "complete"]
        sign = 1 if self.direction == "minimize" else -1
        return tuple(sorted(found, key=lambda t: (sign * (t.value or 0), t.number)))

    @property
    def best(self) -> TrialRecord:
        """The best trial.

        Raises:
            TrialError: None has a value.
        """
        if not self.complete:
            raise TrialError(
                f"None of the {len(self.trials)} trials of study {self.study!r} has a "
                "value.",
                "The best trial is one of those that are complete.",
                f"See why they failed in {self.folder / 'logs'}.",
            )
        return self.complete[0]

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial."""
        return dict(self.best.params)

    @property
    def best_value(self) -> float:
        """The value of the best trial."""
        value = self.best.value
        assert value is not None
        return value

    def count(self, state: State) -> int:
        """How many trials are in a state."""
        return sum(trial.state == state for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values; what is unknown is None."""
        best = self.best if self.complete else None
        return {
            "study": self.study,
            "direction": self.direction,
            "objective": self.objective,
            "n_trials": self.n_trials,
            "best_value": best and _finite(best.value),
            "best_params": best and best.to_json()["params"],
            "best_trial": best and best.number,
            "importance": dict(self.importance),
            "trials": [trial.to_json() for trial in self.trials],
            "storage": self.storage,
            "run": str(self.folder),
            "report": str(self.report),
            "seconds": round(self.seconds, 3),
        }

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows, best trials first, failed ones last."""
        names = list(dict.fromkeys(n for t in self.trials for n in t.params))
        rest = [t for t in self.trials if t.state != "complete"]
        rest.sort(key=lambda t: (t.state != "pruned", t.number))
        head = ["trial", "value", *names, "state", "time", "where"]
        return head, [_row(t, names) for t in (*self.complete, *rest)]

    def __str__(self) -> str:
        head, rows = self.table()
        shown = rows[:_ROWS]
        widths = [max(map(len, column)) for column in zip(head, *shown, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in (head, *shown)
        ]
        if len(rows) > _ROWS:
            lines.append(f"and {len(rows) - _ROWS} more")
        counts = [
            f"{self.count(state)} {state}"
            for state in ("complete", "pruned", "failed", "running", "waiting")
            if self.count(state)
        ]
        title = f"study {self.study} ({self.direction}): {', '.join(counts) or 'empty'}"
        return "\n".join([title, *(line.rstrip() for line in lines)])


def spell(value: Any) -> str:
    """A value of a parameter as people read it.

    >>> spell(0.000123456), spell("adam"), spell(None)
    ('0.0001235', 'adam', 'None')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _row(trial: TrialRecord, names: list[str]) -> list[str]:
    time = "-" if trial.seconds is None else f"{trial.seconds:.1f} s"
    again = f" ({trial.attempts} attempts)" if trial.attempts > 1 else ""
    return [
        str(trial.number),
        "-" if trial.value is None else f"{trial.value:.6g}",
        *trial.spell_params(names),
        f"{trial.state}{again}",
        time,
        trial.device or "-",
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
