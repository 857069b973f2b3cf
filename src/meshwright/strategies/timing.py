"""How long a training step of a strategy really takes."""

import statistics
import time
from typing import Any

from meshwright.models.training import batch_shapes
from meshwright.strategies.borrowing import borrowed, borrowed_step
from meshwright.strategies.strategy import Strategy

import jax
import numpy as np

REPEATS = 3
LEAST_SECONDS = 0.2
"""For which steps are repeated, so that one is not taken for all."""


def time_steps(
    model: Any, strategy: Strategy, batch_size: int, data: Any = None
) -> float:
    """Seconds of a training step, compiled before; the model is not changed.

    Arguments:
        model: A compiled model with values.
        strategy: How it is trained.
        batch_size: Samples of the global batch, which are made up.
        data: A batch as `(x, y)`, or its shapes, for models that do not say what they
            take.
    """
    shapes = batch_shapes(model, data, batch_size)
    batch = jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), shapes)
    with borrowed(model, batch, strategy.plan.precision) as start:
        step = borrowed_step(model, strategy)
        _, state = step(tuple(start), batch)
        placed = step.put(batch) if hasattr(step, "put") else batch
        seconds, state = _timed(step, state, placed, 1)
        number = max(1, int(LEAST_SECONDS / max(seconds, 1e-6)))
        found = []
        for _ in range(REPEATS):
            seconds, state = _timed(step, state, placed, number)
            found.append(seconds / number)
    return statistics.median(found)


def _timed(step: Any, state: Any, batch: Any, number: int) -> tuple[float, Any]:
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(number):
        _, state = step(state, batch)
    jax.block_until_ready(state)
    return time.perf_counter() - start, state
