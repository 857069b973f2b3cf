"""What is alive at the same time while kernels run.

Memory is assigned as XLA's compiler does it: what is updated lies in the place of its
old value, an operation that works element by element writes over an input that nobody
needs any more, and large tensors are placed first.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from meshwright.models.formulations import Platform
from meshwright.models.fusing import LIBRARY_FROM
from meshwright.models.kernels import Kernel, Kernels, make_kernels
from meshwright.models.operations import ALL_REDUCE
from meshwright.planner.accumulating import LOOP
from meshwright.planner.partitioning import JOIN, Partitioned
from meshwright.planner.scratch import Scratch

import numpy as np


@dataclass(frozen=True, slots=True)
class Alive:
    """Bytes of what a program makes that are alive when the most of them are."""

    total: float
    gradients: float
    activations: float
    returned: float
    """Outputs that lie in no place of an input; they are not part of the total."""

    @property
    def rest(self) -> float:
        """What is neither a gradient nor an activation."""
        return self.total - self.gradients - self.activations


class LivesBySize:
    """The lives in a program, whose kernels depend on the size of the batch.

    Arguments:
        parts: The program, and what of it is divided between devices.
        renewed: Values that take the place of inputs, with these.
        platform: What it is compiled for.
    """

    def __init__(
        self, parts: Partitioned, renewed: dict[int, int], platform: Platform
    ) -> None:
        self._parts = parts
        self._renewed = renewed
        self._platform: Platform = platform
        self._at_bound = lru_cache(maxsize=None)(self._make)

    def at(self, samples: int) -> "Lives":
        """Those for so many samples on a device."""
        return self._at_bound(bisect_right(self._bounds, samples))

    @cached_property
    def _bounds(self) -> list[int]:
        """The samples from which sizes count that decide what is fused."""
        if self._platform != "cpu":
            return []
        sizes = {value.size for value in self._parts.flat.values}
        numbers = {size.number for size in sizes if size.power == 1 and size.number}
        return sorted({-(-LIBRARY_FROM // number) for number in numbers})

    def _make(self, bound: int) -> "Lives":
        samples = self._bounds[bound - 1] if bound else 1
        if not self._bounds:
            samples = LIBRARY_FROM
        kernels = make_kernels(self._parts.flat, self._platform, samples)
        return Lives(kernels, self._parts, self._renewed, self._platform)


class _Room(NamedTuple):
    """The place of an input, which is free between two kernels."""

    input: int
    start: int
    end: int


class Lives:
    """From when to when each tensor that a program makes is alive.

    Arguments:
        kernels: The kernels, in order.
        parts: What of them is divided between devices.
        renewed: Values that take the place of inputs, with these.
        platform: What they are compiled for.
        is_inner: Whether this is what a loop repeats.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts: Partitioned | None,
        renewed: dict[int, int],
        platform: Platform,
        is_inner: bool = False,
    ) -> None:
        self._kernels = kernels.kernels
        self._buffers = kernels.buffers
        self._makers = {b: i for i, k in enumerate(self._kernels) for b in k.makes}
        self._last = dict(kernels.last_reads)
        places = {buffer.value: i for i, buffer in enumerate(self._buffers)}
        pairs = {places[a]: places[b] for a, b in renewed.items() if a in places}
        self._renewed = {a: b for a, b in pairs.items() if a in self._makers and a != b}
        returned = set(kernels.returned) & self._makers.keys()
        self._returned = [] if is_inner else sorted(returned - self._renewed.keys())
        skipped = self._renewed.keys() | set(self._returned)
        self._made = [b for b in self._makers if b not in skipped]
        self._numbers = np.array([b.bytes.number for b in self._buffers], dtype=float)
        self._powers = np.array([b.bytes.power for b in self._buffers])
        self._by_tensor = self._flags(parts.by_tensor if parts else [])
        self._by_fsdp = self._flags(parts.by_fsdp if parts else [])
        self._of_all = self._flags(parts.of_all if parts else [])
        # Compilers for GPUs know the order of kernels before they assign memory.
        self._copied = self._find_copied() if platform == "cpu" else []
        self._rooms = [_Room(old, -1, end) for old, end in self._copied]
        self._scratch = Scratch(kernels) if platform == "gpu" else None
        self._starts = {b: self._makers[b] for b in self._made}
        self._ends = {b: self._last.get(b, self._makers[b]) for b in self._made}
        if platform == "gpu":
            self._keep_for_updates()
        self._write_over()
        self._turn = self._find_turn()
        self._inner = [
            (
                i,
                Lives(
                    k.inner, parts if k.operation == LOOP else None, {}, platform, True
                ),
            )
            for i, k in enumerate(self._kernels)
            if k.inner is not None
        ]

    def _flags(self, of_values: list[bool]) -> Any:
        number = len(of_values)
        return np.array(
            [b.value < number and of_values[b.value] for b in self._buffers], dtype=bool
        )

    def _find_copied(self) -> list[tuple[int, int]]:
        """Inputs that are still read when what takes their place may be written.

        They are copied at the beginning. With each comes the kernel that writes it.
        """
        ancestors: list[int] = []
        readers: dict[int, list[int]] = {}
        for number, kernel in enumerate(self._kernels):
            bits = 1 << number
            for buffer in kernel.reads:
                readers.setdefault(buffer, []).append(number)
                if buffer in self._makers:
                    bits |= ancestors[self._makers[buffer]]
            ancestors.append(bits)
        return [
            (old, self._makers[new])
            for new, old in self._renewed.items()
            if any(
                not ancestors[self._makers[new]] >> reader & 1
                for reader in readers.get(old, ())
            )
        ]

    def _keep_for_updates(self) -> None:
        """Lets weights that were put in order stay: their updates read them so.

        Until then there is room in their own place.
        """
        updates = {old: self._makers[new] for new, old in self._renewed.items()}
        reads = {
            buffer: number
            for number, kernel in enumerate(self._kernels)
            if kernel.phase != "update"
            for buffer in kernel.reads
        }
        for buffer in self._made:
            kernel = self._kernel(buffer)
            if kernel.operation != "transpose" or len(kernel.reads) != 1:
                continue
            (source,) = kernel.reads
            is_same = self._buffers[source].dtype == self._buffers[buffer].dtype
            if is_same and source in updates:
                self._ends[buffer] = max(self._ends[buffer], updates[source])
                room = _Room(source, reads.get(source, 0), updates[source])
                self._rooms.append(room)

    def _find_turn(self) -> int:
        """The kernel with which the backward pass begins."""
        heavy = ("product", "convolution", "loop")
        for number, kernel in enumerate(self._kernels):
            if kernel.phase == "backward" and kernel.kind in heavy:
                return number
        return len(self._kernels)

    def _write_over(self) -> None:
        """Lets results lie in the place of what is read for the last time."""
        taken: set[int] = set()
        for number, kernel in enumerate(self._kernels):
            for made in kernel.makes:
                if made not in self._starts:
                    continue
                size = self._buffers[made].bytes
                for buffer in kernel.overwrites:
                    is_free = buffer in self._starts and buffer not in taken
                    is_last = is_free and self._ends[buffer] == number
                    if is_last and self._buffers[buffer].bytes == size:
                        taken.add(buffer)
                        self._ends[buffer] = number - 1
                        break

    def most(self, samples: float, fsdp: int, tensor: int) -> Alive:
        """What is alive when the most is.

        Arguments:
            samples: Of the batch on a device.
            fsdp: The degree of that axis.
            tensor: Likewise.
        """
        sizes = self._numbers * float(samples) ** self._powers
        ways = np.where(self._by_tensor, tensor, 1)
        sizes = sizes / ways
        sizes = sizes / np.where(self._by_fsdp, fsdp, 1)
        sizes = sizes * np.where(self._of_all, fsdp, 1)
        changes = np.zeros(len(self._kernels) + 2)
        placed = self._placed_in_inputs(sizes)
        left = [b for b in self._made if b not in placed]
        starts = np.array([self._starts[b] for b in left], dtype=int)
        ends = np.array([self._ends[b] for b in left], dtype=int)
        mine = sizes[left] if left else np.zeros(0)
        np.add.at(changes, starts, mine)
        np.add.at(changes, ends + 1, -mine)
        for buffer, _ in self._copied:
            changes[0] += sizes[buffer]
            changes[self._last.get(buffer, 0) + 1] -= sizes[buffer]
        if self._scratch is not None:
            for number, needed in self._scratch.needed(samples, sizes, ways).items():
                changes[number] += needed
                changes[number + 1] -= needed
        inside = {n: inner.most(samples, fsdp, tensor) for n, inner in self._inner}
        for number, each in inside.items():
            changes[number] += each.total
            changes[number + 1] -= each.total
        alive = changes.cumsum()
        at = int(alive.argmax())
        there = [b for b, s, e in zip(left, starts, ends, strict=True) if s <= at <= e]
        more = inside.get(at, Alive(0.0, 0.0, 0.0, 0.0))
        gradients = sum(sizes[b] for b in there if self._is_gradient(b))
        activations = sum(sizes[b] for b in there if self._is_activation(b))
        return Alive(
            total=float(alive[at]),
            gradients=float(gradients + more.gradients),
            activations=float(activations + more.activations),
            returned=float(sum(sizes[b] for b in self._returned)),
        )

    def _placed_in_inputs(self, sizes: Any) -> set[int]:
        """Tensors that lie in the place of an input that has been copied.

        The largest are placed first, each in the smallest place that is free.
        """
        if not self._rooms:
            return set()
        rooms = sorted(self._rooms, key=lambda room: sizes[room.input])
        taken: list[list[tuple[int, int]]] = [[] for _ in rooms]
        largest, found = sizes[rooms[-1].input], set()
        fitting = [b for b in self._made if sizes[b] <= largest]
        for buffer in sorted(fitting, key=lambda b: -sizes[b]):
            start, end = self._starts[buffer], self._ends[buffer]
            for room, lives in zip(rooms, taken, strict=True):
                is_large = sizes[buffer] <= sizes[room.input]
                if not is_large or start <= room.start or end >= room.end:
                    continue
                if all(end < first or start > last for first, last in lives):
                    lives.append((start, end))
                    found.add(buffer)
                    break
        return found

    def _kernel(self, buffer: int) -> Kernel:
        return self._kernels[self._makers[buffer]]

    def _is_gradient(self, buffer: int) -> bool:
        kernel = self._kernel(buffer)
        is_exchanged = kernel.operation in (ALL_REDUCE, JOIN, LOOP)
        is_fixed = self._buffers[buffer].bytes.power == 0
        return is_fixed and (kernel.phase == "backward" or is_exchanged)

    def _is_activation(self, buffer: int) -> bool:
        """Whether it was made before the backward pass, which still wants it."""
        grows = self._buffers[buffer].bytes.power > 0
        return grows and self._starts[buffer] < self._turn <= self._ends[buffer]
