"""`meshwright.verify`: does a strategy give what one device gives, on this model?"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from meshwright.devices.runtime import to_host
from meshwright.devices.step import batch_size as samples_of
from meshwright.errors import BatchWarning, StrategyError
from meshwright.models.precision import LOW_PRECISIONS, lowest_precision
from meshwright.parallel.microbatch import cut_batch
from meshwright.parallel.plan import Plan
from meshwright.strategies.borrowing import State, borrowed, borrowed_step
from meshwright.strategies.strategy import Strategy
from meshwright.train.accumulation import accumulated_step
from meshwright.train.mesh_step import as_keras_takes_them

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = 2e-5
"""Largest difference that counts as float rounding, relative to the largest entry."""

NOISE_FACTOR = 4.0
"""Largest difference that counts as rounding where rounding is magnified, as a multiple
of what rounding the weights differently changes on one device; see `_rounding_noise`.

In bfloat16 and float16 it always is. In float32 it is by an optimizer that divides by
the size of gradients, where these should be zero, and by steps that are close to chaos.
"""

NUM_ROUNDINGS = 4
"""Trainings on one device by which this is measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariableDifference:
    """How far one variable is from its value on one device."""

    path: str
    difference: float
    """Largest absolute difference."""
    relative: float
    """The same, relative to the variable's largest entry; see `_difference`."""
    allowed: float = TOLERANCE
    """What of `relative` counts as rounding."""

    @property
    def ok(self) -> bool:
        """Whether the difference is rounding."""
        return self.relative <= self.allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The differences of all variables, largest first; it prints as a table."""

    strategy: str
    steps: int
    differences: tuple[VariableDifference, ...]
    precision: str = "float32"
    """The lowest precision that layers computed in, on one device too."""

    @property
    def ok(self) -> bool:
        """Whether all differences are within float rounding."""
        return not self.failures

    @property
    def failures(self) -> tuple[VariableDifference, ...]:
        """The variables that differ by more than rounding."""
        return tuple(d for d in self.differences if not d.ok)

    def __str__(self) -> str:
        width = max(len(d.path) for d in self.differences)
        lines = [f"{'variable':<{width}}  max |difference|   relative   allowed"]
        for d in self.differences:
            mark = "" if d.ok else "  <- differs"
            lines.append(
                f"{d.path:<{width}}  {d.difference:16.2e}    {d.relative:.1e}   "
                f"{d.allowed:.1e}{mark}"
            )
        verdict = "equal to one device" if self.ok else "NOT equal to one device"
        noise = (
            f"allowed is {NOISE_FACTOR:g} x what other roundings of the weights change "
            "on one device"
        )
        if self.precision in LOW_PRECISIONS:
            verdict += f" in {self.precision}; {noise}"
        elif any(d.allowed > TOLERANCE for d in self.differences):
            verdict += f"; where it is more than {TOLERANCE:.0e}, {noise}"
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

    Both compute in the strategy's precision, or in the model's if it has none. The
    model is not changed: trainings start from copies, and its precision and optimizer
    are put back. Like `evaluate`, it builds the model's metrics; Keras then draws one
    permutation less in a `fit` that follows, so shuffled batches are others.

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
    strategy.refuse_verify()
    x, y = as_keras_takes_them(x), as_keras_takes_them(y)
    batches = _batches(x, y, batch_size, steps)
    with borrowed(model, batches[0], strategy.plan.precision) as start:
        return _compare(model, strategy, batches, start)


def _compare(
    model: Any, strategy: Strategy, batches: list[Any], start: State
) -> Verification:
    step = _step_alone(model, strategy.plan)
    updates = [u for b in batches for u in strategy.updates_of(b, samples_of(b))]
    alone = _run(step, start, updates)
    split = _run(borrowed_step(model, strategy), start, batches)
    precision = lowest_precision(model)
    paths = [v.path for v in model.trainable_variables]
    paths += [v.path for v in model.non_trainable_variables]
    differences = _differences(paths, alone, split)
    if precision in LOW_PRECISIONS:
        _refuse_if_nothing_moved(precision, start, alone, len(batches))
        noise = _rounding_noise(step, start, alone, updates, precision)
        pairs = zip(differences, _allowed(paths, alone, start, noise), strict=True)
        differences = [replace(d, allowed=limit) for d, limit in pairs]
    elif not all(d.ok for d in differences):
        noise = _rounding_noise(step, start, alone, updates, precision)
        pairs = zip(differences, _lost(paths, alone, noise), strict=True)
        differences = [d if d.ok else _within_noise(d, n) for d, n in pairs]
    return Verification(
        strategy=repr(strategy),
        steps=len(batches),
        differences=tuple(sorted(differences, key=lambda d: -d.relative)),
        precision=precision,
    )


def _batches(x: Any, y: Any, batch_size: int, steps: int) -> list[Any]:
    starts = list(range(0, samples_of(x), batch_size))

    def batch_from(start: int) -> Any:
        return jax.tree.map(lambda array: array[start : start + batch_size], (x, y))

    return [batch_from(starts[step % len(starts)]) for step in range(steps)]


def _step_alone(model: Any, plan: Plan) -> Any:
    """The reference: Keras' own step under a plain `jax.jit`, without this engine.

    Microbatches are a matter of mathematics (BatchNorm sees them), so the reference
    has them too.
    """

    # Functions of their own: for the method itself JAX would find the program that was
    # traced before, perhaps in another precision.
    def train_step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch)

    def accumulated(state: Any, batch: Any) -> Any:
        return accumulated_step(model, state, batch, lambda size: nullcontext())

    number = plan.microbatches or plan.accumulate
    if number == 1:
        return jax.jit(train_step)
    step = jax.jit(accumulated)
    return lambda state, batch: step(state, cut_batch(batch, number))


def _run(step: Any, start: Any, batches: list[Any]) -> list[Any]:
    """The model's variables after a few steps."""
    state: Any = tuple(start)
    with warnings.catch_warnings():
        # Nobody waits for these few steps, so devices may be idle.
        warnings.simplefilter("ignore", BatchWarning)
        for batch in batches:
            _, state = step(state, batch)
    return [to_host(value) for value in _variables_in(state)]


def _variables_in(state: Any) -> list[Any]:
    return [value for group in state[:2] for value in group]


def _refuse_if_nothing_moved(
    precision: str, start: Any, alone: list[Any], steps: int
) -> None:
    weights = start[0]
    pairs = zip(weights, alone[: len(weights)], strict=True)
    if weights and all(np.array_equal(a, b) for a, b in pairs):
        raise StrategyError(
            f"verify trained {steps} steps in {precision} on one device, and no weight "
            "moved.",
            "Steps whose gradients overflow are skipped, each halves the loss scale, "
            "and what is skipped cannot be compared.",
            "Pass more steps, smaller inputs, or a LossScaleOptimizer with a smaller "
            "initial_scale to compile.",
        )


def _differences(paths: list[str], alone: Any, other: Any) -> list[VariableDifference]:
    floats = [a for a in alone if a.size and a.dtype.kind not in "iu"]
    largest = max((float(np.abs(a).max()) for a in floats), default=0.0)
    return [
        _difference(path, a, b, floor=1e-3 * largest)
        for path, a, b in zip(paths, alone, other, strict=True)
    ]


def _rounding_noise(
    step: Any, start: Any, alone: list[Any], batches: list[Any], precision: str
) -> list[list[Any]]:
    """Where one device might as well have come to, had it rounded otherwise.

    The training is repeated from weights that differ by half of the last bit that the
    precision has, up or down. Beside the noise of sums this finds what a rounding can
    tip over: a ReLU, the largest of a pool, an overflow.
    """
    half = float(jnp.finfo(precision).eps) / 2
    found = []
    for seed in range(NUM_ROUNDINGS):
        random = np.random.default_rng(seed)
        weights = [_nudged(weight, half, random) for weight in start[0]]
        moved = (weights, *start[1:])
        ends = _run(step, moved, batches)
        triples = zip(ends, _variables_in(moved), _variables_in(start), strict=True)
        found.append([end - (first - old) for end, first, old in triples])
    return found


def _nudged(weight: Any, relative: float, random: np.random.Generator) -> Any:
    signs = random.choice([-1.0, 1.0], weight.shape)
    return (weight * (1 + relative * signs)).astype(weight.dtype)


def _allowed(
    paths: list[str], alone: list[Any], start: Any, noise: list[list[Any]]
) -> list[float]:
    """Relative differences that count as rounding in low precision, per variable.

    A variable may have been lucky; it is allowed the share of its movement that all
    variables have together.
    """
    first = _variables_in(start)
    share = max(_distance(alone, each) for each in noise)
    share /= _distance(alone, first) or 1.0
    moved = [share * d.relative for d in _differences(paths, alone, first)]
    # Seeds and counters are infinitely far from where they began.
    moved = [each if np.isfinite(each) else 0.0 for each in moved]
    pairs = zip(moved, _lost(paths, alone, noise), strict=True)
    return [max(TOLERANCE, NOISE_FACTOR * max(pair)) for pair in pairs]


def _lost(paths: list[str], alone: list[Any], noise: list[list[Any]]) -> list[float]:
    """What other roundings change at the most, relative, per variable."""
    found = [[d.relative for d in _differences(paths, alone, each)] for each in noise]
    largest = [max(each) for each in zip(*found, strict=True)]
    # Seeds and counters have no noise: they are equal, or something else is wrong.
    return [each if np.isfinite(each) else 0.0 for each in largest]


def _within_noise(found: VariableDifference, noise: float) -> VariableDifference:
    """The difference, judged by what rounding does to this variable on one device."""
    return replace(found, allowed=max(TOLERANCE, NOISE_FACTOR * noise))


def _distance(a: list[Any], b: list[Any]) -> float:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.dtype.kind not in "iu"]
    return float(np.sqrt(sum(np.sum((x.astype(float) - y) ** 2) for x, y in pairs)))


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
