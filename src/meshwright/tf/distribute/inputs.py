"""Data of strategies: every global batch split over the replicas."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.parallel.per_replica import part_sizes
from meshwright.tf.data import TensorSpec
from meshwright.tf.distribute.values import PerReplica, from_mesh
from meshwright.tf.errors import OutOfRangeError
from meshwright.tf.tensors import Tensor

import jax
import numpy as np

if TYPE_CHECKING:
    from meshwright.tf.distribute.strategy import Strategy


@dataclass(frozen=True)
class InputContext:
    """What a function that makes the data of one process is told.

    >>> InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The samples of one replica."""
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync} "
            )
        return size


class DistributedDataset:
    """Batches, each with a part for every replica; `fit` takes it as it was whole.

    Attributes:
        global_batches: The batches before they are split.
    """

    def __init__(self, dataset: Any, strategy: "Strategy") -> None:
        self.global_batches = getattr(dataset, "global_batches", dataset)
        self._dataset = dataset
        self._strategy = strategy

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self._split(), self)

    def _split(self) -> Iterator[Any]:
        batches = _Repeatable(self.global_batches)
        return map(from_mesh, self._strategy.split(batches))

    @property
    def element_spec(self) -> Any:
        """The shapes and types of each replica's parts."""
        replicas = self._strategy.num_replicas_in_sync
        return jax.tree.map(
            lambda s: _spec_of_parts(s, replicas), self._spec_of_batches()
        )

    def _spec_of_batches(self) -> Any:
        return self._dataset.element_spec


class PerReplicaSpec:
    """The shapes and types of values that are one per replica.

    >>> PerReplicaSpec((TensorSpec((2,)),)).specs[0].shape
    TensorShape([2])
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"


def _spec_of_parts(spec: TensorSpec, replicas: int) -> Any:
    size = spec.shape[0]
    if size is None:
        return PerReplicaSpec((spec,) * replicas) if replicas > 1 else spec
    parts = [
        TensorSpec((part, *spec.shape[1:]), spec.dtype)
        for part in part_sizes(size, replicas)
    ]
    return PerReplicaSpec(tuple(parts)) if replicas > 1 else parts[0]


class PerReplicaDataset:
    """Batches that a function made for one replica each."""

    def __init__(self, dataset: Any, strategy: "Strategy") -> None:
        self._dataset = dataset
        self._strategy = strategy

    def __iter__(self) -> "DistributedIterator":
        return DistributedIterator(self._deal(), self)

    def _deal(self) -> Iterator[Any]:
        """As many batches as there are replicas, until there are none."""
        batches = iter(getattr(self._dataset, "global_batches", self._dataset))
        replicas = self._strategy.make_replicas()
        while True:
            row = [batch for _, batch in zip(replicas, batches, strict=False)]
            if not row:
                return
            empty = jax.tree.map(lambda array: np.asarray(array)[:0], row[0])
            row += [empty] * (len(replicas) - len(row))
            placed = [
                jax.tree.map(
                    lambda a, d=replica.device: Tensor(
                        jax.device_put(np.asarray(a), d)
                    ),
                    batch,
                )
                for replica, batch in zip(replicas, row, strict=True)
            ]
            if len(placed) == 1:
                yield placed[0]
                continue
            flat = [jax.tree.flatten(p, is_leaf=_is_tensor) for p in placed]
            columns = zip(*(leaves for leaves, _ in flat), strict=True)
            yield flat[0][1].unflatten([PerReplica(column) for column in columns])


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


class _Repeatable:
    """An iterable of which only iterating is known."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


class DistributedIterator:
    """An iterator over batches with a part for every replica."""

    def __init__(self, parts: Iterator[Any], dataset: Any) -> None:
        self._parts = parts
        self._dataset = dataset

    def __iter__(self) -> "DistributedIterator":
        return self

    def __next__(self) -> Any:
        return next(self._parts)

    def get_next(self) -> Any:
        """The next batch."""
        try:
            return next(self._parts)
        except StopIteration:
            raise OutOfRangeError(None, None, "End of sequence") from None

    def get_next_as_optional(self) -> "Optional":
        """The next batch, if there is one."""
        return Optional(list(_first(self._parts)))

    @property
    def element_spec(self) -> Any:
        """The shapes and types of each replica's parts."""
        return self._dataset.element_spec


def _first(parts: Iterator[Any]) -> Iterator[Any]:
    for part in parts:
        yield part
        return


class Optional:
    """A batch, or none.

    >>> Optional([]).has_value().numpy()
    np.False_
    """

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def has_value(self) -> Tensor:
        """Whether there is one."""
        return Tensor(jax.numpy.asarray(bool(self._found)))

    def get_value(self) -> Any:
        """The batch."""
        if not self._found:
            raise OutOfRangeError(None, None, "End of sequence")
        return self._found[0]


@dataclass(frozen=True)
class InputOptions:
    """How data gets to the replicas; only what Meshwright does anyway is accepted.

    >>> InputOptions().experimental_per_replica_buffer_size
    1
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: str = "PER_WORKER"
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1


def check_options(options: InputOptions | None) -> None:
    """Refuses what `experimental_distribute_dataset` cannot do."""
    mode = getattr(options, "experimental_replication_mode", "PER_WORKER")
    if str(getattr(mode, "name", mode)) == "PER_REPLICA":
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is only supported in "
            "`distribute_datasets_from_function`."
        )


def make_dataset(function: Callable[[InputContext], Any], strategy: "Strategy") -> Any:
    """Data that a function makes for each process."""
    context = InputContext(
        num_input_pipelines=strategy.num_processes,
        input_pipeline_id=strategy.process_index,
        num_replicas_in_sync=strategy.num_replicas_in_sync,
    )
    return PerReplicaDataset(function(context), strategy)
