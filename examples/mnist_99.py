"""MNIST to 99 % test accuracy in a fraction of a second on one GPU.

    python examples/mnist_99.py mnist.npz

`mnist.npz` is the file that `keras.datasets.mnist` keeps in `~/.keras/datasets`.
Without it, an epoch of the 2,000 digits that ship with Meshwright shows that it runs,
in about 8 seconds on a two-core machine.
"""

import sys
import time
from functools import partial
from typing import Any

import meshwright as mw
from meshwright.data.mnist import Digits, load_digits

import keras
import numpy as np

BATCH_SIZE = 1024
EPOCHS = 3
PEAK_RATE = 0.006


def load(path: str | None) -> Digits:
    """The whole of MNIST from a file, or the part that ships with the package."""
    if path is None:
        return load_digits()
    with np.load(path) as arrays:
        x_train, x_test = (
            arrays[name][..., None] / np.float32(255) for name in ("x_train", "x_test")
        )
        y_train, y_test = (arrays[n].astype("int32") for n in ("y_train", "y_test"))
    return Digits(x_train, y_train, x_test, y_test)


def make_model(num_steps: int) -> keras.Sequential:
    """The network of `make bench`, with a rate that rises and falls."""
    layers = keras.layers
    # So few steps leave little time for the averages that it keeps.
    normalization = partial(layers.BatchNormalization, momentum=0.9)
    widths = [32, 32, None, 64, 64, None]
    network: list[Any] = [keras.Input((28, 28, 1))]
    for width in widths:
        if width is None:
            network += [layers.MaxPooling2D(), normalization()]
        else:
            network.append(layers.Conv2D(width, 3, activation="relu"))
    network += [layers.Flatten(), layers.Dense(256, activation="relu")]
    network += [normalization(), layers.Dense(10, dtype="float32")]
    model = keras.Sequential(network)
    rate = keras.optimizers.schedules.CosineDecay(
        PEAK_RATE / 10,
        decay_steps=num_steps - num_steps // 4,
        warmup_target=PEAK_RATE,
        warmup_steps=num_steps // 4,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


class Run:
    """A training that can be begun anew.

    Arguments:
        digits: What is trained and tested on.
        batch_size: Images of a step.
        epochs: How often each image is seen.
    """

    def __init__(
        self, digits: Digits, batch_size: int = BATCH_SIZE, epochs: int = EPOCHS
    ) -> None:
        self._digits = digits
        self._batch_size, self._epochs = batch_size, epochs
        num_steps = epochs * -(-len(digits.x_train) // batch_size)
        has_gpu = any(device.kind == "GPU" for device in mw.devices())
        with mw.Single(precision="bfloat16" if has_gpu else "float32").scope():
            self._model = make_model(num_steps)
        self._model.optimizer.build(self._model.trainable_variables)
        self._variables = [*self._model.variables, *self._model.optimizer.variables]
        self._first_values = [np.array(variable.value) for variable in self._variables]

    def reset(self) -> None:
        """Back to the start."""
        for variable, value in zip(self._variables, self._first_values, strict=True):
            variable.assign(value)

    def train(self) -> None:
        """All epochs."""
        x, y = self._digits.x_train, self._digits.y_train
        self._model.fit(
            x, y, batch_size=self._batch_size, epochs=self._epochs, verbose=0
        )

    def test(self) -> float:
        """The test accuracy."""
        x, y = self._digits.x_test, self._digits.y_test
        _, accuracy = self._model.evaluate(x, y, batch_size=2500, verbose=0)
        return float(accuracy)


def main() -> None:
    """Trains twice: the first time compiles, the second one is timed."""
    if len(sys.argv) > 1:
        run = Run(load(sys.argv[1]))
    else:
        run = Run(load(None), batch_size=40, epochs=1)
    for which in ("with compilation", "again"):
        run.reset()
        began = time.perf_counter()
        run.train()
        seconds = time.perf_counter() - began
        print(f"{which}: {seconds:.2f} s, test accuracy {run.test():.2%}")


if __name__ == "__main__":
    main()
