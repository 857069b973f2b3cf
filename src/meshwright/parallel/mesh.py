"""The mesh of a Plan: named devices in the shape of its degrees."""

from meshwright.devices.runtime import jax_devices_of_all
from meshwright.parallel.plan import AXES, Plan, Spec

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh(plan: Plan, names: tuple[str, ...]) -> Mesh:
    """Arranges devices, which must exist, as the plan wants them."""
    available = jax_devices_of_all()
    shape = tuple(getattr(plan, axis) for axis in AXES)
    grid = np.array([available[name] for name in names], dtype=object).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    """The placement of an array whose dims are split as `spec` says."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def replicated(mesh: Mesh) -> NamedSharding:
    """The placement of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def gathered(placement: NamedSharding) -> NamedSharding:
    """The placement of a weight while it is used: whole over the axis `fsdp`."""
    spec = [None if axis == "fsdp" else axis for axis in placement.spec]
    return NamedSharding(placement.mesh, PartitionSpec(*spec))
