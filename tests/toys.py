"""A small model, as the tests of `meshwright bench` measure it, and data for it."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

BATCH = 16


def make_model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)]
    model = keras.Sequential(layers, name="toy")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def make_data() -> Iterator[Any]:
    for _ in range(4):
        yield np.zeros((BATCH, 8), "float32"), np.zeros((BATCH,), "int32")
