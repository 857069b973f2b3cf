"""Packed trials of the tiny MLP on one GPU: `packed_gpu.py [mnist.npz]`, 4 minutes.

Needs JAX with CUDA, Keras, and Meshwright on the path. Everything runs in this process,
in turns, so that figures are of the same weather; compiling and making models are told
apart. Figures are microseconds of a step of one member. `--small` goes through the same
on a CPU in a minute.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import meshwright as mw  # before keras: it selects Keras' JAX backend

import jax
import jax.numpy as jnp
from floors import make_floor
from jobs import JOBS, Job, describe_data, keras_model, load
from packed_members import make_training, prepare

BAR = 50.0
"""Times the throughput of scanned epochs of one model at a time, with 256 members."""

RESULTS = Path(__file__).parent / "results"

Run = Callable[[], Any]


def by_hand(
    job: Job, x: Any, y: Any, members: int = 1, unroll: int | None = None
) -> Run:
    """A loop of steps without Keras; for several members, `vmap` of it."""
    state, epoch, _ = make_floor(job, "float32", unroll)
    if members > 1:
        state = jax.tree.map(lambda value: jnp.stack([value] * members), state)
        every = jax.vmap(epoch, in_axes=(0, None, None, None))
        epoch = jax.jit(every, donate_argnums=0)
    key = jax.random.key(0)

    def run() -> None:
        nonlocal state, key
        data = [jax.device_put(array) for array in (x, y)]
        for _ in range(job.epochs):
            key, now = jax.random.split(key)
            state, means = epoch(state, *data, now)
            means.tolist()

    return run


def own_fit(job: Job, x: Any, y: Any) -> Run:
    """Keras' `fit` under Meshwright's strategy, for one model."""
    with mw.Single().scope():
        model = keras_model(job)
    return lambda: model.fit(
        x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0
    )


def packed(job: Job, x: Any, y: Any, members: int, shares: bool) -> tuple[Run, float]:
    """Members at once, and the seconds that it took to make them."""
    began = time.perf_counter()
    training = make_training(x, y, members, shares=shares)
    return lambda: training.run(job.epochs), time.perf_counter() - began


@jax.default_matmul_precision("highest")
def largest_difference(job: Job, x: Any, y: Any) -> float:
    """How far losses of packed members are from those of their own `fit`, as a share.

    Without TensorFloat-32, whose rounding alone moves losses by a hundredth.
    """
    apart = []
    for shares in (False, True):
        number = 16
        training = make_training(x, y, number, shares=shares)
        training.run(2)
        for member in (0, number - 1):
            with mw.Single().scope():
                model = keras_model(job)
            prepare(model, member, number, shares=shares)
            fit = model.fit(x, y, batch_size=job.batch_size, epochs=2, verbose=0)
            pairs = zip(
                training.histories[member]["loss"], fit.history["loss"], strict=True
            )
            apart += [abs(packed - alone) / alone for packed, alone in pairs]
    return max(apart)


def main() -> None:
    """Measures, prints a table, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, help="an mnist.npz")
    parser.add_argument("--members", default="256,1024")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.members, options.repeats = "4,8", 3
    samples = 3200 if options.small else 60_000
    base = JOBS["mlp"]
    job = Job(
        name=base.name,
        samples=samples,
        batch_size=base.batch_size,
        parameters=base.parameters,
        epochs=options.epochs,
    )
    x, y = load(job, options.data)
    runs: dict[str, tuple[int, Run]] = {
        "a scanned epoch": (1, by_hand(job, x, y, unroll=1)),
        "the same, unrolled": (1, by_hand(job, x, y)),
        "fit": (1, own_fit(job, x, y)),
    }
    making: dict[str, float] = {}
    for members in [1, *map(int, options.members.split(","))]:
        if members > 1:
            plain = by_hand(job, x, y, members, unroll=1)
            runs[f"{members} by vmap, one order"] = members, plain
        for shares in (False, True) if members > 1 else (False,):
            order = "one order" if shares else "own orders"
            name = f"{members} packed" + (f", {order}" if members > 1 else "")
            run, making[name] = packed(job, x, y, members, shares)
            runs[name] = members, run
    first = {name: _seconds(run) for name, (_, run) in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, (_, run) in runs.items():
            seconds[name].append(_seconds(run))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    step = {
        name: medians[name] / job.steps / members * 1e6
        for name, (members, _) in runs.items()
    }
    record = {
        "device": jax.devices()[0].device_kind,
        "data": describe_data(options.data, job),
        "bar": BAR,
        "apart": largest_difference(job, x, y),
        "microseconds": step,
        "seconds": seconds,
        "first_seconds": first,
        "making_seconds": making,
    }
    text = report(record)
    print(text)
    if not options.small:
        name = RESULTS / f"{date.today().isoformat()}-h200-packed"
        name.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
        name.with_suffix(".md").write_text(text)


def report(record: Mapping[str, Any]) -> str:
    """The figures as Markdown."""
    step: Mapping[str, float] = record["microseconds"]
    alone = ("a scanned epoch", "the same, unrolled", "fit")
    lines = [
        f"# Packed trials of the tiny MLP, {record['device']}, {record['data']}\n",
        "Microseconds of a step of one member; compiling and making models apart.\n",
        "| | us a step of one | " + " | ".join(f"times {n}" for n in alone) + " |",
        "|---" * (2 + len(alone)) + "|",
    ]
    for name, time_of_one in step.items():
        ratios = " | ".join(f"{step[other] / time_of_one:.1f}" for other in alone)
        lines.append(f"| {name} | {time_of_one:.3f} | {ratios} |")
    told = "Losses of packed members and of their own fit, with products in float32"
    return "\n".join([*lines, f"\n{told}: {record['apart']:.1e} apart.\n"])


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
