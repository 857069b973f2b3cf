"""The planner's arithmetic of memory next to the compiler's own account.

`python benchmarks/planner_memory.py` compiles training steps for eight virtual CPU
devices, predicts what they need, and writes both to `benchmarks/results/`. Nothing is
run. `--gpu` compiles for eight GPUs, of which one has to be there; `--collect FILE`
compiles only, and `--collected FILE` compares with what another machine has compiled,
also if that is a published table. `--again FILE` says how far two compilers, or two
runs of one, are apart. `--trials FILE` predicts the steps that `planner_oom.py` has
compiled for one GPU, of some GiB each.
"""

import argparse
import gzip
import json
import os
import platform as platform_module
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.models.formulations import Platform
from meshwright.models.profile import build_abstractly
from meshwright.models.training import TrainingStep, trace_training
from meshwright.parallel.plan import Plan
from meshwright.planner.memory import MemoryEstimate, MemoryModel

import jax
from harness import RESULTS

NUM_DEVICES = 8


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


ONE = Plan()
DATA = Plan(data=8)
FSDP = Plan(fsdp=8)
TENSOR = Plan(tensor=4)
ALL = Plan(data=2, fsdp=2, tensor=2)


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(model: str, batch: int, *plans: Plan) -> None:
        found.extend(Case(model, batch, plan) for plan in plans)

    add("reference_cnn", 256, ONE, DATA, Plan(fsdp=4, data=2), Plan(accumulate=4))
    add("reference_cnn", 1000, Plan(data=3), Plan(remat=True))
    add("gru_text", 64, ONE, DATA, Plan(fsdp=8, accumulate=2), Plan(remat=True))
    add("bert", 32, ONE, DATA, FSDP, ALL, Plan(tensor=2, precision="bfloat16"))
    add("bert", 64, Plan(remat=True), Plan(stages=4, microbatches=8))
    add("decoder", 16, ONE, FSDP, TENSOR, Plan(precision="bfloat16"))
    add("decoder", 32, Plan(data=2, stages=2, microbatches=4, schedule="gpipe"))
    add("decoder", 32, Plan(fsdp=4, tensor=2, remat=True), Plan(data=4, accumulate=4))
    add("decoder", 32, Plan(stages=4, microbatches=8, schedule="zero_bubble"))
    add("unet", 32, ONE, DATA, Plan(data=2, fsdp=4, remat=True), Plan(accumulate=8))
    add("unet", 24, Plan(data=8, precision="bfloat16"))
    add("resnet50", 32, ONE, DATA, FSDP, Plan(remat=True))
    add("mobilenet", 128, ONE, DATA, Plan(fsdp=2, precision="bfloat16"))
    add("autoencoder", 512, ONE, FSDP, TENSOR, Plan(data=2, tensor=2, accumulate=2))
    add("mixer", 64, ONE, Plan(data=4, fsdp=2), Plan(tensor=2), Plan(remat=True))
    add("mixer", 64, Plan(stages=2, microbatches=4, schedule="interleaved"))
    add("seq2seq", 64, ONE, DATA, Plan(fsdp=4), Plan(accumulate=4))
    add("tabular", 1024, ONE, DATA, ALL, Plan(tensor=8), Plan(stages=2))
    return found


CASES = _cases()


def collect(cases: Sequence[Case], file: Path, jobs: int, programs: Path | None) -> Any:
    """Compiles the cases that a file does not have yet, and adds them to it."""
    from planner_compiled import lower_step, on_host
    from planner_models import MODELS

    known = json.loads(file.read_text()) if file.exists() else {}

    def keep(name: str, record: dict[str, Any]) -> None:
        text = record.pop("program", None)
        if programs is not None and text is not None:
            programs.mkdir(exist_ok=True, parents=True)
            place = programs / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.txt.gz"
            place.write_bytes(gzip.compress(text.encode()))
        known[name] = {"backend": jax.default_backend(), **record}
        file.write_text(json.dumps(known, indent=1) + "\n")

    def compile_one(case: Case, run: Any) -> None:
        start = time.perf_counter()
        try:
            record = run()
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        record["seconds"] = round(time.perf_counter() - start, 2)
        keep(case.name, record)
        told = {k: v for k, v in record.items() if k in ("total", "error", "seconds")}
        print(f"{case.name}: {told}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for case in cases:
            if "total" in known.get(case.name, {}):
                continue
            try:
                with on_host():
                    model = MODELS[case.model]()
                run = lower_step(model, case.plan, case.batch)
            except Exception as error:
                keep(
                    case.name, {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                )
                print(f"{case.name}: {known[case.name]}", file=sys.stderr, flush=True)
                continue
            pool.submit(compile_one, case, run)
    return known


def predict(cases: Sequence[Case], platform: Platform) -> dict[str, MemoryEstimate]:
    """What the planner says that the cases need."""
    from planner_compiled import on_host
    from planner_models import MODELS

    found, models = {}, {}
    for case in cases:
        if case.model not in models:
            with on_host():
                models[case.model] = _memory_model(MODELS[case.model](), platform)
        found[case.name] = models[case.model].estimate(case.plan, case.batch)
    return found


def _memory_model(model: Any, platform: Platform) -> MemoryModel:
    def trace(precision: str | None, remat: bool) -> TrainingStep:
        return trace_training(model, precision=precision, remat=remat)

    return MemoryModel(model, trace, platform)


def report(
    cases: Sequence[Case],
    collected: Mapping[str, Any],
    predicted: Mapping[str, MemoryEstimate],
) -> str:
    """A table of all cases, and how far off the predictions are."""
    rows, errors = [], []
    for case in cases:
        record, guess = collected.get(case.name, {}), predicted[case.name]
        if "total" not in record:
            rows.append(f"| {case.name} | - | {_mib(guess.total)} | - |")
            continue
        error = guess.total / record["total"] - 1
        errors.append(abs(error))
        cells = [case.name, _mib(record["total"]), _mib(guess.total), f"{error:+.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    errors.sort()
    summary = (
        f"{len(errors)} cases: median error {statistics.median(errors):.1%}, "
        f"90th percentile {errors[int(0.9 * (len(errors) - 1))]:.1%}, "
        f"worst {errors[-1]:.1%}; within 10 %: "
        f"{sum(e <= 0.1 for e in errors)} of {len(errors)}."
    )
    head = ["| case | compiler | predicted | error |", "|---|---|---|---|"]
    return "\n".join([summary, "", *head, *rows]) + "\n"


def read_collected(file: Path) -> dict[str, Any]:
    """What was compiled, from a file of `--collect` or a published one."""
    records = json.loads(file.read_text())
    return {name: each.get("compiled", each) or {} for name, each in records.items()}


def report_again(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """A table of steps that were compiled twice."""
    rows, far = [], 0
    for name, record in first.items():
        one, other = record.get("total"), second.get(name, {}).get("total")
        if one and other:
            far += max(one, other) / min(one, other) > 1.1
            apart = f"{other / one - 1:+.1%}"
            rows.append(f"| {name} | {_mib(one)} | {_mib(other)} | {apart} |")
    summary = f"{len(rows)} steps were compiled twice; {far} differ by more than 10 %."
    head = ["| case | first | second | |", "|---|---|---|---|"]
    return "\n".join([summary, "", *head, *rows]) + "\n"


def report_trials(files: Sequence[Path]) -> str:
    """A table of the steps of `planner_oom.py`, and what arithmetic says of them."""
    from planner_compiled import on_host
    from planner_oom import make_model

    compiled: dict[tuple[str, str, int], int] = {}
    for file in files:
        for trial in json.loads(file.read_text())["trials"]:
            levers = json.dumps(trial["levers"], sort_keys=True)
            known = trial["model"], levers, trial["batch"]
            compiled.setdefault(known, trial["step_bytes"])
    models: dict[str, MemoryModel] = {}
    rows = []
    for (name, levers, batch), total in sorted(compiled.items()):
        if name not in models:
            with on_host():
                model = build_abstractly(partial(make_model, name, 1))
            models[name] = _memory_model(model, "gpu")
        plan = Plan(**json.loads(levers))
        guess = models[name].estimate(plan, batch).total
        what = f"{name}, {batch}: {plan.describe()}"
        error = f"{guess / total - 1:+.1%}"
        rows.append(f"| {what} | {_gib(total)} | {_gib(guess)} | {error} |")
    head = ["| step | compiler | predicted | error |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"


def _mib(number: int) -> str:
    return f"{number / 2**20:.1f} MiB"


def start_devices(*, on_gpu: bool) -> None:
    """Eight devices to compile for."""
    if not on_gpu:
        mw.configure(virtual=NUM_DEVICES)
        return
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_shard_autotuning=false".strip()
    jax.config.update("jax_mock_gpu_topology", f"1x{NUM_DEVICES}x1")


def _write(
    suite: str,
    text: str,
    collected: Mapping[str, Any],
    predicted: Mapping[str, MemoryEstimate],
) -> None:
    stem = RESULTS / f"{date.today()}-{suite}"
    record = {
        name: {
            "compiled": collected.get(name),
            "predicted": {"total": guess.total, **guess.by_kind()},
        }
        for name, guess in predicted.items()
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    what = f"jax {jax.__version__}, Python {platform_module.python_version()}"
    head = f"# {suite}, {date.today()}\n\nBytes on each device; {what}.\n\n"
    stem.with_suffix(".md").write_text(head + text)
    print(f"written to {stem.with_suffix('.md')}")


def main() -> None:
    """Compiles, predicts, compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="compile for GPUs")
    parser.add_argument("--collect", type=Path, help="compile only, into this file")
    parser.add_argument("--collected", type=Path, help="compare with this file")
    parser.add_argument("--again", type=Path, help="the same, compiled once more")
    parser.add_argument("--trials", type=Path, nargs="+", help="results of planner_oom")
    parser.add_argument("--only", default="", help="cases whose name matches this")
    parser.add_argument("--jobs", type=int, default=1, help="compile so many at once")
    parser.add_argument("--programs", type=Path, help="folder for compiled programs")
    options = parser.parse_args()
    if options.again:
        files = options.collected, options.again
        print(report_again(*map(read_collected, files)))
        return
    if options.trials:
        print(report_trials(options.trials))
        return
    start_devices(on_gpu=options.gpu)
    chosen = [case for case in CASES if re.search(options.only, case.name)]
    if options.collect:
        collect(chosen, options.collect, options.jobs, options.programs)
        return
    if options.collected:
        collected = read_collected(options.collected)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "collected.json")
            collected = collect(chosen, file, options.jobs, options.programs)
    kinds = {record.get("backend") for record in collected.values()}
    platform: Platform = "gpu" if "gpu" in kinds else "cpu"
    predicted = predict(chosen, platform)
    text = report(chosen, collected, predicted)
    print(text)
    if not options.only:
        _write(f"planner-memory-{platform}", text, collected, predicted)


if __name__ == "__main__":
    main()
