"""Batches on a mesh, of any size.

A batch is split into equal pieces: as many as divide both its size and the batch axes
of the mesh. Devices that are left over compute the same piece as a neighbour. Nothing
is padded, dropped or duplicated in the mathematics, whatever the size. (XLA can also
compute with unequal pieces, which it pads inside; that padding was seen to leak into
the gradients of embeddings, so it is not used.)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.parallel.mesh import (
    parts_of,
    placed_shape,
    prime_factors,
    replicated,
)
from meshwright.parallel.plan import BATCH_AXES

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of a mesh over which batches are split."""
    return parts_of(mesh, *BATCH_AXES)


@dataclass(frozen=True, slots=True)
class PlacedBatch:
    """A batch that is on the mesh already."""

    size: int
    arrays: Any


@dataclass(frozen=True, slots=True)
class PlacedStack:
    """Several batches of the same shapes on the mesh, along a first dim."""

    size: int
    number: int
    arrays: Any


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """How batches of one size are split over a mesh."""

    size: int
    mesh: Mesh

    @property
    def num_replicas(self) -> int:
        """The pieces that the mesh could take."""
        return prod(self.mesh.shape[axis] for axis in batch_axes(self.mesh))

    @property
    def pieces(self) -> int:
        """The pieces that the batch is split into."""
        return gcd(self.size, self.num_replicas)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which the pieces lie."""
        wanted, found = Counter(prime_factors(self.pieces)), []
        for axis in batch_axes(self.mesh):
            if wanted[self.mesh.shape[axis]] > 0:
                wanted[self.mesh.shape[axis]] -= 1
                found.append(axis)
        return tuple(found)

    def sharding(self, num_dims: int = 1) -> NamedSharding:
        """Split by sample; the dims after the first are left to the compiler."""
        free = (PartitionSpec.UNCONSTRAINED,) * (num_dims - 1)
        return NamedSharding(self.mesh, PartitionSpec(self.axes, *free))

    def placement(self, num_stacks: int = 0) -> NamedSharding:
        """That of a batch, or of stacked ones, which have that many dims before."""
        stacks = (None,) * num_stacks
        return NamedSharding(self.mesh, PartitionSpec(*stacks, self.axes))

    def put(self, data: Any, num_stacks: int = 0) -> Any:
        """Moves a batch from the host onto the mesh; what has no samples goes whole.

        Arguments:
            data: The batch, or batches of this size that are stacked.
            num_stacks: Dims of the stack that come before those of a batch.
        """

        def put(array: Any) -> jax.Array:
            host = np.asarray(array)
            where = self._place_of(host.shape, num_stacks)
            return jax.make_array_from_callback(host.shape, where, host.__getitem__)

        return map_leaves(put, data)

    def put_shapes(self, data: Any, num_stacks: int = 0) -> Any:
        """Says of shapes where `put` would move such a batch."""

        def put(leaf: Any) -> jax.ShapeDtypeStruct:
            return placed_shape(leaf, self._place_of(leaf.shape, num_stacks))

        return map_leaves(put, data)

    def _place_of(self, shape: tuple[int, ...], num_stacks: int) -> NamedSharding:
        has_samples = shape[num_stacks : num_stacks + 1] == (self.size,)
        return self.placement(num_stacks) if has_samples else replicated(self.mesh)

    def keep(self, array: Any) -> Any:
        """Inside a program: activations stay split by sample, as the weights are not.

        Without this the compiler may follow the split of a weight instead and move
        activations, which are larger.
        """
        if not self._has_samples(array):
            return array
        return jax.lax.with_sharding_constraint(array, self.sharding(array.ndim))

    def apply(self, part: Callable[[Any, Any], Any], inputs: Any, weight: Any) -> Any:
        """Inside a program: computes a part of it on whole pieces, weights whole.

        The compiler splits grouped convolutions wrongly if some devices of the mesh
        hold the same piece: it adds up the gradients of all of them.
        """
        if self.pieces in (1, self.mesh.size):
            return part(inputs, weight)
        where = PartitionSpec(self.axes if self._has_samples(inputs) else None)
        specs = {"in_specs": (where, PartitionSpec()), "out_specs": where}
        return jax.shard_map(part, mesh=self.mesh, **specs)(inputs, weight)

    def _has_samples(self, array: Any) -> bool:
        return bool(getattr(array, "ndim", 0)) and array.shape[0] == self.size
