"""Custom training loops: a function on every replica."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from meshwright.devices.runtime import names_of
from meshwright.errors import PerReplicaError
from meshwright.parallel.batch import batch_axes
from meshwright.parallel.mesh import parts_of, replicated
from meshwright.parallel.per_replica import (
    PerReplica,
    is_per_replica,
    join,
    num_replicas,
)
from meshwright.parallel.plan import AXES
from meshwright.parallel.turns import run_in_turn
from meshwright.strategies.replica_context import as_one_replica, refuse_inside_replica

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Function = Callable[..., Any]

_NUMBERS = (int, float, complex)
"""Python's own numbers; a bool or a member of an enumeration is a choice, not one."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Plain:
    """What is no array, on its way through a compiled function."""

    kind: type
    value: Any


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Empty:
    """An array without elements, on its way out of a replica.

    It is not returned as an array, because XLA refuses the program of its gradient,
    whose arguments would all be without elements.
    """

    shape: tuple[int, ...]
    dtype: Any


def compile_for_replicas(fn: Function, mesh: Mesh) -> Callable[[Any], Any]:
    """A function of the user's, compiled to run on every replica of a mesh."""
    return jax.jit(partial(_run_on_replicas, fn, mesh))


def run(
    fn: Function, args: Any, kwargs: Any, mesh: Mesh, program: Callable[[Function], Any]
) -> Any:
    """See `Strategy.run`; `program` gives a function as it was compiled before."""
    refuse_inside_replica("run")
    _check_call(fn, args, kwargs)
    given = tuple(args), dict(kwargs or {})
    check_values("run", given, mesh)
    inputs = jax.tree.map(partial(_as_input, mesh), given, is_leaf=is_per_replica)
    if _is_traced(inputs):
        # What fn refers to may be traced as well, so nothing of it is kept.
        outputs = compile_for_replicas(fn, mesh)(inputs)
    else:
        # An object that has no hash is known by its method, which has one.
        compiled = program(fn.__call__ if fn.__hash__ is None else fn)
        outputs = run_in_turn(mesh, compiled, inputs)
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, _Plain) else leaf,
        outputs,
        is_leaf=_is_leaf,
    )


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    if not callable(fn):
        raise PerReplicaError(
            f"run received {fn!r} (a {type(fn).__name__}) as fn.",
            "It takes a function.",
            "Pass the function itself, and its arguments in args.",
        )
    if not isinstance(args, tuple | list):
        raise PerReplicaError(
            f"run received args of type {type(args).__name__}.",
            "Positional arguments are a tuple or a list.",
            "Write args=(value,) for one argument.",
        )
    if not isinstance(kwargs, Mapping | None):
        raise PerReplicaError(
            f"run received kwargs of type {type(kwargs).__name__}.",
            "Keyword arguments are a dict.",
            "Write kwargs={'name': value}.",
        )


def _as_input(mesh: Mesh, leaf: Any) -> Any:
    if isinstance(leaf, PerReplica | jax.core.Tracer) or type(leaf) in _NUMBERS:
        return leaf
    if not isinstance(leaf, jax.Array) and hasattr(leaf, "__jax_array__"):
        leaf = leaf.__jax_array__()  # a variable of Keras'
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return _as_plain(leaf)
    if isinstance(leaf, jax.Array) and leaf.devices() == set(mesh.devices.flat):
        return leaf
    return jax.device_put(leaf, replicated(mesh))


def _as_plain(leaf: Any) -> _Plain:
    try:
        hash(leaf)
    except TypeError:
        raise PerReplicaError(
            f"run received {leaf!r} (a {type(leaf).__name__}) as an argument.",
            "What is no array is part of the compiled function, so it has a hash.",
            "Pass a tuple or an array instead, or let fn refer to it by name.",
        ) from None
    return _Plain(type(leaf), leaf)


def check_values(name: str, value: Any, mesh: Mesh) -> None:
    """Raises if a tree has values of the replicas of another strategy."""
    for leaf in jax.tree.leaves(value, is_leaf=is_per_replica):
        if is_per_replica(leaf) and leaf.mesh != mesh:
            raise PerReplicaError(
                f"{name} received values of {leaf.num_replicas} replicas on "
                f"{_describe(leaf.mesh)}.",
                f"This strategy has {num_replicas(mesh)} replicas on "
                f"{_describe(mesh)}, and the values of strategies do not mix.",
                "Use the strategy that the values come from.",
            )


def _describe(mesh: Mesh) -> str:
    degrees = " x ".join(f"{axis}={_degree(mesh, axis)}" for axis in AXES)
    return f"{degrees} ({', '.join(names_of(mesh.devices.flat))})"


def _degree(mesh: Mesh, axis: str) -> int:
    return prod(mesh.shape[part] for part in parts_of(mesh, axis))


def _is_traced(inputs: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inputs))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, PerReplica | _Plain | _Empty)


def _run_on_replicas(fn: Function, mesh: Mesh, inputs: Any) -> Any:
    """Runs a function on all replicas, once for each combination of shapes.

    Each run spans the whole mesh, because one program does not differ between devices.
    If there are several, replicas of other shapes compute what is then thrown away.
    """
    leaves, tree = jax.tree.flatten(inputs, is_leaf=_is_leaf)
    split = [is_per_replica(leaf) for leaf in leaves]
    stops = {num_replicas(mesh)}.union(*(v.stops for v in leaves if is_per_replica(v)))
    view, axes = (mesh, batch_axes(mesh)) if len(stops) == 1 else _renamed(mesh)

    def on_one_replica(rows: list[Any]) -> Any:
        args, kwargs = tree.unflatten(map(_own_part, rows, split))
        with as_one_replica(axes), _explaining_unbound_axes(len(stops)):
            return jax.tree.map(_as_output, fn(*args, **kwargs))

    # Without check_vma each replica differentiates its own part only, and code that
    # knows nothing of replicas (the scan in a recurrent layer) runs as it is.
    program = jax.shard_map(
        on_one_replica,
        mesh=view,
        in_specs=([PartitionSpec(axes) if s else PartitionSpec() for s in split],),
        out_specs=PartitionSpec(axes),
        axis_names=set(axes),
        check_vma=False,
    )
    ordered = sorted(stops)
    results = [program([_stack_at(leaf, s - 1) for leaf in leaves]) for s in ordered]
    return _join_results(results, ordered, mesh)


def _stack_at(leaf: Any, replica: int) -> Any:
    """The stack of a replica's shape; what is not split stays as it is."""
    return leaf.stack_of(replica) if is_per_replica(leaf) else leaf


def _own_part(leaf: Any, is_split: bool) -> Any:
    if isinstance(leaf, _Plain):
        return leaf.value
    return leaf[0] if is_split else leaf


def _renamed(mesh: Mesh) -> tuple[Mesh, tuple[str, ...]]:
    """The same mesh under other names, so that a sum over replicas finds no axis."""
    axes = tuple(f"uneven_{axis}" for axis in batch_axes(mesh))
    names = (*axes, *mesh.axis_names[len(axes) :])
    types = (AxisType.Auto,) * len(names)
    return Mesh(mesh.devices, names, axis_types=types), axes


@contextmanager
def _explaining_unbound_axes(num_shapes: int) -> Iterator[None]:
    try:
        yield
    except NameError as error:
        if num_shapes == 1 or "unbound axis name" not in str(error):
            raise
        raise PerReplicaError(
            f"fn talks to other replicas, in a run over parts of {num_shapes} shapes.",
            "Collectives need equal shapes on all replicas, and a batch that does not "
            "divide by their number gives unequal ones.",
            "Return the value and use strategy.reduce, or make batches that divide. A "
            "replica's number is strategy.replica_id().",
        ) from error


def _as_output(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return _Plain(type(leaf), leaf)
    array = jnp.asarray(leaf)
    return array[None] if array.size else _Empty(array.shape, array.dtype)


def _join_results(results: list[Any], stops: list[int], mesh: Mesh) -> Any:
    """One tree of values per replica out of the results for each shape."""
    flat = [jax.tree.flatten(result, is_leaf=_is_leaf) for result in results]
    trees = [tree for _, tree in flat]
    if any(tree != trees[0] for tree in trees):
        other = next(tree for tree in trees if tree != trees[0])
        raise PerReplicaError(
            f"fn returned {trees[0]} on some replicas and {other} on others.",
            "All replicas return the same structure.",
            "Let the structure of the result not depend on the number of samples.",
        )
    leaves = zip(*(leaves for leaves, _ in flat), strict=True)
    return trees[0].unflatten([_join_leaf(list(leaf), stops, mesh) for leaf in leaves])


def _join_leaf(values: list[Any], stops: list[int], mesh: Mesh) -> Any:
    if isinstance(values[0], _Plain) and all(v == values[0] for v in values):
        return values[0]
    return join([_as_stack(value, mesh) for value in values], stops, mesh)


def _as_stack(value: Any, mesh: Mesh) -> jax.Array:
    """What a replica returned as a stack; numbers that differ become arrays."""
    if isinstance(value, _Empty):
        value = jnp.zeros((num_replicas(mesh), *value.shape), value.dtype)
    if isinstance(value, _Plain):
        if value.kind not in (*_NUMBERS, bool):
            raise PerReplicaError(
                f"fn returned {value.value!r} on some replicas and not on others.",
                "What is neither an array nor a number is the same on all replicas.",
                "Return an array, or the same object on all replicas.",
            )
        value = jnp.full(num_replicas(mesh), np.asarray(value.value))
    free = (PartitionSpec.UNCONSTRAINED,) * (value.ndim - 1)
    where = NamedSharding(mesh, PartitionSpec(batch_axes(mesh), *free))
    return jax.lax.with_sharding_constraint(value, where)


def local_results(value: Any) -> tuple[Any, ...]:
    """See `Strategy.local_results`."""
    leaves, tree = jax.tree.flatten(value, is_leaf=is_per_replica)
    columns = [leaf.values for leaf in leaves if is_per_replica(leaf)]
    if not columns:
        return (value,)
    rows = []
    for row in zip(*columns, strict=True):
        own = iter(row)
        rows.append(
            tree.unflatten([next(own) if is_per_replica(v) else v for v in leaves])
        )
    return tuple(rows)
