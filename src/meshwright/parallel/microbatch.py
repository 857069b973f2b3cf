"""A batch cut into microbatches, which are computed one after the other."""

from dataclasses import dataclass
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.devices.step import batch_size

import jax
import numpy as np


@dataclass(frozen=True, slots=True)
class Microbatches:
    """How batches of one size are cut: equal microbatches, and perhaps a smaller last.

    The samples keep their order, so a microbatch has the same samples whatever the
    number of devices.

    >>> cut = Microbatches(size=10, wanted=4)
    >>> cut.each, cut.num_equal, cut.last
    (3, 3, 1)
    """

    size: int
    wanted: int

    @property
    def each(self) -> int:
        """Samples of a microbatch."""
        return -(-self.size // self.wanted)

    @property
    def num_equal(self) -> int:
        """Microbatches of that many samples."""
        return self.size // self.each

    @property
    def last(self) -> int:
        """Samples of the smaller one at the end; 0 if there is none."""
        return self.size % self.each

    def cut(self, data: Any, num_stacks: int = 0) -> tuple[Any, Any]:
        """The equal ones, stacked along a new dim, and the last one or None.

        Arguments:
            data: A batch, or stacked batches.
            num_stacks: Dims of the stack that come before those of a batch.
        """
        middle = self.num_equal * self.each
        each = (slice(None),) * num_stacks

        def stack(array: Any) -> Any:
            array = _as_array(array)
            stacks, dims = array.shape[:num_stacks], array.shape[num_stacks:]
            if not self._has_samples(dims):
                array = array.reshape(*stacks, 1, *dims)
                return np.broadcast_to(array, (*stacks, self.num_equal, *dims))
            first = array[(*each, slice(middle))]
            return first.reshape(*stacks, self.num_equal, self.each, *dims[1:])

        def rest(array: Any) -> Any:
            array = _as_array(array)
            has_samples = self._has_samples(array.shape[num_stacks:])
            return array[(*each, slice(middle, None))] if has_samples else array

        return map_leaves(stack, data), map_leaves(rest, data) if self.last else None

    def _has_samples(self, dims: tuple[int, ...]) -> bool:
        return bool(dims) and dims[0] == self.size


def _as_array(array: Any) -> Any:
    """An array of the host; what is part of a traced program stays so."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def cut_batch(data: Any, wanted: int) -> tuple[Any, Any]:
    """A batch in as many microbatches as wanted; see `Microbatches.cut`."""
    return Microbatches(batch_size(data), wanted).cut(data)
