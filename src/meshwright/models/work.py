"""How much arithmetic a traced program does."""

from collections.abc import Iterator
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
    return sum(flops_of(operation) for operation in jaxpr.eqns)


FLOPS_PER_BYTE = 10
"""Arithmetic that takes as long as moving a byte, by and large."""


def cost_of(operation: Any) -> int:
    """A measure of the time that an operation takes, to compare it with others."""
    if operation.primitive.name == "stop_gradient":
        return 0  # it is not there any more when a program is compiled
    made = sum(_bytes(v) for v in operation.outvars)
    return flops_of(operation) + FLOPS_PER_BYTE * made


def _bytes(variable: Any) -> int:
    return prod(variable.aval.shape) * getattr(variable.aval.dtype, "itemsize", 0)


def all_operations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The operations of a program, and of those inside of it."""
    for operation in jaxpr.eqns:
        yield operation
        for inner in inner_programs(operation):
            yield from all_operations(inner)


def inner_programs(operation: Any) -> list[Jaxpr]:
    """The programs that an operation runs."""
    found = []
    for value in operation.params.values():
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def flops_of(operation: Any) -> int:
    """The floating point operations of one operation, with what is inside of it."""
    inner = inner_programs(operation)
    if inner:
        times = int(operation.params.get("length", 1))
        return times * sum(map(count_flops, inner))
    made = sum(prod(v.aval.shape) for v in operation.outvars)
    return made * _flops_per_number(operation)


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
