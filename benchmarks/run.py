"""What the device layer costs: `make bench`.

Two programs are timed in turns, each in a process of its own, so that both see the same
noise. A difference smaller than the spread between two halves of the same program's
runs is not called one. Results go to `benchmarks/results/` as JSON and Markdown.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

REPEATS = 9
RESULTS = Path(__file__).parent / "results"

IMPORT = (
    "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
)

FIT = """
{start}
import time
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(6400, 784)).astype("float32")
y = np.zeros(6400, "int32")
with {scope}:
    layers = [keras.Input((784,)), keras.layers.Dense(32), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=32, verbose=0)
began = time.perf_counter()
model.fit(x, y, batch_size=32, epochs=3, verbose=0)
print((time.perf_counter() - began) / 600)
"""

CALL = """
{start}
import time
import keras, numpy as np
x = np.ones((8, 16), "float32")
with {scope}:
    layers = [keras.layers.Dense(16) for _ in range(10)]
def call():
    h = x
    for layer in layers:
        h = layer(h)
    h.block_until_ready()
for _ in range(20):
    call()
began = time.perf_counter()
for _ in range(100):
    call()
print((time.perf_counter() - began) / 1000)
"""

STOCK = {"start": "import contextlib", "scope": "contextlib.nullcontext()"}
PLACED = {"start": "import meshwright as mw", "scope": "mw.device('CPU:0')"}
LIMITED = {
    "start": "import meshwright as mw, contextlib; mw.configure(memory_limit='4GiB')",
    "scope": "contextlib.nullcontext()",
}

CASES = {
    "import meshwright / import jax": (
        IMPORT.format("jax"),
        IMPORT.format("meshwright"),
    ),
    "fit of a tiny MLP, placed / stock, seconds a step": (
        FIT.format(**STOCK),
        FIT.format(**PLACED),
    ),
    "fit of a tiny MLP, under a limit / stock, seconds a step": (
        FIT.format(**STOCK),
        FIT.format(**LIMITED),
    ),
    "eager call of a Dense layer, placed / stock, seconds a call": (
        CALL.format(**STOCK),
        CALL.format(**PLACED),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two programs, timed in turns."""

    name: str
    floor: float
    ours: float
    ratio: float
    spread: float
    verdict: str


def time_once(program: str) -> float:
    """Runs a program that prints its time in seconds."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "KERAS_BACKEND": "jax"},
    )
    return float(done.stdout.split()[-1])


def compare(name: str, floor: str, ours: str) -> Comparison:
    """Medians of interleaved runs; the spread is that of the floor against itself."""
    for program in (floor, ours):
        time_once(program)
    pairs = [(time_once(floor), time_once(ours)) for _ in range(REPEATS)]
    floors, times = zip(*pairs, strict=True)
    halves = statistics.median(floors[::2]) / statistics.median(floors[1::2])
    ratio = statistics.median(times) / statistics.median(floors)
    spread = abs(halves - 1)
    differs = abs(ratio - 1) > max(spread, 0.02)
    return Comparison(
        name=name,
        floor=statistics.median(floors),
        ours=statistics.median(times),
        ratio=ratio,
        spread=spread,
        verdict=f"{ratio:.2f}x" if differs else "no difference beyond the noise",
    )


def main() -> None:
    """Runs every case and writes the results."""
    found = []
    for name, (floor, ours) in CASES.items():
        found.append(compare(name, floor, ours))
        print(
            f"{name}: {found[-1].verdict} (spread {found[-1].spread:.1%})", flush=True
        )
    packages = {p: metadata.version(p) for p in ("meshwright", "keras", "jax", "numpy")}
    setting = {
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "packages": packages,
        "repeats": REPEATS,
        "command": "make bench",
    }
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{setting['date']}-devices"
    record = {"setting": setting, "cases": [asdict(c) for c in found]}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    rows = [f"| {c.name} | {c.floor:.3g} | {c.ours:.3g} | {c.verdict} |" for c in found]
    shown = ", ".join(f"{k} {v}" for k, v in packages.items())
    text = [
        f"# Device layer, {setting['date']}",
        f"{setting['machine']}, Python {setting['python']}, {shown}; medians of "
        f"{REPEATS} interleaved runs in processes of their own; `make bench`.",
        "| case | stock (s) | Meshwright (s) | ratio |\n|---|---|---|---|\n"
        + "\n".join(rows),
    ]
    stem.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    print(f"written to {stem.relative_to(Path.cwd())}.md and .json")


if __name__ == "__main__":
    main()
