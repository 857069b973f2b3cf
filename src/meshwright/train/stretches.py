"""Several steps as one program."""

from collections.abc import Callable
from typing import Any

from meshwright.devices.containers import map_leaves
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.microbatch import Microbatches

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

UNROLLS = (4, 5, 6, 7, 8, 3, 2)
"""How many steps a round of the loop has, the best first; it divides their number.

Rounds cost a few microseconds each, on a GPU more than on a CPU; beyond four there was
nothing to gain.
"""

SMALL_STEP_FLOPS = 10**8
"""Steps up to this size are unrolled; for others the gain is not worth compiling it."""


def put_whole(where: NamedSharding, array: Any) -> jax.Array:
    """Places an array of the host on all devices, also of several processes."""
    host = np.asarray(array)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    if where.is_fully_addressable:
        return jax.device_put(host, where)
    return jax.make_array_from_callback(host.shape, where, host.__getitem__)


def take_batch(cut: Microbatches, mesh: Mesh, data: Any, indices: Any) -> Any:
    """Inside a program: the samples of a batch, placed as those from the host are.

    Arguments:
        cut: The microbatches of the batch.
        mesh: The mesh.
        data: Arrays that are whole on every device.
        indices: Which samples are in the batch.
    """

    def take(indices: Any, size: int, num_stacks: int = 0) -> Any:
        place = BatchSplit(size, mesh).placement(num_stacks)
        indices = jax.lax.with_sharding_constraint(indices, place)
        # Asking whether indices exist would double the time that it takes on a CPU.
        kept = {"mode": "promise_in_bounds"}
        return map_leaves(lambda array: array.at[indices].get(**kept), data)

    if cut.wanted == 1:
        return take(indices, cut.size)
    larger, smaller = cut.cut(indices)
    rest = None if smaller is None else take(smaller, cut.smaller, num_stacks=1)
    return take(larger, cut.larger, num_stacks=1), rest


def run_steps(
    step: Callable[[Any, Any], Any],
    state: Any,
    num_steps: int,
    logs: Any,
    *,
    unrolls: bool,
    of_each: bool,
) -> Any:
    """Inside a program: one step after the other.

    Arguments:
        step: Takes the state and the number of a step, from 0; returns the state and
            logs.
        state: The state before them.
        num_steps: How many there are.
        logs: The shapes of a step's logs.
        unrolls: Whether a round of the loop has several steps.
        of_each: Whether the logs of each step are wanted.

    Returns:
        The logs of the last step, or if wanted a pair of these and those of all steps
        stacked, and the state after them.
    """
    if num_steps == 1:
        state, logs = step(state, 0)
        each = jax.tree.map(lambda log: log[jnp.newaxis], logs)
        return ((logs, each) if of_each else logs), state
    fitting = (n for n in UNROLLS if num_steps % n == 0)
    unroll = next(fitting, 1) if unrolls else 1
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    if of_each:
        state, each = jax.lax.scan(step, state, steps, unroll=unroll)
        return (jax.tree.map(lambda log: log[-1], each), each), state

    def keep_last(carry: Any, number: Any) -> Any:
        return step(carry[0], number), None

    none = jax.tree.map(lambda log: jnp.zeros(log.shape, log.dtype), logs)
    (state, logs), _ = jax.lax.scan(keep_last, (state, none), steps, unroll=unroll)
    return logs, state
