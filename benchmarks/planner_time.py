"""The planner's step times next to those of `fit`, on models it was not made with.

`python benchmarks/planner_time.py` calibrates, lets `fit` train models of
`planner_models.py` with many plans on eight virtual CPU devices, predicts the same, and
writes both to `benchmarks/results/`; most of an hour on two cores. On a machine with
a GPU it takes one GPU and larger batches. `--collect FILE` measures only, `--collected
FILE` predicts for what was measured before, on this machine or on another `--machine`.

On a noisy machine a known product is timed before and after every case, and how it
compares with the time of calibration corrects what was measured.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.models.training import batch_shapes
from meshwright.parallel.plan import Plan
from meshwright.planner.machines import Machine, parse_machine
from meshwright.planner.money import CLOSE, num_special
from meshwright.planner.speeds import KnownSpeed, known_speed
from meshwright.planner.workload import Workload
from meshwright.strategies.planning import calibrate_here, search, strategy_of

import jax
import jax.numpy as jnp
import numpy as np
from harness import RESULTS, hardware
from planner_models import MODELS

NUM_DEVICES = 8
REPEATS = 4
NUM_STEPS = {"CPU": 8, "GPU": 24}
"""Of an epoch; steps on CPUs take long."""

LEAST_SECONDS = 0.4
MOST_EPOCHS = 1024
WORDS = 2000
"""All models that take words know as many."""

GOOD_CHOICE = 1.10
"""A choice is good if it takes at most so many times what the best plan takes."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch and a plan."""

    model: str
    batch: int
    plan: Plan

    @property
    def name(self) -> str:
        """What the case is called in results."""
        return f"{self.model}, {self.batch}: {self.plan.describe()}"


PLANS = (Plan(), Plan(data=2), Plan(data=4), Plan(fsdp=4), Plan(tensor=2))


def cpu_cases() -> list[Case]:
    """Every model on one device and on several; pipelines where they make sense."""
    found: list[Case] = []

    def add(model: str, batch: int, *plans: Plan) -> None:
        found.extend(Case(model, batch, plan) for plan in plans)

    stages = Plan(stages=2, microbatches=4)
    add("reference_cnn", 64, *PLANS[:4], Plan(accumulate=2))
    add("gru_text", 64, *PLANS[:4])
    add("bert", 16, *PLANS, stages)
    add("decoder", 8, *PLANS)
    add("unet", 8, *PLANS[:4])
    add("resnet50", 16, Plan(), Plan(data=2))
    add("autoencoder", 256, *PLANS, stages)
    add("mixer", 32, *PLANS, Plan(remat=True))
    add("seq2seq", 32, *PLANS[:4])
    add("tabular", 256, *PLANS, stages)
    return found


def gpu_cases() -> list[Case]:
    """One GPU, in both precisions."""
    found = []
    for model, batch in (
        ("reference_cnn", 2048),
        ("bert", 256),
        ("decoder", 128),
        ("unet", 128),
        ("resnet50", 512),
        ("autoencoder", 16384),
        ("mixer", 1024),
        ("tabular", 16384),
    ):
        for precision in ("float32", "bfloat16"):
            found.append(Case(model, batch, Plan(precision=precision)))
    found.append(Case("mixer", 1024, Plan(remat=True, precision="float32")))
    found.append(Case("decoder", 128, Plan(accumulate=2, precision="float32")))
    return found


class Reference:
    """A product whose time tells how fast the machine is at the moment."""

    def __init__(self) -> None:
        size = 768 if jax.default_backend() == "cpu" else 8192
        self._array = jnp.full((size, size), 0.01)
        self._run = jax.jit(lambda x: x @ x)
        self._run(self._array).block_until_ready()

    def seconds(self) -> float:
        """Of one product, the best of a few."""
        found = []
        for _ in range(12):
            start = time.perf_counter()
            self._run(self._array).block_until_ready()
            found.append(time.perf_counter() - start)
        return min(found)


def measure(case: Case, machine: Machine) -> float:
    """Seconds of a step of `fit`: what more epochs take beyond fewer of them.

    What comes once in a run, such as to bring the data to the devices, does not count.
    """
    model = MODELS[case.model]()
    strategy = strategy_of(case.plan, machine)
    inputs, targets = batch_shapes(model, None, case.batch)
    classes = model.outputs[0].shape[-1]
    mw.distribute(model, strategy)
    steps = NUM_STEPS[machine.kind]
    x = jax.tree.map(lambda each: _some(each, WORDS, steps), inputs)
    y = jax.tree.map(lambda each: _some(each, classes, steps), targets)

    def run(epochs: int) -> float:
        start = time.perf_counter()
        model.fit(x, y, batch_size=case.batch, epochs=epochs, verbose=0)
        return time.perf_counter() - start

    run(1)
    few, many = 1, 2
    while run(many) - run(few) < LEAST_SECONDS and many < MOST_EPOCHS:
        many *= 2
    spans = [(run(few), run(many)) for _ in range(REPEATS)]
    longer = min(each for _, each in spans) - min(each for each, _ in spans)
    return longer / (many - few) / steps


def _some(shape: Any, most: int, steps: int) -> Any:
    random = np.random.default_rng(0)
    whole = (shape.shape[0] * steps, *shape.shape[1:])
    if np.issubdtype(shape.dtype, np.integer):
        return random.integers(0, most, whole).astype(shape.dtype)
    return random.standard_normal(whole, dtype=np.float32).astype(shape.dtype)


def collect(cases: Sequence[Case], machine: Machine, file: Path) -> dict[str, Any]:
    """Measures the cases that a file does not have yet, and adds them to it."""
    known = json.loads(file.read_text()) if file.exists() else {}
    reference = Reference()
    known.setdefault("reference", reference.seconds())
    for case in cases:
        if case.name in known:
            continue
        before = reference.seconds()
        seconds = measure(case, machine)
        drift = (before + reference.seconds()) / 2 / known["reference"]
        known[case.name] = {"seconds": seconds, "drift": drift}
        file.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{case.name}: {1e3 * seconds:.2f} ms, drift {drift:.2f}", flush=True)
    return dict(known)


def predict(
    cases: Sequence[Case], machine: Machine, known: KnownSpeed
) -> dict[str, float]:
    """Predicted seconds of a step of each case."""
    works: dict[str, Workload] = {}
    found = {}
    for case in cases:
        if case.model not in works:
            works[case.model] = Workload.of(MODELS[case.model](), machine.kind)
        part = machine.part(case.plan.num_devices)
        judge = search(works[case.model], part, known, case.batch).times
        found[case.name] = judge.predict(case.plan, case.batch).seconds
    return found


def rows_of(
    cases: Sequence[Case], measured: dict[str, Any], predicted: dict[str, float]
) -> list[dict[str, Any]]:
    """What was measured and predicted, case by case."""
    rows = []
    for case in cases:
        if case.name not in measured:
            continue
        record = measured[case.name]
        seconds = record["seconds"] / record["drift"]
        error = predicted[case.name] / seconds - 1
        rows.append(
            {
                "model": case.model,
                "batch": case.batch,
                "plan": case.plan.describe(),
                "measured": seconds,
                "predicted": predicted[case.name],
                "error": error,
            }
        )
    return rows


def choices_of(
    rows: Sequence[dict[str, Any]], cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """For each model and batch: the plan that the planner chooses, and the best."""
    plans = {case.plan.describe(): case.plan for case in cases}

    def plainness(row: dict[str, Any]) -> tuple[int, int]:
        plan = plans[row["plan"]]
        return num_special(plan), plan.num_devices

    found = []
    for key in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        group = [row for row in rows if (row["model"], row["batch"]) == key]
        if len(group) < 3:
            continue
        most = CLOSE * min(row["predicted"] for row in group)
        close = [row for row in group if row["predicted"] <= most]
        chosen = min(close, key=plainness)
        best = min(group, key=lambda row: row["measured"])
        found.append(
            {
                "model": key[0],
                "batch": key[1],
                "plans": len(group),
                "chosen": chosen["plan"],
                "best": best["plan"],
                "ratio": chosen["measured"] / best["measured"],
            }
        )
    return found


def write(
    rows: list[dict[str, Any]], cases: Sequence[Case], suite: str, source: str
) -> None:
    """Writes the results as JSON and Markdown, and prints the latter."""
    errors = sorted(abs(row["error"]) for row in rows)
    choices = choices_of(rows, cases)
    good = sum(each["ratio"] <= GOOD_CHOICE for each in choices)
    summary = {
        "cases": len(rows),
        "median": statistics.median(errors),
        "p90": errors[int(0.9 * (len(errors) - 1) + 0.5)],
        "worst": errors[-1],
        "good_choices": good,
        "choices": len(choices),
    }
    lines = [
        f"# {suite}, {date.today()}",
        "",
        f"{source}. Seconds of a step of `fit`, corrected for the speed "
        "of the machine at the moment. The models are those of "
        "`benchmarks/planner_models.py`, none of which was used for the rules or the "
        "calibration. `python benchmarks/planner_time.py`",
        "",
        "| model | batch | plan | measured | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['batch']} | {row['plan']} | "
        f"{1e3 * row['measured']:.2f} ms | {1e3 * row['predicted']:.2f} ms | "
        f"{row['error']:+.0%} |"
        for row in rows
    ]
    lines += [
        "",
        f"{len(rows)} cases; error: median {summary['median']:.1%}, 90th percentile "
        f"{summary['p90']:.1%}, largest {summary['worst']:.1%}.",
    ]
    if choices:
        lines += [
            "",
            "| model | batch | plans | chosen | best | chosen / best |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {c['model']} | {c['batch']} | {c['plans']} | {c['chosen']} | "
            f"{c['best']} | {c['ratio']:.2f} |"
            for c in choices
        ]
        lines += ["", f"{good} of {len(choices)} choices within 10 % of the best."]
    stem = RESULTS / f"{date.today()}-{suite}"
    record = {"suite": suite, "source": source, "summary": summary, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    """Calibrates, measures, predicts, compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", type=Path, help="measure only, into this file")
    parser.add_argument("--collected", type=Path, help="measured before")
    parser.add_argument("--only", default="", help="cases whose name matches this")
    parser.add_argument("--machine", help="where that was, if not here: 1xH200")
    options = parser.parse_args()
    on_cpu = not any(device.kind == "GPU" for device in mw.devices())
    if on_cpu and options.machine is None:
        mw.configure(virtual=NUM_DEVICES)
    machine = parse_machine(options.machine)
    cases = [
        case
        for case in (cpu_cases() if machine.kind == "CPU" else gpu_cases())
        if re.search(options.only, case.name)
    ]
    if options.collect is None and options.collected is None:
        calibrate_here(machine)
    if options.collected is None:
        file = options.collect or RESULTS / "planner-time-measured"
        measured = collect(cases, machine, file)
    else:
        measured = json.loads(options.collected.read_text())
        cases = [case for case in cases if case.name in measured]
    if options.collect is not None:
        return
    known = known_speed(machine)
    suite = "planner-time" if machine.kind == "CPU" else "h200-planner-time"
    rows = rows_of(cases, measured, predict(cases, machine, known))
    place = hardware() if options.machine is None else machine.title
    write(rows, cases, suite, f"{place}; {known.source}")


if __name__ == "__main__":
    sys.exit(main())
