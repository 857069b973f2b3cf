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


class Delivery(NamedTuple):
    """Values on their way to the devices of another stage."""

    values: Sequence[Any]
    """The values; None where this process has no device of `source`."""
    parcels: Sequence[Parcel]
    """What they are."""
    source: Mesh
    target: Mesh


def move(
    values: Sequence[Any], parcels: Sequence[Parcel], source: Mesh, target: Mesh
) -> list[Any]:
    """The same values on the devices of another stage, split in the same way.

    Returns:
        The values there; None for each if this process has no device of `target`.
    """
    return deliver([Delivery(values, parcels, source, target)])[0]


def deliver(deliveries: Sequence[Delivery]) -> list[list[Any]]:
    """Moves values between several stages; what goes there and back goes at once.

    Returns:
        For each delivery what `move` would return.
    """
    found: dict[int, list[Any]] = {}
    between: dict[frozenset[Mesh], list[int]] = {}
    for i, each in enumerate(deliveries):
        processes = _processes(each.source) | _processes(each.target)
        if each.source == each.target or not each.parcels:
            found[i] = list(each.values)
        elif process_index() not in processes:
            found[i] = [None] * len(each.parcels)
        elif len(processes) == 1:
            places = [NamedSharding(each.target, p.spec) for p in each.parcels]
            found[i] = jax.device_put(list(each.values), places)
        else:
            between.setdefault(frozenset((each.source, each.target)), []).append(i)
    for chosen in between.values():
        crossed = _cross([deliveries[i] for i in chosen])
        found |= dict(zip(chosen, crossed, strict=True))
    return [found[i] for i in range(len(deliveries))]


def _cross(deliveries: Sequence[Delivery]) -> list[list[Any]]:
    """Moves values between two stages of different processes, in both directions."""
    ends = deliveries[0].source, deliveries[0].target
    entries = [
        _Entry(number, each.source, value, parcel)
        for number, each in enumerate(deliveries)
        for value, parcel in zip(each.values, each.parcels, strict=True)
    ]
    found: list[list[Any]] = [[] for _ in deliveries]
    received: dict[int, Any] = {}
    for dtype in dict.fromkeys(entry.parcel.dtype for entry in entries):
        chosen = [i for i, e in enumerate(entries) if e.parcel.dtype == dtype]
        there = [i for i in chosen if entries[i].source == ends[0]]
        back = [i for i in chosen if entries[i].source != ends[0]]
        received |= _exchange(entries, _slots(entries, there, back), *ends)
    for i, entry in enumerate(entries):
        found[entry.delivery].append(received[i])
    return found


class _Entry(NamedTuple):
    delivery: int
    source: Mesh
    value: Any
    parcel: Parcel


_Slot = tuple[int | None, int | None]
"""The numbers of two entries of one kind that change places, one for each direction."""


def _slots(
    entries: Sequence[_Entry], there: Sequence[int], back: Sequence[int]
) -> list[_Slot]:
    """Pairs those that go with those that come, where they are of one kind."""
    slots: list[_Slot] = []
    waiting = list(back)
    for i in there:
        alike = [j for j in waiting if entries[j].parcel == entries[i].parcel]
        slots.append((i, alike[0] if alike else None))
        waiting = [j for j in waiting if j not in alike[:1]]
    return [*slots, *((None, j) for j in waiting)]


def _exchange(
    entries: Sequence[_Entry], slots: Sequence[_Slot], first: Mesh, second: Mesh
) -> dict[int, Any]:
    """Sends what is in the slots; returns what this process gets, by its number."""
    pairs = [[None if i is None else entries[i] for i in slot] for slot in slots]
    parcels = tuple(next(e.parcel for e in pair if e) for pair in pairs)
    program, places = _exchange_program(parcels, first, second)
    sent = [
        _paired(pair, parcel, place)
        for pair, parcel, place in zip(pairs, parcels, places, strict=True)
    ]
    received = run_in_order(places[0].mesh, program, *sent)
    found: dict[int, Any] = {}
    for slot, parcel, value in zip(slots, parcels, received, strict=True):
        for i, target in zip(slot, (second, first), strict=True):
            if i is not None:
                is_mine = has_part(target)
                found[i] = _unpaired(value, parcel, target) if is_mine else None
    return found


@cache
def _exchange_program(
    parcels: tuple[Parcel, ...], first: Mesh, second: Mesh
) -> tuple[Any, list[NamedSharding]]:
    devices = np.stack([first.devices, second.devices])
    types = (AxisType.Auto,) * devices.ndim
    mesh = Mesh(devices, (PAIR, *first.axis_names), axis_types=types)
    specs = tuple(_paired_spec(parcel.spec) for parcel in parcels)

    def run(*values: Any) -> tuple[Any, ...]:
        return tuple(_swap(values))

    # Packed with what is split, whole values look split too; they are not.
    options: dict[str, Any] = {
        "in_specs": specs,
        "out_specs": specs,
        "check_vma": False,
    }
    mapped = jax.shard_map(run, mesh=mesh, **options)
    return jax.jit(mapped), [NamedSharding(mesh, spec) for spec in specs]


def _swap(values: Sequence[Any]) -> list[Any]:
    packed = jnp.concatenate([value.reshape(-1) for value in values])
    # Collectives know no truth values.
    numbers = packed.astype(jnp.uint8) if packed.dtype == bool else packed
    passed = jax.lax.ppermute(numbers, PAIR, [(0, 1), (1, 0)]).astype(packed.dtype)
    ends = np.cumsum([value.size for value in values])[:-1]
    parts = jnp.split(passed, ends)
    return [part.reshape(v.shape) for part, v in zip(parts, values, strict=True)]


def _paired_spec(spec: PartitionSpec) -> PartitionSpec:
    first, *rest = tuple(spec) or (None,)
    names = first if isinstance(first, tuple) else (first,)
    return PartitionSpec((PAIR, *(n for n in names if n is not None)), *rest)


def _paired(pair: Sequence[_Entry | None], parcel: Parcel, place: NamedSharding) -> Any:
    """What both stages put into an exchange, along the first dim: one may have none."""
    shape = parcel.shape or (1,)
    whole = (2 * shape[0], *shape[1:])
    local = place.shard_shape(whole)
    given = {
        shard.device: shard.data
        for entry in pair
        if entry is not None and entry.value is not None
        for shard in entry.value.addressable_shards
    }
    shards = [
        given[device].reshape(local)
        if device in given
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
