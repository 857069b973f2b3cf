"""What kernels take inside of training steps, beside what they take again and again.

A kernel that is timed over and over finds its data in caches, and the cores to itself.
In a step it does neither. How much that is, on a CPU, is found out by small steps of
four kinds: their time is compared with the sum of their kernels' times.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from meshwright.models.flattening import flatten
from meshwright.models.formulations import BEST_FORMS
from meshwright.models.kernels import Kernels, make_kernels
from meshwright.models.rewriting import rewritten
from meshwright.models.training import SAMPLES
from meshwright.planner.costs import KernelCosts, kind_in_context
from meshwright.planner.measuring import Shape, Stopwatch, Trial
from meshwright.planner.speed import Speed

import jax
import jax.numpy as jnp
import numpy as np

CAUTION = 0.02
"""How much is held against a factor that is not one, as a share of what is known."""


class Reference(NamedTuple):
    """A small training step: the gradients of a loss."""

    loss: Callable[..., Any]
    sample: Shape
    """Of one sample of its data."""
    weights: Sequence[tuple[int, ...]]
    batch: int

    def shapes(self, samples: int) -> list[Shape]:
        """Of all its arguments."""
        shape, dtype = self.sample
        return [((samples, *shape), dtype), *((w, "float32") for w in self.weights)]

    def step(self, data: Any, *weights: Any) -> Any:
        """The gradients of the weights."""
        places = tuple(range(1, 1 + len(weights)))
        return jax.grad(self.loss, places)(data, *weights)

    def kernels(self) -> Kernels:
        """What a compiler for CPUs makes of it, for batches of all sizes."""
        given = [jax.ShapeDtypeStruct(*each) for each in self.shapes(SAMPLES)]
        program = rewritten(jax.make_jaxpr(self.step)(*given), BEST_FORMS["cpu"])
        return make_kernels(flatten(program.jaxpr, "cpu"), "cpu")

    def trial(self) -> Trial:
        """What is timed."""
        return Trial(self.step, self.shapes(self.batch))


def _normed(x: Any, axes: tuple[int, ...]) -> Any:
    middle = x.mean(axes, keepdims=True)
    return (x - middle) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-3)


def _attention(blocks: int, heads: int, x: Any, first: Any, *weights: Any) -> Any:
    """A transformer of some blocks, and a choice of one of many words."""
    x = x @ first
    *inner, words = weights
    for number in range(blocks):
        query, key, value, out, wide, narrow = inner[6 * number : 6 * number + 6]
        h = _normed(x, (-1,))
        parts = [
            (h @ w).reshape(*h.shape[:2], heads, -1).transpose(0, 2, 1, 3)
            for w in (query, key, value)
        ]
        scores = parts[0] @ parts[1].transpose(0, 1, 3, 2)
        mixed = (jax.nn.softmax(scores) @ parts[2]).transpose(0, 2, 1, 3)
        x = x + mixed.reshape(h.shape) @ out
        x = x + jax.nn.gelu(_normed(x, (-1,)) @ wide, approximate=False) @ narrow
    chosen = jax.nn.log_softmax(_normed(x, (-1,)) @ words)
    return -chosen[..., 0].mean()


def _images(x: Any, *weights: Any) -> Any:
    """Convolutions, normed over the batch, half of them with strides."""
    *kernels, last = weights
    for number, kernel in enumerate(kernels):
        strides = (2, 2) if number % 2 else (1, 1)
        x = jax.lax.conv_general_dilated(
            x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(_normed(x, (0, 1, 2)))
    return (x.mean((1, 2)) @ last).var()


def _recurrent(x: Any, given: Any, again: Any) -> Any:
    """Cells with gates, one turn for each word."""

    def turn(state: tuple[Any, Any], x: Any) -> tuple[tuple[Any, Any], Any]:
        kept, seen = state
        gates = jnp.split(x @ given + seen @ again, 4, axis=-1)
        take, forget, show = map(jax.nn.sigmoid, gates[:3])
        kept = forget * kept + take * jnp.tanh(gates[3])
        seen = show * jnp.tanh(kept)
        return (kept, seen), seen

    start = jnp.zeros((x.shape[0], again.shape[0]))
    return jax.lax.scan(turn, (start, start), x.transpose(1, 0, 2))[1].mean()


def _dense(x: Any, *weights: Any) -> Any:
    *inner, last = weights
    for weight in inner:
        x = jax.nn.relu(_normed(x @ weight, (0,)))
    return (x @ last).var()


_BLOCK = [(200, 200)] * 4 + [(200, 800), (800, 200)]

REFERENCES = {
    "attention": Reference(
        partial(_attention, 3, 5),
        ((90, 40), "float32"),
        [(40, 200), *_BLOCK * 3, (200, 1500)],
        20,
    ),
    "images": Reference(
        _images,
        ((52, 52, 3), "float32"),
        [(3, 3, 3, 30), (3, 3, 30, 60), (3, 3, 60, 60), (3, 3, 60, 120), (120, 9)],
        24,
    ),
    "recurrent": Reference(
        _recurrent, ((50, 60), "float32"), [(60, 480), (120, 480)], 64
    ),
    "dense": Reference(
        _dense,
        ((300,), "float32"),
        [(300, 1200), (1200, 1200), (1200, 500), (500, 8)],
        512,
    ),
}
"""Steps as they are common; what they touch is more than most caches hold."""


def factors_in_context(watch: Stopwatch, speed: Speed) -> dict[str, float]:
    """By the kind of kernels: how much longer they take in steps than by themselves."""
    times = watch.seconds([each.trial() for each in REFERENCES.values()])
    sums = []
    for each in REFERENCES.values():
        kernels = each.kernels()
        seconds = KernelCosts(kernels, speed).seconds(each.batch)
        found: dict[str, float] = {}
        for kernel, taken in zip(kernels.kernels, seconds, strict=True):
            kind = kind_in_context(kernel)
            found[kind] = found.get(kind, 0.0) + float(taken)
        sums.append(found)
    return fitted(sums, list(times))


def fitted(
    sums: Sequence[Mapping[str, float]], times: Sequence[float]
) -> dict[str, float]:
    """The factors with which sums come closest to times, none far from one.

    Arguments:
        sums: For each step, the seconds of its kernels by their kind.
        times: What each step took.
    """
    kinds = sorted({kind for each in sums for kind in each})
    parts = np.array([[each.get(kind, 0.0) for kind in kinds] for each in sums])
    logs = np.zeros(len(kinds))
    for _ in range(_ROUNDS):
        scaled = parts * np.exp(logs)
        whole = scaled.sum(axis=1)
        slope, off = scaled / whole[:, None], np.log(times) - np.log(whole)
        weights = slope.T @ slope + CAUTION * np.eye(len(kinds))
        logs = logs + np.linalg.solve(weights, slope.T @ off - CAUTION * logs)
    return {kind: float(np.exp(each)) for kind, each in zip(kinds, logs, strict=True)}


_ROUNDS = 20
