"""The page of a study: the best trial, how it was found, what mattered."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from meshwright.cluster.records import write_text
from meshwright.report import charts
from meshwright.report.page import (
    Section,
    command,
    facts,
    figure,
    page,
    paragraph,
    table,
)
from meshwright.trials.results import TrialRecord, TuneReport, spell

from markupsafe import Markup

_ABSENT = object()
"""For a parameter that a trial does not have; None is a value like others."""
_MOST_PATHS = 300
_MOST_AXES = 9
_DECADES = 100.0
"""Numbers whose largest is so many times their smallest have a logarithmic axis."""


def write_study_page(report: TuneReport) -> None:
    """Writes `report.html` into the run folder, whole or not at all."""
    write_text(report.report, study_page(report))


def study_page(report: TuneReport) -> str:
    """The page of a study, as one file."""
    counts = ", ".join(
        f"{report.count(state)} {state}"
        for state in ("complete", "pruned", "failed", "running", "waiting")
        if report.count(state)
    )
    head, rows = report.table()
    sections = [Section("Best", _best(report))]
    if report.complete:
        sections += [
            Section("How the search went", (_history(report),)),
            Section("What matters", (_importance(report),)),
            Section("Parameters side by side", (_parallel(report),)),
        ]
    sections += [
        Section("Trials", (table(head, rows, counts), *_failures(report))),
        Section("Study", _about(report)),
    ]
    under = f"{report.objective}, {report.direction}: {counts or 'no trials yet'}"
    return page(f"Study {report.study}", under, sections)


def _best(report: TuneReport) -> tuple[Markup, ...]:
    if not report.complete:
        return (paragraph("No trial has a value yet."),)
    best = report.best
    found = {name: spell(value) for name, value in best.params.items()}
    value = f"{best.value:.6g} in trial {best.number}"
    return (facts({"value": value, **found}),)


def _history(report: TuneReport) -> Markup:
    """Values in the order of trials, and the best so far."""
    done = sorted(report.complete, key=lambda t: t.number)
    points = [(float(t.number), t.value or 0.0) for t in done]
    better = min if report.direction == "minimize" else max
    best = [*accumulate((value for _, value in points), better)]
    line = [(x, value) for (x, _), value in zip(points, best, strict=True)]
    chart = charts.plot(
        "Values of the trials, and the best so far",
        [charts.Series("trials", points), charts.Series("best so far", line, True)],
        "trial",
        "value",
    )
    rows = [
        [str(t.number), f"{t.value:.6g}", f"{value:.6g}"]
        for t, value in zip(done, best, strict=True)
    ]
    return figure(chart, table(["trial", "value", "best so far"], rows))


def _importance(report: TuneReport) -> Markup:
    if not report.importance:
        return paragraph(
            "Not known: that takes several trials that are complete and differ."
        )
    shares = [(name, 100 * share) for name, share in report.importance.items()]
    chart = charts.bars("How much each parameter matters", shares, " %")
    rows = [[name, f"{share:.1f} %"] for name, share in shares]
    return figure(chart, table(["parameter", "share of the differences"], rows))


def _parallel(report: TuneReport) -> Markup:
    shown = report.complete[:_MOST_PATHS]
    names = list(dict.fromkeys(name for t in shown for name in t.params))
    ranked = sorted(names, key=lambda n: -report.importance.get(n, 0.0))[:_MOST_AXES]
    columns = [[t.params.get(name, _ABSENT) for t in shown] for name in ranked]
    columns.append([t.value for t in shown])
    scales = [
        _Scale(name, c) for name, c in zip([*ranked, "value"], columns, strict=True)
    ]
    paths = [
        charts.Path(
            f"trial {trial.number}",
            [s.place(c[i]) for s, c in zip(scales, columns, strict=True)],
            1 - i / len(shown),
            is_best=i == 0,
        )
        for i, trial in enumerate(shown)
    ]
    chart = charts.parallel(
        "Parameters and value of each trial; better ones are stronger",
        [charts.Axis(s.name, s.marks) for s in scales],
        paths,
    )
    rows = [_cells(trial, ranked) for trial in shown]
    return figure(chart, table(["trial", *ranked, "value"], rows))


def _cells(trial: TrialRecord, names: Sequence[str]) -> list[str]:
    return [str(trial.number), *trial.spell_params(names), spell(trial.value)]


class _Scale:
    """Where values of a parameter lie between 0 and 1: numbers, or one of some."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        known = [value for value in values if value is not _ABSENT]
        self._is_number = all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in known
        )
        if not self._is_number:
            self._choices = sorted({spell(value) for value in known})
            self.name = name
            self.marks = [(self._among(c), c) for c in self._choices]
            return
        finite = [float(v) for v in known if math.isfinite(v)] or [0.0]
        low, high = min(finite), max(finite)
        self._is_log = low > 0 and high / low >= _DECADES
        self.name = f"{name} (log)" if self._is_log else name
        self._low, self._high = self._bend(low), self._bend(high)
        self.marks = [(self._between(v), spell(float(v))) for v in {low, high}]

    def place(self, value: Any) -> float | None:
        """None if it has none."""
        if value is _ABSENT:
            return None
        if not self._is_number:
            return self._among(spell(value))
        return self._between(float(value)) if math.isfinite(value) else None

    def _among(self, choice: str) -> float:
        if len(self._choices) == 1:
            return 0.5
        return self._choices.index(choice) / (len(self._choices) - 1)

    def _between(self, value: float) -> float:
        if self._low == self._high:
            return 0.5
        return (self._bend(value) - self._low) / (self._high - self._low)

    def _bend(self, value: float) -> float:
        return math.log(value) if self._is_log else value


def _failures(report: TuneReport) -> tuple[Markup, ...]:
    rows = [[str(t.number), t.because] for t in report.trials if t.because]
    return (
        (table(["trial", "why it failed, or was tried again"], rows),) if rows else ()
    )


def _about(report: TuneReport) -> tuple[Markup, ...]:
    again = f"mw.tune({report.objective!r}, n_trials={2 * report.n_trials}, ...)"
    return (
        facts(
            {
                "objective": report.objective,
                "trials wanted": report.n_trials,
                "database": report.storage,
                "run folder": report.folder,
                "at a time": report.because,
            }
        ),
        paragraph("The same call with more trials goes on with the study:"),
        command(again),
    )
