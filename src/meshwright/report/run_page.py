"""The page of a run: how it went, where its time went, what lay where, and why."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from meshwright.devices.sizes import format_bytes
from meshwright.parallel.plan import Plan
from meshwright.planner.figures import format_dollars, format_seconds, format_share
from meshwright.report import charts
from meshwright.report.mesh_chart import draw_mesh
from meshwright.report.page import (
    Section,
    command,
    facts,
    figure,
    folded,
    page,
    paragraph,
    table,
)
from meshwright.report.run_record import RunRecord

from markupsafe import Markup

_WORDS = {
    "devices": "devices at work",
    "computing": "computing",
    "communicating": "communicating",
    "pausing": "devices paused",
    "input": "waiting for data",
    "host": "waiting for Python",
    "compile": "compiling",
}
_MOST_ROWS = 200
"""Longer tables are thinned out; the run folder has everything."""

_MOST_OPEN = 20
"""Tables with more rows are folded."""

_QUIET_EVENTS = {"saved", "section"}


def run_page(run: RunRecord) -> str:
    """The page of a run, as one file."""
    sections = [
        Section("In short", _summary(run)),
        Section("Loss and metrics", _curves(run)),
        Section("Throughput", _throughput(run)),
        Section("Where the time went", _time(run)),
        Section("What each device did", _occupation(run)),
        Section("Memory", _memory(run)),
        Section("The devices and what lies where", _placement(run)),
        Section("The pipeline", _pipeline(run)),
        Section("The plan, and why the others lost", _plan(run)),
        Section("More devices, and what they cost", _scaling(run)),
        Section("What happened", _events(run)),
        Section("Environment", _environment(run)),
    ]
    shown = [section for section in sections if section.parts]
    return page(f"Run {run.name}", run.state, shown)


def _summary(run: RunRecord) -> tuple[Markup, ...]:
    found: dict[str, Any] = {"state": run.state}
    if run.metrics:
        last = run.metrics[-1]
        found["epochs"] = last["epoch"] + 1
        found |= {
            name: f"{last[name]:.6g}"
            for name in last
            if name.removeprefix("val_") in run.names and last[name] is not None
        }
        if last.get("goodput") is not None:
            share = format_share(last["goodput"])
            rest = "the rest went into starting, compiling, validation and saving"
            found["time in which steps were taken (goodput)"] = f"{share}; {rest}"
    found["strategy"] = run.plan.get("strategy", "unknown")
    found["devices"] = ", ".join(map(_short, run.plan.get("devices", []))) or "unknown"
    if run.wall_seconds:
        found["time of all launches"] = format_seconds(run.wall_seconds)
    parts = [facts(found)]
    words = _words_of(run)
    if words:
        known = "goes on with the run, or does it again elsewhere"
        what = known if run.launches else "does it again"
        parts += [paragraph(f"This command {what}:"), command(shlex.join(words))]
    return tuple(parts)


def _words_of(run: RunRecord) -> list[str]:
    """The command that a run was begun with."""
    script, arguments = run.config.get("script"), run.config.get("arguments", [])
    if script is None:
        return []
    if not run.launches:
        return ["python", script, *arguments]
    words = ["meshwright", "train", "--run", str(run.folder), script]
    return [*words, "--", *arguments] if arguments else words


def _curves(run: RunRecord) -> tuple[Markup, ...]:
    return tuple(_curve(run, name) for name in run.names if run.series(name))


def _curve(run: RunRecord, name: str) -> Markup:
    """A metric in training and, where there is one, in validation."""
    lines = [charts.Series("training", run.series(name), True)]
    checked = run.series(f"val_{name}")
    if checked:
        lines.append(charts.Series("validation", checked, True))
    chart = charts.plot(f"{name} by step", lines, "step", name)
    known = dict(checked)
    rows = [
        [
            str(round(step)),
            f"{value:.6g}",
            f"{known[step]:.6g}" if step in known else "",
        ]
        for step, value in _thinned(run.series(name))
    ]
    return figure(chart, table(["step", name, f"val_{name}"], rows))


def _throughput(run: RunRecord) -> tuple[Markup, ...]:
    points = run.series("samples_per_second")
    if not points:
        return ()
    line = charts.Series("samples a second", points, True)
    chart = charts.plot("Samples a second by step", [line], "step", "samples/s")
    rows = [[str(round(step)), f"{rate:,.1f}"] for step, rate in _thinned(points)]
    return (figure(chart, table(["step", "samples/s"], rows)),)


def _time(run: RunRecord) -> tuple[Markup, ...]:
    shares = run.shares
    if not shares:
        return ()
    bars = [(_WORDS[part], 100 * share) for part, share in shares.items()]
    chart = charts.bars("What the time of steps went into", bars, " %")
    rows = [[name, f"{share:.2f} %"] for name, share in bars]
    words = (
        "Measured. Waiting counts only while the devices had nothing to do; validation "
        "and what lies between epochs is left out."
    )
    if run.occupation is not None:
        words += (
            " How the work of devices divides is from a sample of "
            f"{format_seconds(run.occupation.seconds)}."
        )
    return figure(chart, table(["part", "share"], rows)), paragraph(words)


def _occupation(run: RunRecord) -> tuple[Markup, ...]:
    sample = run.occupation
    if sample is None:
        return ()
    parts = ("computing", "communicating", "idle")
    shares = {
        _short(name): [100 * getattr(each, part) for part in parts]
        for name, each in sample.devices.items()
    }
    title = "What each device did, and how much of the time that was"
    chart = charts.stacked(title, list(shares.items()), parts, " %", rest="idle")
    rows = [[name, *(f"{s:.1f} %" for s in each)] for name, each in shares.items()]
    words = (
        f"Measured by JAX's profiler for {format_seconds(sample.seconds)}, on the "
        "devices of the first process. Communicating is what did not happen beside "
        "computing, with the time in which a device waited for others."
    )
    return figure(chart, table(["device", *parts], rows)), paragraph(words)


def _memory(run: RunRecord) -> tuple[Markup, ...]:
    """What a step takes, or at least what variables do, on each device."""
    known = {name: each["kinds"] for name, each in run.memory.items()}
    held = known or run.bytes_by_device
    if not run.variables:
        return ()
    kinds = list(
        dict.fromkeys(k for each in held.values() for k, n in each.items() if n)
    )
    limits = {name: run.memory.get(name, {}).get("limit") for name in held}
    peaks = {name: run.memory.get(name, {}).get("peak") for name in held}
    least = min((limit for limit in limits.values() if limit), default=None)
    bars = [
        (_short(device), [found.get(kind, 0) / 2**20 for kind in kinds])
        for device, found in held.items()
    ]
    title = "What a step takes on each device" if known else "What variables take"
    limit = None if least is None else least / 2**20
    chart = charts.stacked(title, bars, kinds, " MiB", limit=limit)
    rows = [
        [
            _short(device),
            *(format_bytes(found.get(kind, 0)) for kind in kinds),
            *(_bytes(value) for value in (limits[device], peaks[device])),
        ]
        for device, found in held.items()
    ]
    head = ["device", *kinds, "limit", "peak, measured"]
    parts = [figure(chart, table(head, rows))]
    if known:
        words = (
            "By the account of the compiler. Activations and gradients are among the "
            "temporaries where they share room; data that stays on the devices counts "
            "as batch."
        )
        parts.append(paragraph(words))
    estimate = _of_best(run).get("memory_bytes")
    if estimate is not None:
        words = f"Predicted for a whole step: {format_bytes(estimate)} per device."
        parts.append(paragraph(words))
    return tuple(parts)


def _bytes(number: int | None) -> str:
    return "-" if number is None else format_bytes(number)


def _placement(run: RunRecord) -> tuple[Markup, ...]:
    plan, devices = _plan_of(run), run.plan.get("devices", [])
    parts = []
    if plan is not None and len(devices) == plan.num_devices:
        chart = draw_mesh(plan, [_short(device) for device in devices])
        words = (
            f"{plan.describe()}: {len(devices)} devices, the axes with their degrees"
        )
        parts.append(figure(chart, paragraph(words)))
    if run.variables:
        rows = [
            [
                v["name"],
                v["kind"],
                _shape(v["shape"]),
                _shape(v["shard"]),
                _where(v, run),
            ]
            for v in run.variables[:_MOST_ROWS]
        ]
        shown, number = len(rows), len(run.variables)
        caption = f"{number} variables" if shown == number else f"{shown} of {number}"
        head = ["variable", "kind", "shape", "on each device", "devices"]
        parts.append(_perhaps_folded(caption, head, rows))
    return tuple(parts)


def _pipeline(run: RunRecord) -> tuple[Markup, ...]:
    plan = _plan_of(run)
    if plan is None or plan.stages == 1:
        return ()
    return (command(plan.schedule_of().timeline()),)


def _plan(run: RunRecord) -> tuple[Markup, ...]:
    best = _of_best(run)
    if not best:
        return ()
    plan = _plan_of(run)
    used = "unknown" if plan is None else plan.describe()
    parts = [facts({"plan": used, "because": best.get("because", "")})]
    others = [e for e in run.plan.get("candidates", []) if e["plan"] != best["plan"]]
    others += run.plan.get("rejected", [])
    if others:
        rows = [_considered(best), *map(_considered, others[:_MOST_ROWS])]
        head = ["plan", "step, predicted", "memory, predicted", "because"]
        caption = f"{len(others)} others were considered"
        parts.append(_perhaps_folded(caption, head, rows))
    return tuple(parts)


def _perhaps_folded(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> Markup:
    """A table; one that is long opens at a click."""
    if len(rows) <= _MOST_OPEN:
        return table(head, rows, caption)
    return folded(caption, table(head, rows))


def _considered(entry: Mapping[str, Any]) -> list[str]:
    memory, plan = entry.get("memory_bytes"), plan_from(entry["plan"])
    return [
        "unknown" if plan is None else plan.describe(),
        format_seconds(entry.get("step_seconds")),
        "-" if memory is None else format_bytes(memory),
        str(entry.get("because", "")),
    ]


def _scaling(run: RunRecord) -> tuple[Markup, ...]:
    rows = [r for r in run.plan.get("scaling", []) if r.get("scaling") == "strong"]
    if not rows:
        return ()
    points = [
        (float(r["num_devices"]), float(r["speed_up"])) for r in rows if r["speed_up"]
    ]
    ideal = [(x, x / points[0][0] * points[0][1]) for x, _ in points]
    lines = [
        charts.Series("predicted", points, True),
        charts.Series("ideal", ideal, True),
    ]
    chart = charts.plot("Speed-up by devices, predicted", lines, "devices", "speed-up")
    dear = [
        (f"{row['num_devices']} devices", float(row["epoch_dollars"]))
        for row in rows
        if row["epoch_dollars"]
    ]
    head = ["devices", "speed-up", "efficiency", "step", "$ an hour", "$ an epoch"]
    cells = [
        [
            str(row["num_devices"]),
            f"{row['speed_up']:.2f} x" if row["speed_up"] else "-",
            format_share(row["efficiency"]),
            format_seconds(row["step_seconds"]),
            format_dollars(row["dollars_per_hour"]),
            format_dollars(row["epoch_dollars"]),
        ]
        for row in rows
    ]
    if dear:
        chart += charts.bars("Dollars for an epoch, predicted", dear, " US$")
    return (figure(chart, table(head, cells, "all of it predicted")),)


def _events(run: RunRecord) -> tuple[Markup, ...]:
    told = [e for e in run.events if e.get("event") not in _QUIET_EVENTS]
    if not told:
        return ()
    began = told[0].get("time", 0.0)
    rows = [
        [
            f"{event.get('time', began) - began:.1f} s",
            str(event.get("event", "")),
            ", ".join(
                f"{k} {v}" for k, v in event.items() if k not in ("time", "event")
            ),
        ]
        for event in told[-_MOST_ROWS:]
    ]
    return (table(["after", "event", "what is known of it"], rows),)


def _environment(run: RunRecord) -> tuple[Markup, ...]:
    known = {"begun": run.config.get("began", "unknown")}
    known |= run.config.get("versions", {})
    known |= run.config.get("environment", {})
    return (facts(known),)


def plan_from(values: Mapping[str, Any]) -> Plan | None:
    """The plan that JSON values tell of; None if another version has written them."""
    known = {field.name for field in fields(Plan)}
    rules = tuple((p, tuple(spec)) for p, spec in values.get("rules", ()))
    given = {n: v for n, v in values.items() if n in known}
    given |= {"rules": rules, "cuts": tuple(values.get("cuts", ()))}
    if given.get("stages", 1) == 1:
        given |= {"microbatches": None, "schedule": None, "chunks": None, "cuts": ()}
    try:
        return Plan(**given)
    except (TypeError, ValueError):
        return None


def _of_best(run: RunRecord) -> Mapping[str, Any]:
    return run.plan.get("best") or {}


def _plan_of(run: RunRecord) -> Plan | None:
    values = _of_best(run).get("plan")
    return None if values is None else plan_from(values)


def _where(variable: Mapping[str, Any], run: RunRecord) -> str:
    devices = variable["devices"]
    if len(devices) == len(run.plan.get("devices", [])) > 1:
        return f"all {len(devices)}"
    return ", ".join(map(_short, devices))


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """No more than a table can hold; the last one always."""
    step = -(-len(points) // _MOST_ROWS) or 1
    return [*points[:-1:step], *points[-1:]]


def _shape(dims: Sequence[int]) -> str:
    return " x ".join(map(str, dims)) or "scalar"


def _short(device: str) -> str:
    return device.removeprefix("/device:")
