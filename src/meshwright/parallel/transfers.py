"""Values on their way between the stages of a pipeline.

In one process a value is copied from device to device. Between processes both sides
run a small program at the same time, the one that has the value and the one that wants
it; so all processes go through the transfers of a step in the same order. XLA may run
the operations of one program in any order, and Gloo would take one value for another:
a program sends one value, into which others of its type are packed.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from meshwright.cluster.identity import process_index
from meshwright.parallel.mesh import replicated
from meshwright.parallel.turns import run_in_order

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PAIR = "pair"
"""The axis of a mesh of two stages along which they lie."""


class Parcel(NamedTuple):
    """What both sides know of a value that travels."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    """How it is split over the devices of a stage."""


def has_part(mesh: Mesh) -> bool:
    """Whether a device of this process is in a mesh."""
    return process_index() in _processes(mesh)


@cache
def _processes(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def move(
    values: Sequence[Any], parcels: Sequence[Parcel], source: Mesh, target: Mesh
) -> list[Any]:
    """The same values on the devices of another stage, split in the same way.

    Arguments:
        values: The values; None where this process has no device of `source`.
        parcels: What they are.
        source: Where they are.
        target: Where they go.

    Returns:
        The values there; None for each if this process has no device of `target`.
    """
    if source == target or not parcels:
        return list(values)
    processes = _processes(source) | _processes(target)
    if process_index() not in processes:
        return [None] * len(parcels)
    if len(processes) == 1:
        places = [NamedSharding(target, parcel.spec) for parcel in parcels]
        moved: list[Any] = jax.device_put(list(values), places)
        return moved
    found: dict[int, Any] = {}
    for chosen in _by_type(parcels):
        given = [values[i] for i in chosen]
        packed = tuple(parcels[i] for i in chosen)
        received = _exchange(given, packed, source, target)
        found |= dict(zip(chosen, received, strict=True))
    return [found[i] for i in range(len(parcels))]


def _by_type(parcels: Sequence[Parcel]) -> list[list[int]]:
    """The numbers of the parcels of each type."""
    types = dict.fromkeys(parcel.dtype for parcel in parcels)
    return [[i for i, p in enumerate(parcels) if p.dtype == each] for each in types]


def _exchange(
    values: Sequence[Any], parcels: tuple[Parcel, ...], source: Mesh, target: Mesh
) -> list[Any]:
    program, places = _exchange_program(parcels, source, target)
    sent = [
        _paired(value, parcel, place, source)
        for value, parcel, place in zip(values, parcels, places, strict=True)
    ]
    received = run_in_order(places[0].mesh, program, *sent)
    if not has_part(target):
        return [None] * len(parcels)
    pairs = zip(received, parcels, strict=True)
    return [_unpaired(value, parcel, target) for value, parcel in pairs]


@cache
def _exchange_program(
    parcels: tuple[Parcel, ...], source: Mesh, target: Mesh
) -> tuple[Any, list[NamedSharding]]:
    devices = np.stack([source.devices, target.devices])
    types = (AxisType.Auto,) * devices.ndim
    mesh = Mesh(devices, (PAIR, *source.axis_names), axis_types=types)
    specs = tuple(_paired_spec(parcel.spec) for parcel in parcels)

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(_pass_on(values))

    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.jit(mapped), [NamedSharding(mesh, spec) for spec in specs]


def _pass_on(values: Sequence[Any]) -> list[Any]:
    packed = jnp.concatenate([value.reshape(-1) for value in values])
    # Collectives know no truth values.
    numbers = packed.astype(jnp.uint8) if packed.dtype == bool else packed
    passed = jax.lax.ppermute(numbers, PAIR, [(0, 1)]).astype(packed.dtype)
    ends = np.cumsum([value.size for value in values])[:-1]
    parts = jnp.split(passed, ends)
    return [part.reshape(v.shape) for part, v in zip(parts, values, strict=True)]


def _paired_spec(spec: PartitionSpec) -> PartitionSpec:
    first, *rest = tuple(spec) or (None,)
    names = first if isinstance(first, tuple) else (first,)
    return PartitionSpec((PAIR, *(n for n in names if n is not None)), *rest)


def _paired(value: Any, parcel: Parcel, place: NamedSharding, source: Mesh) -> Any:
    """What both stages put into an exchange, along the first dim: one has nothing."""
    shape = parcel.shape or (1,)
    whole = (2 * shape[0], *shape[1:])
    local, mine = place.shard_shape(whole), set(source.devices.flat)
    given = (
        {} if value is None else {s.device: s.data for s in value.addressable_shards}
    )
    shards = [
        given[device].reshape(local)
        if device in mine
        else _nothing(local, parcel.dtype, device)
        for device in place.mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(whole, place, shards)


@cache
def _nothing(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    return jax.device_put(np.zeros(shape, dtype), device)


def _unpaired(value: Any, parcel: Parcel, target: Mesh) -> Any:
    place, mine = NamedSharding(target, parcel.spec), set(target.devices.flat)
    local = place.shard_shape(parcel.shape)
    shards = [
        shard.data.reshape(local)
        for shard in value.addressable_shards
        if shard.device in mine
    ]
    return jax.make_array_from_single_device_arrays(parcel.shape, place, shards)


def part_on(value: jax.Array, mesh: Mesh) -> jax.Array:
    """Of a value that is whole on every device, what lies on those of one stage."""
    devices = set(mesh.devices.flat)
    shards = [s.data for s in value.addressable_shards if s.device in devices]
    return _of_shards(value, mesh, shards)


def join_parts(parts: Sequence[Any], mesh: Mesh) -> jax.Array:
    """A value that every stage has whole, as one that every device has whole.

    Arguments:
        parts: Those of the stages of this process; None for others.
        mesh: All devices.
    """
    known = [part for part in parts if part is not None]
    shards = [shard.data for part in known for shard in part.addressable_shards]
    return _of_shards(known[0], mesh, shards)


def _of_shards(value: Any, mesh: Mesh, shards: list[Any]) -> jax.Array:
    place = replicated(mesh)
    return jax.make_array_from_single_device_arrays(value.shape, place, shards)


def add(values: Sequence[Any]) -> Any:
    """The sum of values in one place."""
    first, *rest = values
    for each in rest:
        first = first + each
    return first
