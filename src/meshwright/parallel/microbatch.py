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

    def cut(self, data: Any) -> tuple[Any, Any]:
        """The equal ones, stacked along a new first dim, and the last one or None."""
        middle = self.num_equal * self.each

        def stack(array: Any) -> Any:
            array = _as_array(array)
            if not self._has_samples(array):
                return np.broadcast_to(array, (self.num_equal, *array.shape))
            return array[:middle].reshape(self.num_equal, self.each, *array.shape[1:])

        def rest(array: Any) -> Any:
            array = _as_array(array)
            return array[middle:] if self._has_samples(array) else array

        return map_leaves(stack, data), map_leaves(rest, data) if self.last else None

    def _has_samples(self, array: Any) -> bool:
        return bool(array.ndim) and array.shape[0] == self.size


def _as_array(array: Any) -> Any:
    """An array of the host; what is part of a traced program stays so."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def cut_batch(data: Any, wanted: int) -> tuple[Any, Any]:
    """A batch in as many microbatches as wanted; see `Microbatches.cut`."""
    return Microbatches(batch_size(data), wanted).cut(data)
