"""How much arithmetic a traced program does."""

from math import prod
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(program: ClosedJaxpr | Jaxpr) -> int:
    """The floating point operations of the matrix products and convolutions.

    They are nearly all of it in most models; what is done element by element is counted
    as one operation for each number that is made.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> matrix = jnp.ones((10, 10))
    >>> count_flops(jax.make_jaxpr(jnp.matmul)(matrix, matrix))
    2000
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    return sum(_flops(operation) for operation in jaxpr.eqns)


def _flops(operation: Any) -> int:
    inner = [p for p in _all_parameters(operation) if isinstance(p, _PROGRAMS)]
    if inner:
        times = int(operation.params.get("length", 1))
        return times * sum(map(count_flops, inner))
    made = sum(prod(v.aval.shape) for v in operation.outvars)
    return made * _flops_per_number(operation)


_PROGRAMS = (ClosedJaxpr, Jaxpr)


def _all_parameters(operation: Any) -> list[Any]:
    found: list[Any] = []
    for value in operation.params.values():
        found += value if isinstance(value, list | tuple) else [value]
    return found


def _flops_per_number(operation: Any) -> int:
    if operation.primitive.name == "dot_general":
        (contracted, _), _ = operation.params["dimension_numbers"]
        shape = operation.invars[0].aval.shape
        return 2 * prod(shape[dim] for dim in contracted)
    if operation.primitive.name == "conv_general_dilated":
        kernel = operation.invars[1].aval.shape
        made = operation.params["dimension_numbers"].rhs_spec[0]
        return 2 * prod(kernel) // kernel[made]
    return 1
