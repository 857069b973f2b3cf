"""Batches of arrays in memory, in an order that can be resumed."""

from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.data.checks import Where, equal_length
from meshwright.devices.containers import map_leaves, named_leaves
from meshwright.errors import DataError

import numpy as np


class Batches:
    """Batches of arrays, for custom loops.

    The order of an epoch depends on the seed and the number of the epoch only, not on
    devices or processes. Iterating gives the rest of the current epoch.

    Attributes:
        position: Where the next batch comes from, as a dict that fits into JSON.

    Arguments:
        arrays: Arrays, or dicts, lists and tuples of them; one row per sample.
        batch_size: Samples in a batch, over all devices and processes.
        shuffle: Whether samples are mixed anew in every epoch.
        seed: What the order depends on, besides the epoch.
        drop_last: Whether the last batch of an epoch is left out if it is smaller.

    >>> batches = Batches((np.arange(5), np.arange(5) ** 2), 2, shuffle=False)
    >>> for x, y in batches:
    ...     print(x, y)
    [0 1] [0 1]
    [2 3] [4 9]
    [4] [16]
    >>> batches.position
    {'epoch': 1, 'batch': 0, 'seed': 0}
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._arrays = map_leaves(np.asarray, arrays)
        leaves = named_leaves("arrays", self._arrays)
        self._size = equal_length(leaves, Where("Batches"))
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        self._batch = 0
        if batch_size < 1 or not len(self):
            raise DataError(
                f"Batches received batch_size={batch_size} for {self._size} samples"
                f"{' and drop_last=True' if drop_last else ''}.",
                "An epoch has at least one batch, and a batch at least one sample.",
                f"Use a batch_size from 1 to {self._size}.",
            )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        whole, tail = divmod(self._size, self._batch_size)
        return whole + bool(tail and not self._drop_last)

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self._epoch, "batch": self._batch, "seed": self._seed}

    def restore(self, position: Mapping[str, int]) -> None:
        """Goes on where another object with the same arrays and sizes stopped.

        Arguments:
            position: What its `position` was.
        """
        epoch, batch, seed = (position.get(k) for k in ("epoch", "batch", "seed"))
        is_valid = all(isinstance(n, int) and n >= 0 for n in (epoch, batch, seed))
        if not (is_valid and seed == self._seed and batch in range(len(self))):
            raise DataError(
                f"restore received {dict(position)}.",
                "A position has an epoch from 0, a batch from 0 to "
                f"{len(self) - 1}, and the seed of these batches, {self._seed}.",
                "Make the Batches with the arrays, batch_size, drop_last and seed "
                "that the position was saved with.",
            )
        self._epoch, self._batch = int(position["epoch"]), int(position["batch"])

    def __iter__(self) -> Iterator[Any]:
        epoch, order = self._epoch, self._order(self._epoch)
        for batch in range(self._batch, len(self)):
            is_last = batch + 1 == len(self)
            # Before the batch is given away: who stops there has seen it.
            self._epoch, self._batch = (epoch + 1, 0) if is_last else (epoch, batch + 1)
            start = batch * self._batch_size
            yield self._take(order[start : start + self._batch_size])

    def _take(self, rows: Any) -> Any:
        return map_leaves(lambda array: array[rows], self._arrays)

    def _order(self, epoch: int) -> Any:
        if not self._shuffle:
            return np.arange(self._size)
        return np.random.default_rng((self._seed, epoch)).permutation(self._size)
