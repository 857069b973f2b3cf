"""How fast a kind of device is, by measurement or by its data sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class ProductPoint(NamedTuple):
    """A product that was timed."""

    kind: str
    """`product` or `convolution`."""
    dtype: str
    form: str
    batch: int
    rows: int
    inner: int
    columns: int
    seconds: float

    @property
    def flops(self) -> float:
        """Its floating point operations."""
        return 2.0 * self.batch * self.rows * self.inner * self.columns


class StreamPoint(NamedTuple):
    """A kernel that only reads and writes, and was timed."""

    bytes: float
    seconds: float


class CollectivePoint(NamedTuple):
    """A collective that was timed."""

    kind: str
    num_devices: int
    bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Speed:
    """What one device can do.

    Attributes:
        products: Timed products and convolutions, from which others are inferred.
        streams: Timed kernels of different sizes that read and write.
        per_dear: Seconds for a number that takes many cycles (an exponential).
        per_number: Seconds for a number that takes few.
        per_random: Seconds for a random number.
        kernel: Seconds that it takes to start a kernel.
        overlaps: Whether kernels are started while others run.
        turn: Seconds for the turn of a loop.
        dispatch: Seconds that the host takes for a step.
        fresh: Seconds for a byte of memory that is used for the first time.
        collectives: Timed collectives.
        crowding: By their number: how much longer devices of one CPU take together
            than one after the other.
    """

    products: Sequence[ProductPoint] = ()
    streams: Sequence[StreamPoint] = ()
    per_dear: float = 0.0
    per_number: float = 0.0
    per_random: float = 0.0
    kernel: float = 0.0
    overlaps: bool = True
    turn: float = 0.0
    dispatch: float = 0.0
    fresh: float = 0.0
    collectives: Sequence[CollectivePoint] = ()
    crowding: Mapping[int, float] = field(default_factory=dict)

    def stream_seconds(self, num_bytes: Array) -> Array:
        """Seconds to read and write so many bytes, one entry for each kernel."""
        sizes = np.log([point.bytes for point in self.streams])
        rates = np.log([point.bytes / point.seconds for point in self.streams])
        rate = np.exp(np.interp(np.log(np.maximum(num_bytes, 1.0)), sizes, rates))
        return num_bytes / rate

    def product_seconds(self, which: "Products") -> Array:
        """Seconds for each of some products."""
        found = np.zeros(len(which.flops))
        for group in set(which.groups):
            mine = np.array([each == group for each in which.groups])
            found[mine] = which.flops[mine] / self._rate(group, which.sizes[mine])
        return found

    def _rate(self, group: tuple[str, str, str], sizes: Array) -> Array:
        wanted = np.log(np.maximum(sizes, 1.0))
        return np.exp(_inference(self, group).at(wanted))

    def _known(self, group: tuple[str, str, str]) -> list[ProductPoint]:
        """The points that are most like those of a group."""
        kind, dtype, form = group
        chosen = [p for p in self.products if p.kind == kind]
        for field_, value in (("dtype", dtype), ("form", form)):
            closer = [p for p in chosen if getattr(p, field_) == value]
            chosen = closer or chosen
        return chosen


class Products(NamedTuple):
    """Products whose time is wanted."""

    groups: list[tuple[str, str, str]]
    """Kind, dtype and form of each."""
    sizes: Array
    """Batch, rows, inner and columns of each."""
    flops: Array


@cache
def _inference(speed: Speed, group: tuple[str, str, str]) -> "_Inference":
    known = speed._known(group)
    points = np.log([[p.batch, p.rows, p.inner, p.columns] for p in known])
    rates = np.log([point.flops / point.seconds for point in known])
    law = _Law.fitted(points, rates)
    return _Inference(law, points, rates - law.at(points))


@dataclass(frozen=True)
class _Inference:
    """Rates at new sizes: a saturating law, corrected by what is known nearby."""

    law: "_Law"
    points: Array
    rest: Array
    """How far off the law is at the points."""

    def at(self, wanted: Array) -> Array:
        """The logarithms of rates."""
        distances = ((wanted[:, None, :] - self.points[None, :, :]) ** 2).sum(axis=-1)
        weights = 1.0 / (distances + 0.05) ** 2
        correction = (weights * self.rest).sum(axis=1) / weights.sum(axis=1)
        return self.law.at(wanted) + correction


@dataclass(frozen=True)
class _Law:
    """The rate of a product grows with each of its sizes, and saturates."""

    peak: float
    halves: Array
    """The size at which a dim alone would halve the rate, as its logarithm."""

    @classmethod
    def fitted(cls, points: Array, values: Array) -> "_Law":
        """The law that is closest to what was timed."""
        grid = np.log([0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0])
        best, halves = np.inf, np.full(points.shape[1], grid[0])
        for _ in range(3):
            for dim in range(points.shape[1]):
                for each in grid:
                    trial = halves.copy()
                    trial[dim] = each
                    shape = _saturation(points, trial)
                    error = float(np.var(values - shape))
                    if error < best - 1e-12:
                        best, halves = error, trial
        return cls(float(np.mean(values - _saturation(points, halves))), halves)

    def at(self, points: Array) -> Array:
        """The logarithms of rates."""
        return self.peak + _saturation(points, self.halves)


def _saturation(points: Array, halves: Array) -> Array:
    return -np.log1p(np.exp(halves[None, :] - points)).sum(axis=1)
