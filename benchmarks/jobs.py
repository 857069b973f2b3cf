"""The jobs that are timed, defined once; NumPy alone, so that every peer can read it.

The reference job is a convolutional network of 331,370 parameters on MNIST, trained by
Adam with batches of 256. The tiny network shows what a step costs beside its
arithmetic, the matmul-bound one how well work spreads over processes, the deep one how
well it flows through stages.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
LEARNING_RATE = 1e-3
DENSE = {"matmul": (512, 512, 4), "deep": (840, 520, 16)}
"""Networks that are bound by matrix products: features, width and depth.

Both halves of the deep one take the same time: the features are as many as make up for
the gradient that nobody wants of its input, and for the loss at its end.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model with its data; a repetition is `epochs` times `samples` of them."""

    name: str
    samples: int
    batch_size: int
    parameters: int
    epochs: int = 1

    @property
    def steps(self) -> int:
        """The steps of a repetition; the last batch of an epoch may be smaller."""
        return self.epochs * -(-self.samples // self.batch_size)


JOBS = {
    job.name: job
    for job in (
        Job(name="cnn", samples=2560, batch_size=256, parameters=331_370),
        Job(name="mlp", samples=60_000, batch_size=32, parameters=25_450),
        Job(name="matmul", samples=16_384, batch_size=4096, parameters=1_055_754),
        Job(name="deep", samples=32_768, batch_size=8192, parameters=4_506_330),
    )
}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that all contenders share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--job", choices=JOBS, default="cnn")
    parser.add_argument("--samples", type=int, help="per epoch; the job's own if left")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--data", type=Path, default=None, help="an mnist.npz")
    return parser


def job_of(options: argparse.Namespace) -> Job:
    """The job that the options name."""
    job = JOBS[options.job]
    return Job(
        name=job.name,
        samples=options.samples or job.samples,
        batch_size=job.batch_size,
        parameters=job.parameters,
        epochs=options.epochs,
    )


def find_mnist() -> Path:
    """`mnist.npz` from $MNIST, shared/data or Keras' folder, or the one we ship."""
    places = [
        Path(os.environ.get("MNIST", "")),
        ROOT / "shared" / "data" / "mnist.npz",
        Path.home() / ".keras" / "datasets" / "mnist.npz",
    ]
    shipped = ROOT / "src" / "meshwright" / "data" / "mnist_subset.npz"
    return next((place for place in places if place.is_file()), shipped)


def load(job: Job, path: Path | None = None, split: str = "train") -> tuple[Any, Any]:
    """Images or vectors as float32, and labels as int32; repeated if there are few."""
    if job.name in DENSE:
        rng = np.random.default_rng(0)
        features, *_ = DENSE[job.name]
        x = rng.normal(size=(job.samples, features)).astype(np.float32)
        return x, rng.integers(0, 10, job.samples).astype(np.int32)
    with np.load(path or find_mnist(), allow_pickle=False) as arrays:
        x = (arrays[f"x_{split}"] / np.float32(255)).astype(np.float32)
        y = arrays[f"y_{split}"].astype(np.int32)
    if split == "train":
        chosen = np.arange(job.samples) % len(x)
        x, y = x[chosen], y[chosen]
    return x.reshape(len(x), *((784,) if job.name == "mlp" else (28, 28, 1))), y


def describe_data(path: Path | None = None, job: Job | None = None) -> str:
    """What was trained on, for the report."""
    if job is not None and job.name in DENSE:
        return "random vectors"
    with np.load(path or find_mnist(), allow_pickle=False) as arrays:
        count = len(arrays["y_train"])
    return "MNIST" if count == 60_000 else f"{count:,} images of MNIST, repeated"


def batches(job: Job, x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """A generator over all epochs, as a user would write it."""
    rng = np.random.default_rng(0)
    for _ in range(job.epochs):
        order = rng.permutation(len(x))
        for start in range(0, len(x), job.batch_size):
            chosen = order[start : start + job.batch_size]
            yield x[chosen], y[chosen]


def keras_model(job: Job) -> Any:
    """The job's model, compiled, on whichever backend Keras has."""
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential(_layers(job.name))
    assert model.count_params() == job.parameters, model.count_params()
    model.compile(
        optimizer=keras.optimizers.Adam(LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _layers(name: str) -> list[Any]:
    import keras
    from keras import layers

    def conv(filters: int) -> Any:
        return layers.Conv2D(filters, 3, activation="relu")

    def dense(units: int) -> Any:
        return layers.Dense(units, activation="relu")

    if name == "mlp":
        return [keras.Input((784,)), dense(32), layers.Dense(10)]
    if name in DENSE:
        features, width, depth = DENSE[name]
        hidden = [dense(width) for _ in range(depth)]
        return [keras.Input((features,)), *hidden, layers.Dense(10)]
    return [
        keras.Input((28, 28, 1)),
        *(conv(32), conv(32), layers.MaxPooling2D(), layers.BatchNormalization()),
        *(conv(64), conv(64), layers.MaxPooling2D(), layers.BatchNormalization()),
        *(layers.Flatten(), dense(256), layers.BatchNormalization()),
        layers.Dense(10),
    ]
