"""Where packed members are: a place for each, as many on every device."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from meshwright.devices.runtime import jax_devices
from meshwright.parallel.turns import run_in_turn
from meshwright.trials.packed_members import Members

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "members"
"""The axis of the mesh; members are split along it."""


class Places:
    """The places of the members that are still in training, on all devices.

    There are as many on every device; those that are left over train a copy of the
    last member, at which nobody looks.

    Attributes:
        members: The numbers of the members, in the order of their places.
    """

    def __init__(self, names: Sequence[str], members: Members) -> None:
        number = len(members.random_states)
        devices = [jax_devices()[name] for name in names[:number]]
        self.mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
        self.members = list(range(number))
        self.size = self._rounded(number)
        rows = [min(place, number - 1) for place in range(self.size)]
        put = partial(self._put, rows)
        self.state = tuple(jax.tree.map(put, group) for group in members.state)
        self.fresh_metrics = jax.tree.map(put, members.state[-1])
        self.constants: Any = jax.tree.map(put, members.constants)

    def _rounded(self, number: int) -> int:
        return -(-number // self.mesh.size) * self.mesh.size

    @property
    def over_members(self) -> NamedSharding:
        """The placement of what each member has its own of."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @property
    def whole(self) -> NamedSharding:
        """The placement of what all members share."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_order(self, order: "np.ndarray[Any, Any]") -> jax.Array:
        """Puts the order of all members, or one for each, where it is used."""
        if order.ndim == 1:
            return jax.device_put(order, self.whole)
        rows = [min(place, len(order) - 1) for place in range(self.size)]
        return self._put(rows, order)

    def _put(self, rows: Sequence[int], values: Any) -> jax.Array:
        return jax.device_put(values[np.asarray(rows)], self.over_members)

    def leave(self, members: Sequence[int]) -> None:
        """Takes members out; their places go once half of all would be empty.

        Fewer places are other programs, which are compiled anew.
        """
        kept = [m for m in self.members if m not in set(members)]
        size = self._rounded(len(kept))
        if not kept or 2 * size > self.size:
            return
        rows = [self.members.index(m) for m in kept]
        rows += [rows[-1]] * (size - len(rows))
        state = self.state, self.fresh_metrics, self.constants
        taken = self._take(state, jnp.asarray(rows, jnp.int32))
        self.state, self.fresh_metrics, self.constants = taken
        self.members, self.size = kept, size

    def _take(self, tree: Any, rows: jax.Array) -> Any:
        take = jax.jit(
            lambda tree: jax.tree.map(lambda array: array[rows], tree),
            out_shardings=self.over_members,
        )
        return run_in_turn(self.mesh, take, tree)
