"""`PerReplica`: what every replica has of its own, and the way to Meshwright's."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from meshwright.parallel.batch import batch_axes
from meshwright.parallel.per_replica import PerReplica as MeshPerReplica
from meshwright.parallel.per_replica import is_per_replica as is_mesh_per_replica
from meshwright.tf.tensors import Tensor, raw, wrap

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class PerReplica:
    """One value for each replica of this process.

    >>> PerReplica((1, 2)).values
    (1, 2)
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return self._text(repr)

    def __str__(self) -> str:
        return self._text(str)

    def _text(self, show: Callable[[Any], str]) -> str:
        lines = ",\n".join(f"  {i}: {show(v)}" for i, v in enumerate(self.values))
        return f"PerReplica:{{\n{lines}\n}}"


def is_leaf(value: Any) -> bool:
    """Whether a value is not looked into."""
    return isinstance(value, PerReplica | Tensor) or is_mesh_per_replica(value)


def part_of(tree: Any, position: int) -> Any:
    """What one of the replicas here has of a tree."""

    def choose(leaf: Any) -> Any:
        if is_mesh_per_replica(leaf):
            return Tensor(leaf.values[position])
        return leaf.values[position] if isinstance(leaf, PerReplica) else leaf

    return jax.tree.map(choose, tree, is_leaf=is_leaf)


def regroup(results: Sequence[Any]) -> Any:
    """One tree out of one for each replica; what all have in common stays as it is."""
    flat = [
        jax.tree.flatten(r, is_leaf=lambda v: v is None or is_leaf(v)) for r in results
    ]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        return PerReplica(results)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees[0].unflatten([_merge(column) for column in columns])


def _merge(values: Sequence[Any]) -> Any:
    first = values[0]
    if len(values) == 1 or all(v is first for v in values):
        return wrap(first)
    same_type = all(type(v) is type(first) for v in values)
    if same_type and isinstance(first, _PLAIN) and all(v == first for v in values):
        return first
    return PerReplica([wrap(value) for value in values])


def from_mesh(tree: Any) -> Any:
    """Values as `tf.distribute` shows them, out of Meshwright's."""

    def show(leaf: Any) -> Any:
        if not is_mesh_per_replica(leaf):
            return wrap(leaf)
        values = [Tensor(value) for value in leaf.values]
        return values[0] if leaf.num_replicas == 1 else PerReplica(values)

    return jax.tree.map(show, tree, is_leaf=is_leaf)


def to_mesh(value: PerReplica, mesh: Mesh) -> MeshPerReplica:
    """Meshwright's one value per replica: arrays over the whole mesh."""
    rows = [jnp.asarray(raw(v)) for v in value.values]
    devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    where = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    first = devices[0].process_index * len(rows)
    stacks, stops = [], []
    for shape, same in groupby(range(len(rows)), key=lambda i: rows[i].shape):
        members = list(same)
        dtype = rows[members[0]].dtype
        parts = [
            jax.device_put(
                rows[i][None] if i in members else jnp.zeros((1, *shape), dtype), device
            )
            for i, device in enumerate(devices)
        ]
        stacks.append(
            jax.make_array_from_single_device_arrays((mesh.size, *shape), where, parts)
        )
        stops.append(first + members[-1] + 1)
    if len(stacks) == 1:
        stops = [mesh.size]
    return MeshPerReplica(tuple(stacks), tuple(stops), mesh)


def map_per_replica(function: Callable[[PerReplica], Any], tree: Any) -> Any:
    """A tree with something done to the values per replica in it."""
    return jax.tree.map(
        lambda leaf: function(leaf) if isinstance(leaf, PerReplica) else leaf,
        tree,
        is_leaf=is_leaf,
    )
