"""How long a script takes to its first training step: `python benchmarks/start.py`.

The reference CNN is built, put on one device and trained for one step, each time in a
process of its own: without the compile cache, with an empty one, and with the one that
the process before it left. Prints medians of the seconds from the start of the
interpreter to the end of each stage.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

REPEATS = 5
BATCH = 256
STAGES = ("interpreter", "meshwright", "keras", "devices", "model", "first step")


def stages(began: float) -> Iterator[float]:
    """Goes from the start to the first step; yields the seconds until each stage."""
    yield time.time() - began
    import meshwright as mw

    yield time.time() - began
    import keras

    yield time.time() - began
    import jax
    import numpy as np

    jax.devices()
    yield time.time() - began
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.BatchNormalization(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    mw.distribute(model, mw.Single())
    yield time.time() - began
    x, y = np.zeros((BATCH, 28, 28, 1), "float32"), np.zeros(BATCH, "int32")
    model.fit(x, y, batch_size=BATCH, verbose=0)
    yield time.time() - began


def run(cache: str) -> list[float]:
    """The seconds until each stage of one process."""
    inherited = {k: v for k, v in os.environ.items() if not k.endswith("CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, __file__, str(time.time())],
        env={**inherited, "MESHWRIGHT_COMPILE_CACHE": cache},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    """Runs the three in turns, and prints a table."""
    times: dict[str, list[list[float]]] = {"off": [], "empty": [], "filled": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            times["off"].append(run("off"))
            times["empty"].append(run(folder))
            times["filled"].append(run(folder))
    print(f"{'cache':8}" + "".join(f"{stage:>13}" for stage in STAGES))
    for name, runs in times.items():
        medians = (statistics.median(stage) for stage in zip(*runs, strict=True))
        print(f"{name:8}" + "".join(f"{seconds:13.2f}" for seconds in medians))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(list(stages(float(sys.argv[1])))))
    else:
        main()
