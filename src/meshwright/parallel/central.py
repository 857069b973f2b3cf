"""Central storage: values on one device, on their way to all that compute and back.

In one process they are copied. In a run of several processes the one that has the
device puts them in, the others nothing, and a sum gives them to all.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.parallel.mesh import replicated
from meshwright.parallel.transfers import has_part
from meshwright.parallel.turns import run_in_turn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def spread(values: Sequence[Any], home: Mesh, mesh: Mesh) -> list[Any]:
    """Copies of what lies at home, whole on every device of a mesh.

    Arguments:
        values: The values; in other processes they have no shards.
        home: A mesh of one device.
        mesh: The devices that compute.
    """
    if process_count() == 1:
        # What lies on one of the devices already would not be copied (JAX does not
        # keep to `may_alias=False` here), and programs use up what they are given.
        return list(jax.device_put(_copied(list(values)), replicated(mesh)))
    first = mesh.local_devices[0]
    is_here = has_part(home)
    own = [jax.device_put(_shard_of(v), first) if is_here else None for v in values]
    rows = [_row(value, mine, mesh) for value, mine in zip(values, own, strict=True)]
    return list(run_in_turn(mesh, _sums(mesh), rows))


def _copies(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


_copied = jax.jit(_copies)


def bring_home(values: Sequence[Any], home: Mesh) -> list[Any]:
    """Values that are whole on every device of a mesh, at home."""
    place = replicated(home)
    if process_count() == 1:
        return list(jax.device_put(list(values), place))  # all at once
    return [_brought(value, home, place) for value in values]


def at_home(values: Sequence[Any], home: Mesh) -> list[Any]:
    """Values that should be at home, brought there if they are not."""
    place = replicated(home)
    return [v if _lies(v, place) else _brought(v, home, place) for v in values]


def _lies(value: Any, place: NamedSharding) -> bool:
    return isinstance(value, jax.Array) and value.sharding == place


def _brought(value: Any, home: Mesh, place: NamedSharding) -> jax.Array:
    if process_count() == 1:
        return jax.device_put(value, place)
    shards = []
    if has_part(home):
        shards = [jax.device_put(_shard_of(value), home.devices.flat[0])]
    return jax.make_array_from_single_device_arrays(
        value.shape, place, shards, dtype=value.dtype
    )


def _shard_of(value: Any) -> Any:
    is_array = isinstance(value, jax.Array)
    return value.addressable_shards[0].data if is_array else value


def _row(value: Any, own: Any, mesh: Mesh) -> jax.Array:
    """A value along a first dim of devices: on one it is, on the others are zeros."""
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shards = [
        own[jnp.newaxis]
        if own is not None and device in own.devices()
        else _nothing((1, *value.shape), value.dtype, device)
        for device in mesh.local_devices
    ]
    shape = (mesh.size, *value.shape)
    return jax.make_array_from_single_device_arrays(shape, place, shards)


@cache
def _nothing(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return jax.device_put(np.zeros(shape, dtype), device)


@cache
def _sums(mesh: Mesh) -> Any:
    def add_up(rows: list[Any]) -> list[Any]:
        return [jax.lax.psum(row[0], mesh.axis_names) for row in rows]

    mapped = jax.shard_map(
        add_up,
        mesh=mesh,
        in_specs=PartitionSpec(mesh.axis_names),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)
