"""One value out of one per replica: sums, means and concatenations."""

from functools import partial
from itertools import groupby
from typing import Any, Literal, get_args

from meshwright.errors import PerReplicaError
from meshwright.parallel.mesh import replicated
from meshwright.parallel.per_replica import PerReplica, is_per_replica, rows_between

import jax
import jax.numpy as jnp
import numpy as np

Op = Literal["SUM", "MEAN"]


def reduce_values(op: str, value: Any, axis: int | None) -> Any:
    """Sums or means over the replicas, and along a dim of their values if one is named.

    Every element counts once, however many a replica has of them. The results are whole
    on every device.
    """
    chosen = _checked_op(op)
    leaves, tree = jax.tree.flatten(value, is_leaf=is_per_replica)
    for leaf in leaves:
        if is_per_replica(leaf):
            _check_reduction(leaf, axis)
        elif chosen == "SUM":
            raise PerReplicaError(
                f"reduce('SUM') received {leaf!r} (a {type(leaf).__name__}), which is "
                "not one value per replica.",
                "A sum over replicas of what all of them share would depend on their "
                "number.",
                "Pass what strategy.run returned, or use 'MEAN', which leaves it as it "
                "is.",
            )
        elif axis is not None:
            _check_axis("reduce", axis, [np.shape(leaf)])
    reduced = iter(_reduced([v for v in leaves if is_per_replica(v)], chosen, axis))
    return tree.unflatten(
        [
            next(reduced) if is_per_replica(v) else _mean_of_plain(v, axis)
            for v in leaves
        ]
    )


def gather_values(value: Any, axis: int) -> Any:
    """Concatenates the values of all replicas, in order; the results are whole."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_per_replica)
    for leaf in leaves:
        if is_per_replica(leaf):
            _check_gathering(leaf, axis)
    gathered = iter(_gathered([v for v in leaves if is_per_replica(v)], axis))
    return tree.unflatten([next(gathered) if is_per_replica(v) else v for v in leaves])


def _checked_op(op: Any) -> Op:
    for known in get_args(Op):
        if isinstance(op, str) and op.upper() == known:
            return known
    raise PerReplicaError(
        f"reduce received {op!r} as op.",
        "Values are reduced by 'SUM' or by 'MEAN'.",
        "Use one of these, or compute with strategy.local_results(value).",
    )


def _check_reduction(value: PerReplica, axis: int | None) -> None:
    if axis is None and len(set(value.shapes)) > 1:
        raise PerReplicaError(
            f"reduce received values of unequal shapes: {_by_replica(value)}.",
            "With axis=None values are added element by element, so their shapes are "
            "equal.",
            "Pass the dim of the samples, as in axis=0, to reduce along it too.",
        )
    if axis is not None:
        _check_axis("reduce", axis, value.shapes)
        _check_other_dims("reduce", value, axis)


def _check_gathering(value: PerReplica, axis: int) -> None:
    if () in value.shapes:
        raise PerReplicaError(
            f"gather received scalars: {_by_replica(value)}.",
            "Values are concatenated along a dim, and a scalar has none.",
            "Use strategy.reduce, or return value[None] from fn.",
        )
    _check_axis("gather", axis, value.shapes)
    _check_other_dims("gather", value, axis)


def _check_axis(name: str, axis: Any, shapes: Any) -> None:
    num_dims = min(len(shape) for shape in shapes)
    is_number = isinstance(axis, int) and not isinstance(axis, bool)
    if not is_number or not -num_dims <= axis < num_dims:
        raise PerReplicaError(
            f"{name} received axis={axis!r} for values of shape {shapes[0]}.",
            f"The axis is a dim of the values, which have {num_dims}.",
            f"Use a whole number from {-num_dims} to {num_dims - 1}."
            if num_dims
            else "Use axis=None.",
        )


def _check_other_dims(name: str, value: PerReplica, axis: int) -> None:
    others = {(*np.delete(shape, axis), len(shape)) for shape in value.shapes}
    if len(others) > 1:
        raise PerReplicaError(
            f"{name} received values whose shapes do not fit along axis={axis}: "
            f"{_by_replica(value)}.",
            "Only the dim that is named may differ between replicas.",
            "Name the dim that differs, or make the others equal inside fn.",
        )


def _by_replica(value: PerReplica) -> str:
    """The shapes in words, with the replicas that have them."""
    texts = []
    for shape, same in groupby(enumerate(value.shapes), key=lambda pair: pair[1]):
        numbers = [number for number, _ in same]
        first, last = numbers[0], numbers[-1]
        where = f"replica {first}" if first == last else f"replicas {first} to {last}"
        texts.append(f"{shape} on {where}")
    return ", ".join(texts)


def _mean_of_plain(value: Any, axis: int | None) -> Any:
    return value if axis is None else jnp.mean(jnp.asarray(value), axis)


@partial(jax.jit, static_argnames=("op", "axis"))
def _reduced(values: list[PerReplica], op: Op, axis: int | None) -> list[jax.Array]:
    return [_reduce_one(value, op, axis) for value in values]


def _reduce_one(value: PerReplica, op: Op, axis: int | None) -> jax.Array:
    total: Any = 0
    count = 0
    for stack, start, stop in value.parts():
        dim = None if axis is None else 1 + axis % (stack.ndim - 1)
        own = stack
        if stop - start < value.num_replicas:
            own = jnp.where(rows_between(stack, start, stop), stack, 0)
        total += jnp.sum(_widened(own), 0 if dim is None else (0, dim))
        count += (stop - start) * (1 if dim is None else stack.shape[dim])
    if op == "MEAN":
        total = total / count
    if jnp.issubdtype(value.stacks[0].dtype, jnp.inexact):
        total = total.astype(value.stacks[0].dtype)
    return jax.lax.with_sharding_constraint(total, replicated(value.mesh))


def _widened(array: jax.Array) -> jax.Array:
    """Floats of 16 bits as 32: a sum may overflow although the mean does not."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


@partial(jax.jit, static_argnames="axis")
def _gathered(values: list[PerReplica], axis: int) -> list[jax.Array]:
    return [_gather_one(value, axis) for value in values]


def _gather_one(value: PerReplica, axis: int) -> jax.Array:
    whole = replicated(value.mesh)
    pieces = []
    for stack, start, stop in value.parts():
        rows = jax.lax.with_sharding_constraint(stack, whole)[start:stop]
        pieces += [rows[i] for i in range(stop - start)]
    return jax.lax.with_sharding_constraint(jnp.concatenate(pieces, axis), whole)
