"""The mesh of a Plan: named devices in the shape of its degrees."""

from math import isqrt
from typing import Any

from meshwright.devices.runtime import jax_devices_of_all
from meshwright.parallel.plan import AXES, Plan, Spec

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

STAGES = "stages"
"""The axis of a mesh along which its pipeline stages lie; the outermost."""


def make_mesh(plan: Plan, names: tuple[str, ...]) -> Mesh:
    """Arranges devices, which must exist, as the plan wants them.

    An axis has one part for each prime factor of its degree, so that batches can be
    split along some of them: `data=4` becomes `data_0=2` and `data_1=2`. One program
    has one mesh, whatever the size of its batch.
    """
    available = jax_devices_of_all()
    shape = {name: size for axis in AXES for name, size in _parts(plan, axis)}
    if plan.stages > 1:
        shape = {STAGES: plan.stages} | shape
    devices = np.array([available[name] for name in names], dtype=object)
    types = (AxisType.Auto,) * len(shape)
    return Mesh(devices.reshape(*shape.values()), tuple(shape), axis_types=types)


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """The devices of each stage, as meshes of the remaining axes."""
    if STAGES not in mesh.axis_names:
        return [mesh]
    names = mesh.axis_names[1:]
    types = (AxisType.Auto,) * len(names)
    return [Mesh(devices, names, axis_types=types) for devices in mesh.devices]


def _parts(plan: Plan, axis: str) -> list[tuple[str, int]]:
    factors = prime_factors(getattr(plan, axis))
    if len(factors) < 2:
        return [(axis, factors[0] if factors else 1)]
    return [(f"{axis}_{i}", factor) for i, factor in enumerate(factors)]


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number, the smallest first.

    >>> prime_factors(12)
    [2, 2, 3]
    """
    for factor in range(2, isqrt(number) + 1):
        if number % factor == 0:
            return [factor, *prime_factors(number // factor)]
    return [number] if number > 1 else []


def parts_of(mesh: Mesh, *axes: str) -> tuple[str, ...]:
    """The names under which axes of a plan are in a mesh."""
    return tuple(name for name in mesh.axis_names if _axis_of(name) in axes)


def _axis_of(name: str) -> str:
    return name.partition("_")[0]


def sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    """The placement of an array whose dims are split as `spec` says."""
    parts = [None if axis is None else parts_of(mesh, axis) for axis in spec]
    return NamedSharding(mesh, PartitionSpec(*parts))


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def on_host(placement: NamedSharding) -> NamedSharding:
    """The same split, in the memory of the hosts that the devices are in."""
    return placement.with_memory_kind("pinned_host")


def on_devices(placement: NamedSharding) -> NamedSharding:
    """The same split, in the devices' own memory."""
    return placement.with_memory_kind("device")


def placed_shape(shape: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape and type of an array, or of something like it, in a place."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)


def gathered(placement: NamedSharding) -> NamedSharding:
    """The placement of a weight while it is used: whole over the axis `fsdp`."""
    fsdp = set(parts_of(placement.mesh, "fsdp"))
    spec = [None if fsdp & set(_names(dim)) else dim for dim in placement.spec]
    return NamedSharding(placement.mesh, PartitionSpec(*spec))


def _names(dim: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else dim
