"""The planner's exact memory next to the programs that `fit` compiles.

`python benchmarks/planner_exact.py` measures training steps for eight virtual CPU
devices from shapes, then lets `fit` compile its own step of the same model, with
values, and compares both. `fit` is stopped before it runs. Some minutes on two cores;
with names of models it takes those alone, and writes nothing.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

import meshwright as mw
from meshwright.devices.settings import current_settings, keep_settings
from meshwright.errors import MemoryLimitError
from meshwright.models.profile import build_abstractly
from meshwright.models.training import batch_shapes
from meshwright.train import pipeline_step
from meshwright.train.exact_memory import exact_memory

import jax
import keras
import numpy as np
from harness import RESULTS, hardware
from planner_models import MODELS

CPUS = [f"CPU:{i}" for i in range(8)]
NO_LIMIT = 2**60

Make = Callable[[], Any]
"""Makes a strategy; devices exist when the script has started."""

one: Make = lambda: mw.Single("CPU:0")  # noqa: E731
data: Make = lambda: mw.Mirrored(CPUS)  # noqa: E731
fsdp: Make = lambda: mw.FSDP(devices=CPUS)  # noqa: E731
tensor: Make = lambda: mw.TensorParallel(2, devices=CPUS[:2])  # noqa: E731


def hybrid(**options: Any) -> Make:
    """Some of everything."""
    return lambda: mw.Hybrid(**options)


def single(**levers: Any) -> Make:
    """One device, with levers."""
    return lambda: mw.Single("CPU:0", **levers)


def stages(number: int, *args: Any, **options: Any) -> Make:
    """A pipeline on as many devices."""
    return lambda: mw.Pipeline(number, *args, devices=CPUS[:number], **options)


CASES: list[tuple[str, int, Sequence[Make]]] = [
    ("reference_cnn", 64, [one, data, fsdp, single(accumulate=4), stages(2, 4)]),
    ("gru_text", 32, [one, data, fsdp, tensor, single(precision="bfloat16")]),
    ("seq2seq", 32, [one, fsdp, single(accumulate=3), single(remat=True)]),
    ("unet", 8, [one, data, fsdp, single(remat=True), stages(2, 4, remat=True)]),
    ("mixer", 32, [one, data, tensor, single(precision="bfloat16"), stages(4, 8)]),
    ("autoencoder", 64, [one, fsdp, tensor, stages(2, 8, "gpipe")]),
    ("tabular", 64, [data, fsdp, single(precision="float16"), tensor]),
    (
        "decoder",
        8,
        [
            one,
            hybrid(data=2, fsdp=2, tensor=2, devices=CPUS),
            hybrid(fsdp=2, stages=2, microbatches=4, devices=CPUS[:4]),
        ],
    ),
    ("bert", 16, [one, hybrid(data=2, fsdp=2, tensor=2, devices=CPUS)]),
    ("mobilenet", 16, [data, single(accumulate=4, precision="bfloat16")]),
]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model under one plan; sizes are those of each device, in bytes."""

    model: str
    batch: int
    plan: str
    exact: int
    fit: int
    by_kind: dict[str, int]
    fit_by_kind: dict[str, int]
    exact_seconds: float
    fit_seconds: float

    @property
    def error(self) -> float:
        """How far the exact level is off, as a share."""
        return self.exact / self.fit - 1


class _Stopped(Exception):
    """What `fit` found out about a pipeline."""


@contextmanager
def _stopping_pipelines() -> Iterator[None]:
    """Lets pipelines say what their programs need instead of running them."""
    before = pipeline_step.refuse_stages_over_limit

    def stop(found: Any, *_: Any) -> None:
        raise _Stopped(max(found, key=lambda stage: stage.total))

    pipeline_step.refuse_stages_over_limit = stop
    try:
        yield
    finally:
        pipeline_step.refuse_stages_over_limit = before


def what_fit_compiles(model: Any, batch: Any, strategy: Any) -> dict[str, int]:
    """The memory of the programs that `fit` is about to run, by kind."""
    before, is_pipeline = current_settings(), strategy.plan.stages > 1
    mw.configure(memory_limit=NO_LIMIT if is_pipeline else 1)
    x, y = batch
    size = len(jax.tree.leaves(x)[0])
    try:
        with _stopping_pipelines():
            mw.distribute(model, strategy).fit(x, y, batch_size=size, verbose=0)
    except _Stopped as stopped:
        return dict(stopped.args[0].by_kind())
    except MemoryLimitError as refused:
        return dict(refused.by_kind)
    finally:
        keep_settings(before)
    raise AssertionError("fit ran")


def compare(name: str, size: int, make_strategy: Make) -> Row:
    """Measures a model without values, and lets `fit` compile one with them."""
    strategy = make_strategy()
    abstract = build_abstractly(MODELS[name])
    began = time.perf_counter()
    found = exact_memory(abstract, strategy.plan, strategy.mesh, size)
    between = time.perf_counter()
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    shapes = batch_shapes(model, num_samples=size)
    batch = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    kinds = what_fit_compiles(model, batch, strategy)
    return Row(
        model=name,
        batch=size,
        plan=strategy.plan.describe(),
        exact=found.bytes_per_device,
        fit=sum(kinds.values()),
        by_kind=dict(found.by_kind),
        fit_by_kind=kinds,
        exact_seconds=between - began,
        fit_seconds=time.perf_counter() - between,
    )


def summary(rows: Sequence[Row]) -> str:
    """The errors of all rows, in words."""
    errors = sorted(abs(row.error) for row in rows)
    within = sum(error <= 0.03 for error in errors)
    return (
        f"{within} of {len(rows)} within 3 %; error: median "
        f"{100 * statistics.median(errors):.2f} %, largest {100 * errors[-1]:.2f} %"
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | batch | plan | fit's program | exact level | error | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sizes = [f"{size / 2**20:.2f} MiB" for size in (row.fit, row.exact)]
        error, seconds = f"{100 * row.error:+.2f} %", f"{row.exact_seconds:.1f}"
        cells = [row.model, str(row.batch), row.plan, *sizes, error, seconds]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(rows: Sequence[Row]) -> None:
    """Writes `results/<date>-planner-exact.json` and `.md`."""
    stem = RESULTS / f"{date.today()}-planner-exact"
    machine = hardware()
    record = {
        "suite": "planner-exact",
        "hardware": machine,
        "jax": jax.__version__,
        "cases": [{**asdict(row), "error": row.error} for row in rows],
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    page = [
        f"# planner-exact, {date.today()}",
        f"{machine['cpu']}, {machine['cores']} cores; eight virtual devices; jax "
        f"{jax.__version__}, keras {keras.__version__}. Memory of each device; of "
        "pipelines, of the stage that needs most. `fit` was given the model with its "
        "values, the exact level shapes alone; seconds are those of the exact level. "
        "`python benchmarks/planner_exact.py`",
        table(rows),
        summary(rows) + ".",
    ]
    stem.with_suffix(".md").write_text("\n\n".join(page) + "\n")
    print(f"written to {stem.with_suffix('.md')}")


def main() -> None:
    """Compares all cases, or those of some models."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [name for name, *_ in CASES]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(names))
    wanted = parser.parse_args().models
    mw.configure(virtual=8)
    rows = []
    for name, size, strategies in CASES:
        for make_strategy in strategies if not wanted or name in wanted else ():
            rows.append(compare(name, size, make_strategy))
            row = rows[-1]
            print(
                f"{name}, {size}: {row.plan}: {100 * row.error:+.2f} %, "
                f"{row.exact_seconds:.1f} s, fit {row.fit_seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    print(f"{table(rows)}\n\n{summary(rows)}")
    if not wanted:
        write(rows)


if __name__ == "__main__":
    main()
