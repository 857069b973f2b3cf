"""How much arithmetic a program does, and how many steps are dispatched together."""

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


STRETCH_SECONDS = 0.02
STRETCH_SECONDS_ON_CPU = 1.0
"""About how long steps that are dispatched together take.

Long enough to hide what a dispatch costs, short enough for a progress bar to move and
for Ctrl-C to be heard. On CPUs every program gets its memory anew from the operating
system, page by page, which took 30 of 160 ms of a step of the reference CNN.
"""

MOST_STEPS = 512
"""More of them gain nothing."""

CPU_FLOPS_PER_CORE = 2e10
ACCELERATOR_FLOPS = 5e13
SECONDS_PER_OPERATION = 1e-7
"""Rough speeds: a guess that is wrong by a factor of five still does its work."""


def guess_seconds(flops: float, num_operations: int, cores: int | None) -> float:
    """A guess of the time that a step takes on so many cores, or on an accelerator."""
    speed = CPU_FLOPS_PER_CORE * cores if cores else ACCELERATOR_FLOPS
    return flops / speed + num_operations * SECONDS_PER_OPERATION


def steps_in_stretch(seconds: float, *, on_cpu: bool, most: int = MOST_STEPS) -> int:
    """How many steps of such a time are dispatched together.

    >>> steps_in_stretch(0.3, on_cpu=True), steps_in_stretch(0.3, on_cpu=False)
    (3, 1)
    """
    longest = STRETCH_SECONDS_ON_CPU if on_cpu else STRETCH_SECONDS
    return min(max(round(longest / seconds), 1), most)


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
    if operation.primitive.name in _CUDNN_CALLS:
        return _flops_of_library(operation)
    made = sum(prod(v.aval.shape) for v in operation.outvars)
    return made * _flops_per_number(operation)


_CUDNN_CALLS = {"rnn_fwd": (0, 3, 2), "rnn_bwd": (3, 6, 4)}
"""Calls of cuDNN: where inputs and weights are, and what is done with each weight."""


def _flops_of_library(operation: Any) -> int:
    x, weights, for_each = _CUDNN_CALLS[operation.primitive.name]
    samples, length, _ = operation.invars[x].aval.shape
    return for_each * int(samples * length * prod(operation.invars[weights].aval.shape))


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
