"""Local SGD by hand: a stock Keras model for each worker, NumPy between them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def train_by_hand(
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    *,
    num_workers: int,
    sync_every: int,
    batch_size: int,
    epochs: int = 1,
    outer: Callable[[list[Any], list[Any]], list[Any]] | None = None,
) -> list[Any]:
    """The weights and other variables after training, as NumPy arrays.

    Arguments:
        make: Makes a compiled model, always the same.
        x: Inputs.
        y: Targets.
        num_workers: How many models there are.
        sync_every: Steps of a round.
        batch_size: Samples of all workers together.
        epochs: Passes through the data.
        outer: Takes the weights of before and the average; the average if left out.
    """
    model = make()
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    seeds = [i for i, v in enumerate(variables) if "seed" in v.name]
    places = {id(v): i for i, v in enumerate(variables)}
    floats = [places[id(v)] for v in agreed(model)]
    number_of_weights = len(model.trainable_variables)
    workers = [[np.array(v) for v in variables] for _ in range(num_workers)]
    for number, worker in enumerate(workers):
        for i in seeds:
            worker[i] = worker[i] + np.array([number, 0], np.uint32)
    anchor = [workers[0][i] for i in floats[:number_of_weights]]
    seen, steps = np.zeros(num_workers), 0

    def train(worker: list[Any], batch: Any) -> None:
        for variable, value in zip(variables, worker, strict=True):
            variable.assign(value)
        model.train_on_batch(*batch)
        worker[:] = [np.array(v) for v in variables]

    def agree() -> None:
        nonlocal anchor
        share = seen / seen.sum()
        values = [sum(share[n] * w[i] for n, w in enumerate(workers)) for i in floats]
        mean = values[:number_of_weights]
        anchor = outer(anchor, mean) if outer else mean
        for worker in workers:
            found = [*anchor, *values[number_of_weights:]]
            for i, value in zip(floats, found, strict=True):
                worker[i] = value
        seen[:] = 0

    for _ in range(epochs):
        for start in range(0, len(y), batch_size):
            batch = x[start : start + batch_size], y[start : start + batch_size]
            rows = np.array_split(np.arange(len(batch[1])), num_workers)
            for number, mine in enumerate(rows):
                if len(mine):
                    train(workers[number], (batch[0][mine], batch[1][mine]))
            seen += [len(mine) for mine in rows]
            steps += 1
            if steps % sync_every == 0:
                agree()
    if seen.any():
        agree()
    return [workers[0][i] for i in floats]


def agreed(model: keras.Model) -> list[Any]:
    """What workers agree on: weights, and other variables that are no seeds."""
    others = model.non_trainable_variables
    return [
        *model.trainable_variables,
        *(v for v in others if "float" in str(v.dtype)),
    ]


class Nesterov:
    """The outer optimizer of DiLoCo, as its paper and Keras write it."""

    def __init__(self, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.velocity: list[Any] = []

    def __call__(self, before: list[Any], mean: list[Any]) -> list[Any]:
        ways = [b - m for b, m in zip(before, mean, strict=True)]
        old = self.velocity or [0.0] * len(ways)
        pairs = zip(old, ways, strict=True)
        self.velocity = [self.momentum * v - self.rate * way for v, way in pairs]
        steps = zip(before, self.velocity, ways, strict=True)
        return [b + self.momentum * v - self.rate * way for b, v, way in steps]
