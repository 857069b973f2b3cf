"""Trains on tf.data, a PyTorch DataLoader and Grain, with the result of arrays.

A script to run by hand where they are installed, because none is a dependency:
`python tests/data/feeds.py tensorflow`, or `torch`, or `grain`.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import meshwright as mw

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(22, 8)).astype(np.float32)
Y = X[:, :4] * 2


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(optimizer="sgd", loss="mse")
    return model


def from_tensorflow(tf: Any) -> list[Any]:
    return [tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)]


def from_torch(torch: Any) -> list[Any]:
    samples = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return [torch.utils.data.DataLoader(samples, batch_size=8)]


def from_grain(grain: Any) -> list[Any]:
    samples = list(zip(X, Y, strict=True))
    batches = grain.MapDataset.source(samples).batch(8)
    loader = grain.DataLoader(
        data_source=samples,
        sampler=grain.samplers.SequentialSampler(22, grain.sharding.NoSharding()),
        operations=[grain.transforms.Batch(8)],
    )
    return [batches, batches.to_iter_dataset(), loader]


FEEDS: dict[str, Callable[[Any], list[Any]]] = {
    "tensorflow": from_tensorflow,
    "torch": from_torch,
    "grain": from_grain,
}


def main(name: str) -> None:
    mw.configure(virtual=4)
    reference = make_model()
    reference.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for feed in FEEDS[name](importlib.import_module(name)):
        model = mw.distribute(make_model(), mw.Mirrored())
        model.fit(feed, epochs=2, verbose=0)
        pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
        difference = max(float(np.abs(a - b).max()) for a, b in pairs)
        print(f"{type(feed).__name__}: largest difference to arrays {difference:.1e}")
        assert difference < 1e-6


if __name__ == "__main__":
    main(sys.argv[1])
