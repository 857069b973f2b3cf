"""A batch cut into microbatches, which are computed one after the other."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.devices.step import batch_size

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Microbatches:
    """How batches of one size are cut: into sizes that differ by at most one.

    There are as many microbatches as wanted, or one for each sample if that is fewer.
    The larger ones come first and the samples keep their order, so a microbatch has
    the same samples whatever the number of devices.

    >>> cut = Microbatches(size=10, wanted=4)
    >>> cut.sizes
    (3, 3, 2, 2)
    >>> larger, smaller = cut.cut(np.arange(10))
    >>> larger.tolist(), smaller.tolist()
    ([[0, 1, 2], [3, 4, 5]], [[6, 7], [8, 9]])
    >>> Microbatches(size=5, wanted=8).sizes
    (1, 1, 1, 1, 1)
    """

    size: int
    wanted: int

    @property
    def number(self) -> int:
        """How many there are; a batch without samples is one, too."""
        return max(1, min(self.wanted, self.size))

    @property
    def larger(self) -> int:
        """Samples of a larger one."""
        return -(-self.size // self.number)

    @property
    def smaller(self) -> int:
        """Samples of a smaller one; if all are equal, it is the same number."""
        return self.size // self.number

    @property
    def num_larger(self) -> int:
        """How many are larger; if all are equal, these are all."""
        return self.number - self.num_smaller

    @property
    def num_smaller(self) -> int:
        """How many are smaller; 0 if all are equal."""
        return self.number * self.larger - self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch, in their order."""
        return (self.larger,) * self.num_larger + (self.smaller,) * self.num_smaller

    def cut(self, data: Any, num_stacks: int = 0) -> tuple[Any, Any]:
        """The larger ones, stacked along a new dim, and so the smaller ones or None.

        Arguments:
            data: A batch, or stacked batches.
            num_stacks: Dims of the stack that come before those of a batch.
        """
        middle = self.num_larger * self.larger
        every = (slice(None),) * num_stacks

        def stacked(samples: slice, number: int, size: int) -> Any:
            def stack(array: Any) -> Any:
                array = _as_array(array)
                stacks, dims = array.shape[:num_stacks], array.shape[num_stacks:]
                if not self._has_samples(dims):
                    array = array.reshape(*stacks, 1, *dims)
                    broadcast = np if isinstance(array, np.ndarray) else jnp
                    return broadcast.broadcast_to(array, (*stacks, number, *dims))
                part = array[(*every, samples)]
                return part.reshape(*stacks, number, size, *dims[1:])

            return map_leaves(stack, data) if number else None

        larger = stacked(slice(middle), self.num_larger, self.larger)
        return larger, stacked(slice(middle, None), self.num_smaller, self.smaller)

    def _has_samples(self, dims: tuple[int, ...]) -> bool:
        return bool(dims) and dims[0] == self.size


def _as_array(array: Any) -> Any:
    """An array of the host; what is part of a traced program stays so."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def cut_batch(data: Any, wanted: int) -> tuple[Any, Any]:
    """A batch in as many microbatches as wanted; see `Microbatches.cut`."""
    return Microbatches(batch_size(data), wanted).cut(data)


def cut_up(data: Any, size: int, wanted: int) -> list[Any]:
    """The microbatches of a batch; what has no samples is in each of them."""
    sizes = Microbatches(size, wanted).sizes
    ends = np.cumsum([0, *sizes])

    def part(start: int, end: int) -> Any:
        def take(array: Any) -> Any:
            return array[start:end] if array.ndim and len(array) == size else array

        return map_leaves(take, data)

    return [part(a, b) for a, b in pairwise(ends)]
