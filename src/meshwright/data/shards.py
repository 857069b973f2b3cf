"""Which part of the data a process takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshwright.devices.containers import map_leaves
from meshwright.devices.step import batch_size
from meshwright.errors import DataError

import numpy as np

File = TypeVar("File")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of one process among several.

    >>> Shard(0, 3).rows(7), Shard(2, 3).rows(7)
    (slice(0, 3, None), slice(6, 7, None))
    >>> Shard(1, 2).files(["a", "b", "c"])
    ['b']
    """

    index: int
    """The number of the process, from 0."""
    count: int
    """The number of processes."""

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise DataError(
                f"Shard received index={self.index} and count={self.count}.",
                "The index counts from 0 up to one less than the count.",
                "Use, for example, Shard(mw.process_index(), mw.process_count()).",
            )

    def rows(self, size: int) -> slice:
        """Its rows of a global batch of some size, of which the last may be empty.

        Every process takes the same number of rows, rounded up, until none are left.
        """
        share = -(-size // self.count)
        start = min(self.index * share, size)
        return slice(start, min(start + share, size))

    def samples(self, global_batch: Any) -> Any:
        """Its rows of a global batch, a tree of arrays; scalars go to everyone."""
        rows = self.rows(batch_size(global_batch))
        return map_leaves(lambda a: a[rows] if np.ndim(a) else a, global_batch)

    def files(self, files: Sequence[File]) -> list[File]:
        """Its files out of a list that is the same in every process."""
        if len(files) < self.count:
            raise DataError(
                f"{self.count} processes received {len(files)} files to share.",
                "A file is read by one process, so there are at least as many files.",
                f"Write the data as {self.count} files or more (a multiple of it is "
                "best), start fewer processes, or share by sample.",
            )
        return list(files[self.index :: self.count])
