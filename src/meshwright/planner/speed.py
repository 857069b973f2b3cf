"""How fast a kind of device is, by measurement or by its data sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from meshwright.planner.laws import Inference

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
    bytes: float = 0.0
    """What it reads and writes."""
    is_awkward: bool = False
    """Whether rows begin where the device is slow to read them."""


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


class CrowdPoint(NamedTuple):
    """A kernel that was timed on several devices of one CPU at once."""

    kind: str
    """`product`, `convolution` or `other`."""
    num_devices: int
    seconds: float
    """What it takes one device alone."""
    ratio: float
    """How much longer devices take together than one after the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Speed:
    """What one device can do.

    Attributes:
        products: Timed products and convolutions, from which others are inferred.
        streams: Timed kernels of different sizes that read and write.
        per_dear: Seconds for a number that takes many cycles, by operation.
        per_number: Seconds for a number that takes few.
        per_random: Seconds for a random number.
        per_transposed: Seconds for a number that changes its place.
        per_summed: Seconds for a number that is summed up, by its type.
        kernel: Seconds that it takes to start a kernel.
        units: How many parts of a product a GPU computes at once; 0 of a CPU.
        overlaps: Whether kernels are started while others run.
        turn: Seconds for the turn of a loop.
        dispatch: Seconds that the host takes for a step.
        fresh: Seconds for a byte of memory that is used for the first time.
        collectives: Timed collectives.
        crowding: Timed kernels of several devices that share the cores of a CPU.
        in_context: How much longer kernels of a CPU take in a step than by themselves.
    """

    products: Sequence[ProductPoint] = ()
    streams: Sequence[StreamPoint] = ()
    per_dear: Mapping[str, float] = field(default_factory=dict)
    per_number: float = 0.0
    per_random: float = 0.0
    per_transposed: float = 0.0
    per_summed: Mapping[str, float] = field(default_factory=dict)
    kernel: float = 0.0
    units: int = 0
    overlaps: bool = True
    turn: float = 0.0
    dispatch: float = 0.0
    fresh: float = 0.0
    collectives: Sequence[CollectivePoint] = ()
    crowding: Sequence[CrowdPoint] = ()
    in_context: Mapping[str, float] = field(default_factory=dict)

    def stream_seconds(self, num_bytes: Array) -> Array:
        """Seconds to read and write so many bytes, one entry for each kernel."""
        sizes = np.log([point.bytes for point in self.streams])
        rates = np.log([point.bytes / point.seconds for point in self.streams])
        rate = np.exp(np.interp(np.log(np.maximum(num_bytes, 1.0)), sizes, rates))
        return num_bytes / rate

    def product_seconds(self, which: "Products") -> Array:
        """Seconds for each of some products; on a GPU, what they take beside memory."""
        found = np.zeros(len(which.flops))
        sizes = np.maximum(which.sizes, 1.0)
        for group in set(which.groups):
            mine = np.array([each == group for each in which.groups])
            whole = 2.0 * sizes[mine].prod(axis=1)
            seconds = _inference(self, group).at(sizes[mine])
            # Sizes below one, of what is divided, count as a part of the whole.
            found[mine] = seconds * which.flops[mine] / whole
        return found

    def crowd_ratios(self, kind: str, num_devices: int, seconds: Array) -> Array:
        """How much longer devices take together than one after the other.

        Arguments:
            kind: What kernels these are: `product`, `convolution` or `other`.
            num_devices: How many devices share the cores.
            seconds: What each of the kernels takes alone.
        """
        known = sorted(
            (point.seconds, point.ratio)
            for point in self.crowding
            if (point.kind, point.num_devices) == (kind, num_devices)
        )
        if not known:
            return np.ones(len(seconds))
        times, ratios = np.array(known).T
        wanted = np.log(np.maximum(seconds, 1e-12))
        return np.interp(wanted, np.log(times), ratios)

    def _known(self, group: "ProductGroup") -> list[ProductPoint]:
        """The points that are most like those of a group."""
        chosen = [p for p in self.products if p.kind == group.kind]
        form = "tn" if group.form == "tt" else group.form
        wanted = {"is_awkward": group.is_awkward, "dtype": group.dtype, "form": form}
        for name, value in wanted.items():
            closer = [p for p in chosen if getattr(p, name) == value]
            chosen = closer or chosen
        return chosen


class ProductGroup(NamedTuple):
    """What products have in common whose times follow one law."""

    kind: str
    """`product` or `convolution`."""
    dtype: str
    form: str
    is_awkward: bool = False
    """Whether rows begin where the device is slow to read them."""


class Products(NamedTuple):
    """Products whose time is wanted."""

    groups: Sequence[ProductGroup]
    sizes: Array
    """Batch, rows, inner and columns of each."""
    flops: Array


_LEAST_SHARE = 0.1
"""Of what a product takes at least so much is not memory."""


@cache
def _inference(speed: Speed, group: ProductGroup) -> Inference:
    known = speed._known(group)
    sizes = np.array([[p.batch, p.rows, p.inner, p.columns] for p in known], float)
    seconds = np.array([p.seconds for p in known])
    if not speed.units:
        return Inference.made(sizes, seconds, np.ones(len(known)), 0)
    moving = speed.stream_seconds(np.array([p.bytes for p in known]))
    computing = np.maximum(seconds - moving, _LEAST_SHARE * seconds)
    return Inference.made(sizes, computing, computing / seconds, speed.units)
