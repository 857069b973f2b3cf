"""A function run in blocks whose inside is computed again for the gradients.

The function is traced to a jaxpr, which is a straight line of operations whatever the
model looked like; the line is cut where the least is alive.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from meshwright.models.cuts import choose_cuts
from meshwright.models.formulations import Platform

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

Operations = Sequence[Any]
"""Equations of a jaxpr, in order."""

_JAX_FOR_CPUS = (0, 11, 1)
"""From this version of JAX on, XLA for CPUs keeps blocks apart as well."""


def keeps_blocks_apart(platform: Platform) -> bool:
    """Whether XLA keeps only what passes between blocks.

    Before, its compiler for CPUs found what is computed twice; it kept that, and mostly
    computed it again nevertheless.
    """
    return platform != "cpu" or jax.__version_info__ >= _JAX_FOR_CPUS


def rematerialised(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; only what passes between its blocks is kept for gradients.

    Weights that are gathered from other devices (a sharding constraint on an argument)
    are gathered again in every block that uses them, so that no more of them than one
    block needs are alive at a time.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        values = _run_in_blocks(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return run


def _run_in_blocks(closed: ClosedJaxpr, args: list[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    gathers, operations = _set_gathers_apart(jaxpr)
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))
    ends = [0, *_cuts(jaxpr, operations), len(operations)]
    for start, end in pairwise(ends):
        needed = _variables_of(operations[end:]) | _only_variables(jaxpr.outvars)
        block = _gathered(operations[start:end], gathers)
        produced = [v for op in block for v in op.outvars if v in needed]
        taken = _inputs_of(block)
        run = jax.checkpoint(_as_function(jaxpr, block, taken, produced))
        known |= dict(zip(produced, run(*[known[v] for v in taken]), strict=True))
    return [v.val if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]


def _cuts(jaxpr: Jaxpr, operations: Operations) -> list[int]:
    produced = [sum(_bytes(v) for v in op.outvars) for op in operations]
    last_use = {v: i for i, op in enumerate(operations) for v in _variables_of([op])}
    last_use |= dict.fromkeys(_only_variables(jaxpr.outvars), len(operations))
    # Adds a value where it is made, and takes it away after its last use.
    changes = [0] * (len(operations) + 2)
    for i, operation in enumerate(operations):
        for variable in operation.outvars:
            if variable in last_use:
                changes[i + 1] += _bytes(variable)
                changes[last_use[variable] + 1] -= _bytes(variable)
    alive, now = [], 0
    for change in changes[: len(operations)]:
        now += change
        alive.append(now)
    return choose_cuts(produced, alive)


def _set_gathers_apart(jaxpr: Jaxpr) -> tuple[dict[Var, Any], list[Any]]:
    given, gathers, rest = set(jaxpr.invars), dict[Var, Any](), list[Any]()
    kept = _only_variables(jaxpr.outvars)
    for operation in jaxpr.eqns:
        is_gather = operation.primitive.name == "sharding_constraint"
        is_free = is_gather and operation.invars[0] in given
        if is_free and operation.outvars[0] not in kept:
            gathers[operation.outvars[0]] = operation
        else:
            rest.append(operation)
    return gathers, rest


def _gathered(block: Operations, gathers: dict[Var, Any]) -> list[Any]:
    """The block, with what it uses gathered first."""
    return [gathers[v] for v in _inputs_of(block) if v in gathers] + list(block)


def _inputs_of(block: Operations) -> list[Var]:
    made = {v for operation in block for v in operation.outvars}
    used = [v for op in block for v in op.invars if isinstance(v, Var)]
    return [v for v in dict.fromkeys(used) if v not in made]


def _variables_of(operations: Operations) -> set[Var]:
    return {v for op in operations for v in op.invars if isinstance(v, Var)}


def _only_variables(atoms: Sequence[Any]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _as_function(
    jaxpr: Jaxpr, block: Operations, taken: list[Var], produced: list[Var]
) -> Callable[..., list[Any]]:
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    part = jaxpr.replace(
        constvars=[],
        invars=taken,
        outvars=produced,
        eqns=list(block),
        debug_info=names,
    )
    return jaxpr_as_fun(ClosedJaxpr(part, []))


def _bytes(variable: Var) -> int:
    aval: Any = variable.aval
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0  # keys of random numbers
    return int(aval.size) * int(aval.dtype.itemsize)
