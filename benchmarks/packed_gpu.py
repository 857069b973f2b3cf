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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw  # before keras: it selects Keras' JAX backend

import jax
from floors import make_floor
from jobs import JOBS, Job, describe_data, keras_model, load
from packed_members import make_training

BAR = 50.0
"""Times the throughput of one-by-one compiled runs, with 256 members."""

Run = Callable[[], Any]


def floor(job: Job, x: Any, y: Any) -> Run:
    """The hand-written loop of steps, for one model."""
    state, epoch, _ = make_floor(job, "float32")
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
        "floor, one by one": (1, floor(job, x, y)),
        "fit, one by one": (1, own_fit(job, x, y)),
    }
    making: dict[str, float] = {}
    for members in [1, *map(int, options.members.split(","))]:
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
    print(f"{jax.devices()[0].device_kind}; {describe_data(options.data, job)}\n")
    alone = ("floor, one by one", "fit, one by one", "1 packed")
    print("| | us a step of one | " + " | ".join(f"times {name}" for name in alone))
    print("|---" * (2 + len(alone)) + "|")
    for name in runs:
        ratios = [f"{step[other] / step[name]:.1f}" for other in alone]
        print(f"| {name} | {step[name]:.3f} | {' | '.join(ratios)} |")
    record = {
        "device": jax.devices()[0].device_kind,
        "bar": BAR,
        "microseconds": step,
        "seconds": seconds,
        "first_seconds": first,
        "making_seconds": making,
    }
    print("\n" + json.dumps(record))


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
