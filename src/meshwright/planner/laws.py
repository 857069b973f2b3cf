"""How fast products of sizes that were not timed are, from those that were."""

from dataclasses import dataclass
from itertools import product

import numpy as np

Array = np.ndarray

_RAMPS = (0.0, 16.0, 32.0, 64.0, 128.0, 256.0)

_COARSE = [(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)]
_FINE = [*_COARSE, *product((96, 160, 192), (96, 128, 160)), (128, 96), (128, 160)]
"""Rows and columns of the parts into which units of a GPU cut a product."""

_LEAST_INNER = 256
"""Units share a part if each has so much to sum at least."""


@dataclass(frozen=True)
class Inference:
    """Seconds at new sizes: those of a law, corrected by what is known nearby."""

    law: "Saturating | Tiled"
    points: Array
    """The sizes that were timed: how many products, rows, inner and columns."""
    rest: Array
    """By what factor the law is off at each of them, as its logarithm."""
    trust: Array
    """How much each of them tells."""

    @classmethod
    def made(
        cls, points: Array, seconds: Array, trust: Array, units: int
    ) -> "Inference":
        """From products that were timed, on a device of so many units, if it is a GPU.

        Arguments:
            points: Their sizes.
            seconds: What they took.
            trust: How much each of them tells.
            units: How many parts of a product a GPU computes at once; 0 of a CPU.
        """
        law: Saturating | Tiled
        if units:
            law = Tiled.fitted(points, seconds, trust, units)
        else:
            law = Saturating.fitted(points, seconds)
        rest = np.log(seconds) - np.log(law.at(points))
        return cls(law, points, rest, trust)

    def at(self, sizes: Array) -> Array:
        """Seconds of products of some sizes."""
        away = np.log(sizes)[:, None, :] - np.log(self.points)[None, :, :]
        weights = self.trust / ((away**2).sum(axis=-1) + 0.05) ** 2
        correction = (weights * self.rest).sum(axis=1) / weights.sum(axis=1)
        return np.asarray(self.law.at(sizes) * np.exp(correction))


@dataclass(frozen=True)
class Tiled:
    """GPUs cut a product into parts of some size, which their units compute in turns.

    Parts at the edges are as much work as others, and so are units without a part in
    the last turn.
    """

    peak: float
    ramp: float
    """To begin a part takes as long as to sum over so much more."""
    tiles: Array
    units: int

    @classmethod
    def fitted(cls, points: Array, seconds: Array, trust: Array, units: int) -> "Tiled":
        """The law that is closest to what was timed."""
        found: list[tuple[float, int, float, Tiled]] = []
        for sizes, ramp in product((_COARSE, _FINE), _RAMPS):
            law = cls(1.0, ramp, np.array(sizes), units)
            off = np.log(law.at(points)) - np.log(seconds)
            middle = _middle(off, trust)
            error = float((trust * np.abs(off - middle)).sum())
            found.append((error, len(found), float(np.exp(middle)), law))
        _, _, peak, law = min(found)
        return cls(peak, law.ramp, law.tiles, units)

    def at(self, sizes: Array) -> Array:
        """Seconds of products of some sizes."""
        flops = 2.0 * sizes.prod(axis=1)
        start = 1.0 + self.ramp / sizes[:, 2]
        return np.asarray(flops * start / (self.peak * self._busy(sizes)))

    def _busy(self, sizes: Array) -> Array:
        """The share of what the units compute that is of use, with the best parts."""
        number, rows, inner, columns = sizes.T[:, :, None]
        high, wide = self.tiles.T
        parts = number * np.ceil(rows / high) * np.ceil(columns / wide)
        filled = number * rows * columns / (parts * high * wide)
        most = np.maximum(inner // _LEAST_INNER, 1)
        shared = parts * np.clip(self.units // parts, 1, most)
        turns = np.ceil(shared / self.units)
        return np.asarray((filled * shared / (turns * self.units)).max(axis=1))


def _middle(values: Array, weights: Array) -> float:
    """The weighted median."""
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(share, 0.5)])


@dataclass(frozen=True)
class Saturating:
    """The rate of a product grows with each of its sizes, and saturates."""

    peak: float
    halves: Array
    """The size at which a dim alone would halve the rate, as its logarithm."""

    @classmethod
    def fitted(cls, points: Array, seconds: Array) -> "Saturating":
        """The law that is closest to what was timed."""
        sizes = np.log(points)
        rates = np.log(2.0 * points.prod(axis=1) / seconds)
        grid = np.log([0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0])
        best, halves = np.inf, np.full(points.shape[1], grid[0])
        for _ in range(3):
            for dim in range(points.shape[1]):
                for each in grid:
                    trial = halves.copy()
                    trial[dim] = each
                    error = float(np.var(rates - _saturation(sizes, trial)))
                    if error < best - 1e-12:
                        best, halves = error, trial
        return cls(float(np.mean(rates - _saturation(sizes, halves))), halves)

    def at(self, sizes: Array) -> Array:
        """Seconds of products of some sizes."""
        rate = self.peak + _saturation(np.log(sizes), self.halves)
        return np.asarray(2.0 * sizes.prod(axis=1) / np.exp(rate))


def _saturation(sizes: Array, halves: Array) -> Array:
    return -np.log1p(np.exp(halves[None, :] - sizes)).sum(axis=1)
