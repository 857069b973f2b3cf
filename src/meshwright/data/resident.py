"""Arrays that stay on the devices for a whole run; batches are named by their indices.

A batch is then a row of numbers, which the step uses to gather its samples, so that
nothing travels from the host, and many steps can be dispatched together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from meshwright.data.tally import Tally
from meshwright.devices.apart import drawing
from meshwright.devices.containers import map_leaves

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes and types of a tree of arrays, as something to remember things by."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, arrays: Any) -> "Shapes":
        """Those that arrays of the host have on devices."""
        leaves, structure = jax.tree.flatten(arrays)
        types = [(leaf.shape, _device_type(leaf)) for leaf in leaves]
        return cls(structure, tuple(types))

    @property
    def num_bytes(self) -> int:
        """What the arrays need."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.leaves)

    @property
    def tree(self) -> Any:
        """The tree, with shapes in place of the arrays."""
        leaves = [jax.ShapeDtypeStruct(*leaf) for leaf in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


def _device_type(array: Any) -> Any:
    """Devices have no 64 bits, unless JAX is told so."""
    return jax.dtypes.canonicalize_dtype(array.dtype)


class Placeable:
    """A tree of host arrays that is placed on devices once."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays
        self._placed: dict[Any, Any] = {}

    def placed(self, where: Any, put: Callable[[Any], Any]) -> Any:
        """The arrays as `put` places them; done once for each `where`."""
        if where not in self._placed:
            self._placed[where] = map_leaves(put, self.arrays)
        return self._placed[where]


class ArraysInMemory(Placeable):
    """The arrays behind the batches of a `fit` or `evaluate`.

    Arguments:
        arrays: A tree of arrays, each with an entry per sample.
        num_samples: How many these are.
        batch_size: Samples in a batch; the last one may have fewer.
        shuffle: As in Keras' `fit`: `True`, `False`, or `'batch'` for within batches.
    """

    def __init__(
        self, arrays: Any, num_samples: int, batch_size: int, shuffle: bool | str
    ) -> None:
        super().__init__(arrays)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle

    @cached_property
    def shapes(self) -> Shapes:
        """Their shapes and types on the devices."""
        return Shapes.of(self.arrays)

    @property
    def num_bytes(self) -> int:
        """What they need on each device."""
        return self.shapes.num_bytes

    @property
    def num_whole_batches(self) -> int:
        """Batches of the full size."""
        return self.num_samples // self.batch_size

    @property
    def rest(self) -> int:
        """Samples of the smaller batch at the end; 0 if there is none."""
        return self.num_samples % self.batch_size

    def draw_order(self) -> "np.ndarray[Any, Any]":
        """The order of the samples in one epoch, drawn as Keras draws it."""
        if self.shuffle == "batch":
            starts = range(0, self.num_samples, self.batch_size)
            sizes = [min(self.batch_size, self.num_samples - start) for start in starts]
            with drawing():
                within = [np.random.permutation(size) for size in sizes]
            return np.concatenate([s + w for s, w in zip(starts, within, strict=True)])
        if self.shuffle:
            with drawing():
                return np.random.permutation(self.num_samples)
        return np.arange(self.num_samples)


class Batches(Placeable):
    """The batches of one size in an epoch: a row of indices for each."""

    @property
    def number(self) -> int:
        """How many these are."""
        return len(self.arrays)

    @property
    def size(self) -> int:
        """Samples in each."""
        return int(self.arrays.shape[1])


class Stretch(NamedTuple):
    """Steps in a row on batches of one size, which are dispatched together."""

    data: ArraysInMemory
    batches: Batches
    first: int
    """The row of the first step."""
    num_steps: int
    rest: int
    """Samples of the smaller batch that ends the epoch; 0 if there is none."""


class ResidentStream:
    """One epoch over arrays in memory, in stretches.

    Arguments:
        data: The arrays.
        choose_length: Says how many steps are dispatched together, given the size of
            their batches and the number of steps that are left.
        tally: Counts what comes out of it.
    """

    draws_at_once = True
    """Whether the order of all batches is drawn before the first of them."""

    def __init__(
        self,
        data: ArraysInMemory,
        choose_length: Callable[[int, int], int],
        tally: Tally,
    ) -> None:
        self._data = data
        self._tally = tally
        self._choose_length = choose_length
        self._num_taken = 0
        self._settled: Stretch | None = None

    def __iter__(self) -> "ResidentStream":
        return self

    def skip(self, step: int, taken: int) -> None:
        """Leaves out what was used before an interruption.

        Arguments:
            step: Steps of the current epoch.
            taken: Batches of this pass through the data.
        """
        self._num_taken = taken
        self._position()  # draws the order of the pass

    def __next__(self) -> Any:
        """The first batch of the steps that were settled, for who looks at one."""
        stretch = self.take_stretch()
        indices = stretch.batches.arrays[stretch.first]
        return map_leaves(lambda array: array[indices], self._data.arrays)

    def settle_stretch(self, num_wanted: int, num_of_epoch: int) -> int:
        """Settles how many steps are next, out of those that are wanted.

        Arguments:
            num_wanted: Steps that are left in the epoch.
            num_of_epoch: All of its steps. The choice depends on these, so that a run
                that was interrupted dispatches the same steps together.
        """
        batches, row = self._position()
        most = min(num_wanted, batches.number - row)
        of_size = min(num_of_epoch, batches.number)
        length = min(self._choose_length(batches.size, of_size), most)
        whole, last = self._batches
        rest = last.size if batches is whole and num_wanted > most else 0
        self._settled = Stretch(self._data, batches, row, length, rest)
        self._num_taken += length
        self._tally.add(length * batches.size)
        return length

    def take_stretch(self) -> Stretch:
        """The steps that were settled."""
        assert self._settled is not None, "settle_stretch comes first"
        return self._settled

    def _position(self) -> tuple[Batches, int]:
        whole, last = self._batches
        if self._num_taken < whole.number:
            return whole, self._num_taken
        return last, self._num_taken - whole.number

    @cached_property
    def _batches(self) -> tuple[Batches, Batches]:
        """The whole ones, and the smaller one at the end, if there is one.

        Drawn when the first is asked for, since that is when Keras draws.
        """
        data = self._data
        order = data.draw_order().astype(np.int32)
        whole, last = np.split(order, [data.num_whole_batches * data.batch_size])
        whole = whole.reshape(data.num_whole_batches, data.batch_size)
        return Batches(whole), Batches(last.reshape(min(data.rest, 1), data.rest))
