"""What the kernels of a training step cost on a device, for batches of all sizes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from meshwright.models.kernels import Kernel, Kernels
from meshwright.models.operations import Size
from meshwright.planner.speed import ProductGroup, Products, Speed

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class KernelCosts:
    """Seconds of each kernel of a step.

    Arguments:
        kernels: The kernels.
        speed: The device.
        is_inner: Whether this is what a loop repeats.
    """

    kernels: Kernels
    speed: Speed
    is_inner: bool = False

    def seconds(
        self,
        samples: float,
        divided: Array | None = None,
        degree: int = 1,
        crowd: int = 1,
        shards: int = 1,
    ) -> Array:
        """One entry for each kernel, on a batch of so many samples.

        Arguments:
            samples: Those of the batch, on one device.
            divided: Whether the work of each kernel is divided over devices.
            degree: How many these are.
            crowd: How many devices share the caches.
            shards: Into how many parts weights, and sums for them, are divided.
        """
        share = np.ones(len(self.kernels.kernels))
        if divided is not None:
            share = np.where(divided, 1.0 / degree, 1.0)
        found = self._streams(samples, share, crowd)
        numbers, products = self._products
        if len(numbers):
            sizes = products.at(samples)
            if divided is not None:
                sizes = _split(sizes, divided[numbers], degree)
            flops = 2.0 * sizes.prod(axis=1)
            wanted = Products(products.groups, sizes, flops)
            multiplied = np.zeros(len(found))
            np.add.at(multiplied, numbers, self.speed.product_seconds(wanted))
            # Waiting for memory is known apart from the rest on GPUs.
            together = np.add if self.speed.units else np.maximum
            found = together(found, multiplied)
        start = self.speed.kernel
        found = np.maximum(found, start) if self.speed.overlaps else found + start
        for number, costs in self._loops:
            kernel = self.kernels.kernels[number]
            each = costs.seconds(samples, costs.sums_for_weights, shards)
            turn = float(each.sum()) + self.speed.turn
            found[number] = kernel.times * turn + self._stacking(kernel, samples)
        return found if self.is_inner else found * self._in_context

    @cached_property
    def sums_for_weights(self) -> Array:
        """Of each kernel: whether it adds up what does not grow with the batch."""
        buffers = self.kernels.buffers
        return np.array(
            [
                kernel.kind == "elementwise"
                and not any(buffers[b].bytes.power for b in kernel.makes)
                for kernel in self.kernels.kernels
            ]
        )

    @cached_property
    def _in_context(self) -> Array:
        known = self.speed.in_context
        kinds = [kind_in_context(kernel) for kernel in self.kernels.kernels]
        return np.array([known.get(kind, 1.0) for kind in kinds])

    def _stacking(self, kernel: Kernel, samples: float) -> float:
        """What a loop takes from stacks and puts on others, turn by turn.

        Those that it makes are filled with zeros and copied before.
        """
        buffers, times = self.kernels.buffers, kernel.times
        made, read = (
            np.array(
                [
                    buffers[b].bytes.at(samples)
                    for b in each
                    if buffers[b].shape[:1] == (times,)
                ]
            )
            for each in (kernel.makes, {*kernel.reads} - {*kernel.overwrites})
        )
        both = np.concatenate([made, read])
        turns = self.speed.stream_seconds(2.0 * both / times) + self.speed.kernel
        before = self.speed.stream_seconds(3.0 * made)
        return float(times * turns.sum() + before.sum())

    def crowd_ratios(self, seconds: Array, num_devices: int) -> Array:
        """How much longer kernels take, for each device, where devices share cores.

        Arguments:
            seconds: What each of them takes alone.
            num_devices: How many devices share the cores.
        """
        kinds = np.array([_crowd_kind(kernel) for kernel in self.kernels.kernels])
        found = np.ones(len(seconds))
        for kind in set(kinds):
            mine = kinds == kind
            found[mine] = self.speed.crowd_ratios(kind, num_devices, seconds[mine])
        # Devices wait for each other again and again, so that not all goes on at once;
        # only when they update their weights, they do not.
        is_apart = self.kernels.phases == "update"
        return np.asarray(np.where(is_apart, found, np.sqrt(found)))

    def _streams(self, samples: float, share: Array, crowd: int) -> Array:
        """Memory and arithmetic go on at the same time, so the slower one counts."""
        if self.speed.units:
            moving = self.speed.stream_seconds(self._bytes.at(samples) * share)
        else:
            moving = self._through_caches(samples, share, crowd)
        numbers = self._numbers.at(samples) * self.speed.per_number
        numbers += self._random.at(samples) * self.speed.per_random
        for name, sizes in self._dear.items():
            numbers += sizes.at(samples) * self.speed.per_dear.get(name, 0.0)
        numbers += self._transposed.at(samples) * self.speed.per_transposed
        summed = self._summed.at(samples) * self._per_summed
        arithmetic = np.maximum(numbers, summed) * share
        return np.maximum(moving, arithmetic)

    def _through_caches(self, samples: float, share: Array, crowd: int) -> Array:
        """Seconds to move the bytes of each kernel, from wherever they are by then.

        What was touched a moment ago is in a cache, if what was touched since leaves
        room for it there. Streams were timed over and over, so they tell how fast
        bytes are that come again after as many others as the stream has.
        """
        touches = self._touches
        each = share[touches.kernels]
        moved = touches.bytes.at(samples) * each
        since = np.maximum(touches.since.at(samples) * each * crowd, 1.0)
        rate = since / self.speed.stream_seconds(since)
        found = np.zeros(len(share))
        np.add.at(found, touches.kernels, moved / rate)
        return found

    @cached_property
    def _touches(self) -> "_Touches":
        return _Touches.of(self.kernels)

    @cached_property
    def _bytes(self) -> "_Sizes":
        buffers = self.kernels.buffers
        return _Sizes.of(
            [*(buffers[b].bytes for b in _touched(kernel)), *kernel.rows]
            for kernel in self.kernels.kernels
        )

    @cached_property
    def _dear(self) -> "dict[str, _Sizes]":
        kernels = self.kernels.kernels
        nothing = Size(0, 0)
        return {
            name: _Sizes.of([kernel.dear.get(name, nothing)] for kernel in kernels)
            for name in sorted({name for kernel in kernels for name in kernel.dear})
        }

    @cached_property
    def _summed(self) -> "_Sizes":
        return _Sizes.of([kernel.summed] for kernel in self.kernels.kernels)

    @cached_property
    def _per_summed(self) -> Array:
        """Of each kernel: seconds for a number that it sums up."""
        known, buffers = self.speed.per_summed, self.kernels.buffers
        return np.array(
            [
                max((known.get(buffers[b].dtype, 0.0) for b in k.reads), default=0.0)
                for k in self.kernels.kernels
            ]
        )

    @cached_property
    def _transposed(self) -> "_Sizes":
        return _Sizes.of(
            _transposed(self.kernels, each) for each in self.kernels.kernels
        )

    @cached_property
    def _random(self) -> "_Sizes":
        return _Sizes.of([kernel.random] for kernel in self.kernels.kernels)

    @cached_property
    def _numbers(self) -> "_Sizes":
        return _Sizes.of([kernel.numbers] for kernel in self.kernels.kernels)

    @cached_property
    def _products(self) -> tuple[Array, "_ProductSizes"]:
        pairs = [
            (number, product)
            for number, kernel in enumerate(self.kernels.kernels)
            for product in kernel.products
        ]
        numbers = np.array([number for number, _ in pairs], dtype=int)
        return numbers, _ProductSizes.of([product for _, product in pairs])

    @cached_property
    def _loops(self) -> "list[tuple[int, KernelCosts]]":
        return [
            (number, KernelCosts(kernel.inner, self.speed, is_inner=True))
            for number, kernel in enumerate(self.kernels.kernels)
            if kernel.inner is not None
        ]


def kind_in_context(kernel: Kernel) -> str:
    """What decides how much longer a kernel takes in a step than by itself."""
    return "transpose" if kernel.operation == "transpose" else _crowd_kind(kernel)


def _crowd_kind(kernel: Kernel) -> str:
    if kernel.products:
        is_alike = any(product.is_convolution for product in kernel.products)
        return "convolution" if is_alike else "product"
    return "loop" if kernel.inner is not None else "other"


def _touched(kernel: Kernel) -> list[int]:
    """The buffers whose bytes move, some of them twice."""
    if kernel.operation.startswith("scatter"):
        # A table is changed in place, at a few rows.
        return [*kernel.reads[-1:], *kernel.reads[-1:]]
    return list({*kernel.reads, *kernel.makes} - {*kernel.tables})


def _transposed(kernels: Kernels, kernel: Kernel) -> list[Size]:
    """The numbers that change places."""
    flat = kernels.flat
    operations = [flat.operations[number] for number in kernel.members]
    return [
        flat.values[operation.outputs[0]].size
        for operation in operations
        if operation.name == "transpose"
    ]


class _Touches(NamedTuple):
    """What kernels read and make, one after the other."""

    kernels: Array
    """The number of the kernel, for each."""
    bytes: "_Sizes"
    since: "_Sizes"
    """The bytes that were touched since they were touched the last time."""

    @classmethod
    def of(cls, kernels: Kernels) -> "_Touches":
        """Those of a step that is done again and again.

        A step finds what it is given where the step before has left it. What is made
        in no other's place lies where nothing was wanted for some time.
        """
        touched = [
            [
                *((buffer, kernels.buffers[buffer].bytes) for buffer in _touched(each)),
                *((None, size) for size in each.rows),
            ]
            for each in kernels.kernels
        ]
        sums = _Sizes.of([size for _, size in group] for group in touched).numbers
        before, whole = sums.cumsum(axis=0) - sums, sums.sum(axis=0)
        last: dict[int | None, int] = {}
        numbers, sizes, since = [], [], []
        for number, (kernel, group) in enumerate(
            zip(kernels.kernels, touched, strict=True)
        ):
            places = [last[buffer] for buffer in kernel.overwrites if buffer in last]
            for buffer, size in group:
                is_new = buffer in kernel.makes and buffer not in last
                known = (
                    places[:1] if is_new else [last[b] for b in [buffer] if b in last]
                )
                away = whole / 2 if is_new else whole
                if known:
                    away = before[number] + sums[number] - before[known[0]]
                numbers.append(number)
                sizes.append([size])
                since.append(away)
            last |= dict.fromkeys((b for b, _ in group if b is not None), number)
        away = np.array(since).reshape(-1, 3)
        return cls(np.array(numbers, dtype=int), _Sizes.of(sizes), _Sizes(away))


@dataclass(frozen=True)
class _Sizes:
    """Sums of sizes, by the power of the number of samples."""

    numbers: Array

    @classmethod
    def of(cls, groups: Any) -> "_Sizes":
        rows = []
        for group in groups:
            row = [0.0, 0.0, 0.0]
            for size in group:
                row[min(size.power, 2)] += size.number
            rows.append(row)
        return cls(np.array(rows).reshape(-1, 3))

    def at(self, samples: float) -> Array:
        return self.numbers @ np.array([1.0, samples, samples**2])


@dataclass(frozen=True)
class _ProductSizes:
    groups: list[ProductGroup]
    numbers: Array
    powers: Array

    @classmethod
    def of(cls, products: list[Any]) -> "_ProductSizes":
        sizes = [(p.batch, p.rows, p.inner, p.columns) for p in products]
        return cls(
            [
                ProductGroup(
                    "convolution" if p.is_convolution else "product",
                    p.dtype,
                    p.form,
                    p.is_awkward,
                )
                for p in products
            ],
            np.array([[s.number for s in row] for row in sizes], dtype=float).reshape(
                -1, 4
            ),
            np.array([[s.power for s in row] for row in sizes], dtype=float).reshape(
                -1, 4
            ),
        )

    def at(self, samples: float) -> Array:
        return self.numbers * samples**self.powers


def _split(sizes: Array, divided: Array, degree: int) -> Array:
    """The sizes on one device; the larger of the dims that stay is split."""
    sizes = sizes.copy()
    largest = np.where(sizes[:, 1] > sizes[:, 3], 1, 3)
    rows = np.flatnonzero(divided)
    sizes[rows, largest[rows]] /= degree
    return sizes
