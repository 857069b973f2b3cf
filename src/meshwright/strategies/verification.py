"""`meshwright.verify`: does a strategy give what one device gives, on this model?"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.runtime import to_host
from meshwright.devices.step import batch_size as samples_of
from meshwright.errors import StrategyError
from meshwright.parallel.microbatch import cut_batch
from meshwright.parallel.plan import Plan
from meshwright.strategies.attach import attached, place
from meshwright.strategies.strategy import Strategy
from meshwright.train.accumulation import accumulated_step
from meshwright.train.mesh_step import (
    MeshStep,
    as_keras_takes_them,
    training_state,
)

import jax
import numpy as np

TOLERANCE = 2e-5
"""Largest difference that counts as float rounding, relative to the largest entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableDifference:
    """How far one variable is from its value on one device."""

    path: str
    difference: float
    """Largest absolute difference."""
    relative: float
    """The same, relative to the variable's largest entry; see `_difference`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The differences of all variables, largest first; it prints as a table."""

    strategy: str
    steps: int
    differences: tuple[VariableDifference, ...]

    @property
    def ok(self) -> bool:
        """Whether all differences are within float rounding."""
        return not self.failures

    @property
    def failures(self) -> tuple[VariableDifference, ...]:
        """The variables that differ by more than rounding."""
        return tuple(d for d in self.differences if not d.relative <= TOLERANCE)

    def __str__(self) -> str:
        width = max(len(d.path) for d in self.differences)
        lines = [f"{'variable':<{width}}  max |difference|   relative"]
        for d in self.differences:
            mark = "" if d.relative <= TOLERANCE else "  <- differs"
            lines.append(
                f"{d.path:<{width}}  {d.difference:16.2e}   {d.relative:.1e}{mark}"
            )
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        lines.append(f"{self.strategy}, {self.steps} steps: {verdict}")
        return "\n".join(lines)


def verify(
    model: Any,
    x: Any,
    y: Any,
    strategy: Strategy,
    batch_size: int = 32,
    steps: int = 3,
) -> Verification:
    """Trains a few steps on one device and with a strategy, and compares the weights.

    The model's values are not changed: both trainings start from copies. Like
    `evaluate`, it builds the model's metrics; Keras then draws one permutation less in
    a `fit` that follows, so shuffled batches are others.

    Arguments:
        model: A compiled model.
        x: Inputs, arrays or a tree of them.
        y: Targets.
        strategy: The strategy to check.
        batch_size: Global batch size; the last batch may be smaller.
        steps: Training steps; the data is gone through again if it is too short.

    Returns:
        A `Verification`: `ok`, `differences` per variable, and a table when printed.

    >>> import keras, numpy as np
    >>> import meshwright as mw
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> x, y = np.ones((9, 4)), np.ones((9, 2))
    >>> mw.verify(model, x, y, mw.Mirrored(), batch_size=5).ok
    True
    """
    if not getattr(model, "compiled", False):
        raise StrategyError(
            f"verify received {model!r}, which is not a compiled model.",
            "It compares training steps, so it needs a loss and an optimizer.",
            "Call model.compile first.",
        )
    install_keras_hooks()
    x, y = as_keras_takes_them(x), as_keras_takes_them(y)
    batches = _batches(x, y, batch_size, steps)
    start = [[to_host(v) for v in group] for group in training_state(model, batches[0])]
    before = attached(model)
    try:
        alone = _train_alone(model, strategy.plan, start, batches)
        split = _train(model, strategy, start, batches)
    finally:
        _restore(model, start)
        if before is not None:
            place(model, before)
    paths = [v.path for v in model.trainable_variables]
    paths += [v.path for v in model.non_trainable_variables]
    return Verification(
        strategy=repr(strategy),
        steps=steps,
        differences=_differences(paths, alone, split),
    )


def _batches(x: Any, y: Any, batch_size: int, steps: int) -> list[Any]:
    starts = list(range(0, samples_of(x), batch_size))

    def batch_from(start: int) -> Any:
        return jax.tree.map(lambda array: array[start : start + batch_size], (x, y))

    return [batch_from(starts[step % len(starts)]) for step in range(steps)]


def _train_alone(model: Any, plan: Plan, start: Any, batches: list[Any]) -> Any:
    """The reference: Keras' own step under a plain `jax.jit`, without this engine.

    Microbatches are a matter of mathematics (BatchNorm sees them), so the reference
    has them too.
    """
    step = jax.jit(model.train_step)
    if plan.accumulate > 1:
        alone = partial(accumulated_step, model, around=lambda _: nullcontext())
        step = jax.jit(alone)
        batches = [cut_batch(batch, plan.accumulate) for batch in batches]
    state: Any = tuple(start)
    for batch in batches:
        _, state = step(state, batch)
    return [to_host(value) for group in state[:2] for value in group]


def _train(model: Any, strategy: Strategy, start: Any, batches: list[Any]) -> Any:
    place(model, strategy)
    train_step = jax.jit(model.train_step)
    step = MeshStep(model, train_step, strategy.plan, strategy.mesh)
    state: Any = tuple(start)
    for batch in batches:
        _, state = step(state, batch)
    return [to_host(value) for group in state[:2] for value in group]


def _restore(model: Any, start: Any) -> None:
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    for variables, values in zip(groups, start, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable._layout = None
            variable._value = None
            variable.assign(value)


def _differences(
    paths: list[str], alone: list[Any], split: list[Any]
) -> tuple[VariableDifference, ...]:
    floats = [a for a in alone if a.size and a.dtype.kind not in "iu"]
    largest = max((float(np.abs(a).max()) for a in floats), default=0.0)
    found = [
        _difference(path, a, b, floor=1e-3 * largest)
        for path, a, b in zip(paths, alone, split, strict=True)
    ]
    return tuple(sorted(found, key=lambda d: -d.relative))


def _difference(path: str, a: Any, b: Any, floor: float) -> VariableDifference:
    """Compares with the variable's own largest entry.

    A variable of tiny entries, such as a bias in front of BatchNorm, consists of
    rounding only, hence the floor. Seeds and counters must be equal.
    """
    wide = np.abs(a.astype(np.float64) - b.astype(np.float64))
    difference = float(wide.max(initial=0.0))
    if a.dtype.kind in "iu":
        relative = np.inf if difference else 0.0
    else:
        own = float(np.abs(a).max(initial=0.0))
        relative = difference / (max(own, floor) or 1.0)
    return VariableDifference(path=path, difference=difference, relative=relative)
