"""A traced program without programs inside of it, as far as that goes."""

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

_CALLS = ("jit", "pjit", "closed_call", "core_call")


def inlined(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, with calls and branches replaced by what is in them.

    Both branches are computed, and then one is chosen, so that what is done to one
    weight stands apart from what is done to another.
    """

    def run(*args: Any) -> list[Any]:
        return _run(program, args)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    return jax.make_jaxpr(run)(*shapes)


def _run(program: ClosedJaxpr, args: Any) -> list[Any]:
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else known[v]

    for operation in jaxpr.eqns:
        inputs = [read(v) for v in operation.invars]
        name, params = operation.primitive.name, operation.params
        if name in _CALLS:
            inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
            outputs = _run(inner, inputs)
        elif name == "cond":
            outputs = _choose(params["branches"], *inputs)
        else:
            one = jaxpr.replace(
                constvars=[],
                invars=[v for v in operation.invars if not isinstance(v, Literal)],
                outvars=operation.outvars,
                eqns=[operation],
                debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
            )
            given = [v for v in operation.invars if not isinstance(v, Literal)]
            outputs = jaxpr_as_fun(ClosedJaxpr(one, []))(*[known[v] for v in given])
        known.update(zip(operation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _choose(branches: tuple[ClosedJaxpr, ...], which: Any, *args: Any) -> list[Any]:
    every = [_run(branch, args) for branch in branches]
    index = jax.lax.clamp(0, which, len(branches) - 1)
    return [
        jax.lax.select_n(index if len(branches) > 2 else index > 0, *options)
        for options in zip(*every, strict=True)
    ]
