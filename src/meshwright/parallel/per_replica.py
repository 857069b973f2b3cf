"""One value per replica, and the split of a batch into such values.

A replica is one place on the batch axes of the mesh; its devices along `tensor` work
together. The values of all replicas are one array with a leading dim of replicas, split
over the mesh, so that they can go through `jax.jit` like any array.

A batch that does not divide gives values of two or three shapes, and as many arrays.
Each of these spans the whole mesh too, because one program takes arrays of one mesh
only; in the rows of replicas that have another shape lie copies that nobody reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

from meshwright.data.shards import Shard
from meshwright.errors import PerReplicaError
from meshwright.parallel.batch import batch_axes

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class PerReplica:
    """One value per replica.

    It has no arithmetic of its own: `strategy.run` hands each replica its value,
    `strategy.reduce` and `strategy.gather` make one value of them.
    """

    stacks: tuple[jax.Array, ...]
    """For each shape that occurs, the values with a leading dim of all replicas."""
    stops: tuple[int, ...] = field(metadata={"static": True})
    """For each stack, the first replica behind those whose values it holds."""
    mesh: Mesh = field(metadata={"static": True})

    @property
    def num_replicas(self) -> int:
        """The number of values, over all processes."""
        return self.stops[-1]

    def parts(self) -> Iterator[tuple[jax.Array, int, int]]:
        """Every stack with the first replica it holds and the first it does not."""
        yield from zip(self.stacks, (0, *self.stops), self.stops, strict=False)

    def stack_of(self, replica: int) -> jax.Array:
        """The stack that holds the value of a replica."""
        return next(stack for stack, _, stop in self.parts() if replica < stop)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of the value of each replica."""
        return tuple(
            stack.shape[1:]
            for stack, start, stop in self.parts()
            for _ in range(start, stop)
        )

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The values of this process's replicas, each on its replica's first device."""
        rows: dict[int, jax.Array] = {}
        for stack, start, stop in self.parts():
            of_all = _rows(stack, self.mesh)
            rows |= {i: row for i, row in of_all.items() if start <= i < stop}
        return tuple(rows[i] for i in sorted(rows))

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise PerReplicaError(
            f"The values of {self.num_replicas} replicas were used as one array.",
            "A PerReplica is one value per replica.",
            "Use strategy.reduce, strategy.gather or strategy.local_results first.",
        )

    def __repr__(self) -> str:
        values = ", ".join(f"{i}: {value}" for i, value in enumerate(self._texts()))
        return f"PerReplica:{{{values}}}"

    def _texts(self) -> list[str]:
        if any(isinstance(stack, jax.core.Tracer) for stack in self.stacks):
            return [
                f"{self.stack_of(i).dtype}{list(s)}" for i, s in enumerate(self.shapes)
            ]
        return [repr(value) for value in self.values]


def is_per_replica(value: Any) -> bool:
    """Whether a value is one per replica; as `is_leaf` it keeps these whole."""
    return isinstance(value, PerReplica)


def num_replicas(mesh: Mesh) -> int:
    """Into how many parts a mesh splits a batch."""
    return prod(mesh.shape[axis] for axis in batch_axes(mesh))


def rows_between(stack: jax.Array, start: int, stop: int) -> jax.Array:
    """A mask of the rows of some replicas, which broadcasts over their values."""
    numbers = jnp.arange(stack.shape[0]).reshape(-1, *(1,) * (stack.ndim - 1))
    return (numbers >= start) & (numbers < stop)


def join(stacks: list[jax.Array], stops: list[int], mesh: Mesh) -> PerReplica:
    """One value per replica out of stacks of neighbours; equal shapes are merged."""
    kept, ends = [stacks[0]], [stops[0]]
    for stack, stop in zip(stacks[1:], stops[1:], strict=True):
        if stack.shape == kept[-1].shape:
            kept[-1] = jnp.where(rows_between(stack, 0, ends[-1]), kept[-1], stack)
            ends[-1] = stop
        else:
            kept.append(stack)
            ends.append(stop)
    return PerReplica(tuple(kept), tuple(ends), mesh)


def part_sizes(size: int, parts: int) -> list[int]:
    """The samples of each part of a batch: as many as fit, in order, to the end.

    >>> part_sizes(10, 4), part_sizes(9, 4), part_sizes(4, 3)
    ([3, 3, 3, 1], [3, 3, 3, 0], [2, 2, 0])
    """
    most = -(-size // parts)
    return [max(0, min(most, size - most * i)) for i in range(parts)]


def split_batch(batch: Any, mesh: Mesh, shard: Shard | None = None) -> Any:
    """Splits the arrays of a batch over the replicas, in order.

    Arguments:
        batch: A tree of arrays on the host that have their samples in the first dim.
        mesh: The mesh.
        shard: The process whose part of the global batch this is; None if it is whole.

    Returns:
        The same tree with a `PerReplica` for each array. Every replica gets the number
        of samples divided by that of replicas, rounded up; the last ones get what is
        left, which may be an array without samples.
    """
    with_paths, tree = jax.tree_util.tree_flatten_with_path(batch, is_per_replica)
    arrays = [
        (jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in with_paths
    ]
    _check_batch(arrays)
    if shard is None:
        return tree.unflatten([_split(array, mesh) for _, array in arrays])
    _check_shard(len(arrays[0][1]), mesh, shard)
    return tree.unflatten([_split_shard(array, mesh, shard) for _, array in arrays])


def _check_shard(size: int, mesh: Mesh, shard: Shard) -> None:
    own = num_replicas(mesh) // shard.count
    if not size or size % max(own, 1):
        raise PerReplicaError(
            f"Process {shard.index} has a batch of {size} samples for its {own} "
            "replicas.",
            "Processes that read data of their own split it evenly over their "
            "replicas, or the replicas of all would not have equal parts.",
            f"Use batches that divide by {own}, and leave out what remains.",
        )


def _split_shard(array: np.ndarray, mesh: Mesh, shard: Shard) -> PerReplica:
    replicas = num_replicas(mesh)
    own = replicas // shard.count
    size = len(array) // own
    rows = array.reshape(own, size, *array.shape[1:])
    where = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))

    def local(index: Any) -> Any:
        replica = (index[0].start or 0) - shard.index * own
        return rows[replica : replica + 1]

    stack = jax.make_array_from_callback((replicas, *rows.shape[1:]), where, local)
    return PerReplica((stack,), (replicas,), mesh)


def _check_batch(arrays: list[tuple[str, np.ndarray]]) -> None:
    for path, array in arrays:
        if array.ndim == 0 or array.dtype.kind in "OSUMm":
            raise PerReplicaError(
                f"batch{path} has dtype {array.dtype} and shape {array.shape}.",
                "A batch is a tree of arrays of numbers with samples in the first dim.",
                "Batch the data first, and pass what has no samples to run by itself.",
            )
    if len({len(array) for _, array in arrays}) != 1:
        sizes = ", ".join(f"batch{path} has {len(array)}" for path, array in arrays)
        raise PerReplicaError(
            f"A batch has no one number of samples: {sizes or 'it has no arrays'}.",
            "All arrays of a batch have the same number of samples.",
            "Pass arrays whose first dims are equal.",
        )


def _split(array: np.ndarray, mesh: Mesh) -> PerReplica:
    sizes = part_sizes(len(array), num_replicas(mesh))
    where = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    stacks, stops = [], []
    for size, same in groupby(range(len(sizes)), key=sizes.__getitem__):
        replicas = list(same)

        def own(index: Any, size: int = size, replicas: list[int] = replicas) -> Any:
            replica = min(max(index[0].start or 0, replicas[0]), replicas[-1])
            return array[replica * sizes[0] :][:size][None]

        shape = (len(sizes), size, *array.shape[1:])
        stacks.append(jax.make_array_from_callback(shape, where, own))
        stops.append(replicas[-1] + 1)
    return PerReplica(tuple(stacks), tuple(stops), mesh)


def _rows(stack: jax.Array, mesh: Mesh) -> dict[int, jax.Array]:
    """The rows of a stack that this process has, by replica."""
    if isinstance(stack, jax.core.Tracer):
        return {i: stack[i] for i in range(stack.shape[0])}
    placed = jax.device_put(stack, NamedSharding(mesh, PartitionSpec(batch_axes(mesh))))
    shards = {s.index[0].start or 0: s for s in reversed(placed.addressable_shards)}
    return {replica: shard.data[0] for replica, shard in shards.items()}
