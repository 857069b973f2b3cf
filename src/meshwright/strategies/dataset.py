"""Data for custom loops: batches, each split over the replicas ahead of its use."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from meshwright.cluster.identity import process_count, process_index
from meshwright.data.agreement import Agreement
from meshwright.data.loader import Batches
from meshwright.data.prefetch import prefetch
from meshwright.data.shards import Shard
from meshwright.devices.step import batch_size
from meshwright.errors import PerReplicaError, StrategyError
from meshwright.parallel.per_replica import split_batch

import jax
import numpy as np
from jax.sharding import Mesh


class DistributedDataset:
    """Batches, each split over the replicas; see `Strategy.distribute_dataset`.

    If it was made of arrays, its `position` can be saved, and restored in another one
    that was made of the same arrays.
    """

    def __init__(self, dataset: Any, mesh: Mesh, depth: int) -> None:
        self._dataset: Any = dataset
        self._mesh = mesh
        self._depth = depth
        self._is_spent = False
        self._position = dataset.position if isinstance(dataset, Batches) else None
        self._shard: Shard | None = None
        if callable(dataset) and not isinstance(dataset, Iterable):
            self._shard = Shard(process_index(), process_count())
        else:
            _refuse_no_batches(dataset)

    def __iter__(self) -> Iterator[Any]:
        dataset = self._dataset
        if self._shard is not None:
            dataset = dataset(self._shard)
            _refuse_no_batches(dataset)
        batches = iter(dataset)
        if batches is self._dataset and self._is_spent:
            raise StrategyError(
                f"A {type(batches).__name__} was iterated over for the second time.",
                "A generator gives its batches once.",
                "Distribute a list, or an object whose __iter__ starts anew.",
            )
        self._is_spent = True
        return self._split_ahead(batches)

    @property
    def position(self) -> dict[str, int]:
        """Where the next batch comes from, as a dict that fits into JSON."""
        self._refuse_without_position()
        return dict(self._position or {})

    def restore(self, position: Mapping[str, int]) -> None:
        """Goes on where another dataset of the same arrays stopped."""
        self._refuse_without_position()
        self._dataset.restore(position)
        self._position = self._dataset.position

    def _refuse_without_position(self) -> None:
        if self._position is None:
            raise StrategyError(
                f"The position of a {type(self._dataset).__name__} was asked for.",
                "Only batches that are made of arrays have a position: the order of "
                "others is not known.",
                "Pass arrays and a batch_size to distribute_dataset.",
            )

    def _split_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        agreement = Agreement("distribute_dataset") if process_count() > 1 else None
        arriving: Any = map(self._split, batches)
        if self._depth:
            arriving = prefetch(batches, self._split, self._depth)

        def read() -> tuple[Any, int, int]:
            batch, size, self._position = next(arriving)
            return batch, size, 1

        try:
            while True:
                try:
                    batch = read()[0] if agreement is None else agreement.on(read)
                except StopIteration:
                    return
                yield batch
        finally:
            if self._depth:
                arriving.close()

    def _split(self, batch: Any) -> tuple[Any, int, dict[str, int] | None]:
        """A batch over the replicas, its size, and where the next one comes from."""
        has_position = isinstance(self._dataset, Batches)
        position = self._dataset.position if has_position else None
        split = split_batch(batch, self._mesh, self._shard)
        return split, batch_size(batch), position


def _refuse_no_batches(dataset: Any) -> None:
    whole = (str, bytes, tuple, dict, np.ndarray, jax.Array, DistributedDataset)
    if isinstance(dataset, whole) or not isinstance(dataset, Iterable):
        raise PerReplicaError(
            f"distribute_dataset received a {type(dataset).__name__}.",
            "It takes an iterable of global batches, each a tree of arrays.",
            "Pass, for example, [(x[i:i+64], y[i:i+64]) for i in range(0, n, 64)], "
            "or arrays and a batch_size.",
        )
