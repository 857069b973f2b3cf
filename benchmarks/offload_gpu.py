"""What offloading saves and costs on a GPU: `python benchmarks/offload_gpu.py`.

Needs one GPU; about two minutes. Each model is trained plain and with `offload=True`,
each in a process of its own, so that the allocator's peak is that of one training
alone. What the compiler says that the step needs stands beside it, and the losses
beside each other.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
CASES = [("large", 256), ("large", 16384), ("decoder", 16)]
"""Models of `planner_oom`, and batches."""
STEPS = 40
WARM_UP = 5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    model: str
    batch: int
    offload: bool
    step_ms: float
    peak_bytes: int | None
    compiled_bytes: int
    optimizer_bytes: int
    loss: float


def train(name: str, batch: int, offload: bool, scale: int) -> Run:
    """Trains for some steps, and reads what the device had in use."""
    import meshwright as mw
    from meshwright.train.exact_memory import exact_memory

    import jax
    import keras
    import numpy as np
    from planner_oom import make_model

    keras.utils.set_random_seed(1)
    strategy = mw.Single(offload=offload)
    model = mw.distribute(make_model(name, scale), strategy)
    needs = exact_memory(model, strategy.plan, strategy.mesh, batch)
    chance = np.random.default_rng(0)
    x, y = _data(model, batch, chance)
    losses = [float(model.train_on_batch(x, y)) for _ in range(WARM_UP)]
    started = time.perf_counter()
    # The losses stay on the device, so that steps follow each other as in `fit`.
    model.fit(x, y, batch_size=batch, epochs=STEPS, verbose=0, shuffle=False)
    seconds = (time.perf_counter() - started) / STEPS
    stats = jax.devices()[0].memory_stats() or {}
    slots = sum(v.value.nbytes for v in model.optimizer.variables)
    return Run(
        model=name,
        batch=batch,
        offload=offload,
        step_ms=1000 * seconds,
        peak_bytes=stats.get("peak_bytes_in_use"),
        compiled_bytes=needs.bytes_per_device,
        optimizer_bytes=slots,
        loss=losses[-1],
    )


def _data(model: Any, batch: int, chance: Any) -> tuple[Any, Any]:
    shape = (batch, *model.input_shape[1:])
    target = (batch, *model.output_shape[1:])
    if model.name == "decoder":
        words = model.output_shape[-1]
        return chance.integers(0, words, shape), chance.integers(0, words, target[:-1])
    return chance.normal(size=shape), chance.normal(size=target)


def main() -> None:
    """All cases, each in a process; a table, and a file if there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "BATCH", "OFFLOAD"))
    parser.add_argument("--scale", type=int, default=1, help="divides the widths")
    asked = parser.parse_args()
    if asked.case:
        name, batch, offload = asked.case
        run = train(name, int(batch), offload == "True", asked.scale)
        print(json.dumps(asdict(run)))
        return
    runs = [
        _in_process(name, batch, offload, asked.scale)
        for name, batch in CASES
        for offload in (False, True)
    ]
    print(table(runs))
    if asked.scale == 1:
        _publish(runs)


def _in_process(name: str, batch: int, offload: bool, scale: int) -> Run:
    case = [name, str(batch), str(offload)]
    command = [sys.executable, str(HERE), "--scale", str(scale), "--case", *case]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def table(runs: list[Run]) -> str:
    """The runs as Markdown."""
    lines = [
        "| model, batch | offload | step | compiled step | peak | optimizer | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        peak = "unknown" if run.peak_bytes is None else _gib(run.peak_bytes)
        lines.append(
            f"| {run.model}, {run.batch} | {'yes' if run.offload else 'no'} | "
            f"{run.step_ms:.1f} ms | {_gib(run.compiled_bytes)} | {peak} | "
            f"{_gib(run.optimizer_bytes)} | {run.loss:.6f} |"
        )
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _publish(runs: list[Run]) -> None:
    import jax

    device = jax.devices()[0]
    name = HERE.parent / "results" / f"{date.today().isoformat()}-h200-offload"
    content = {"device": device.device_kind, "runs": [asdict(run) for run in runs]}
    name.with_suffix(".json").write_text(json.dumps(content, indent=2) + "\n")
    title = f"# Offloading the optimizer's state, {device.device_kind}\n\n"
    name.with_suffix(".md").write_text(title + table(runs) + "\n")


if __name__ == "__main__":
    main()
