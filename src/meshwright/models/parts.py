"""A traced program in parts that run on different devices.

Which operation belongs to which part is decided elsewhere; here is what then passes
between the parts, and each part as a function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

Owners = Sequence[frozenset[int]]
"""For each operation, the parts that compute it; none if nobody needs it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part computes."""

    operations: tuple[Any, ...]
    arguments: tuple[int, ...]
    """Inputs of the program that it reads, by number."""
    received: tuple[Var, ...]
    """Values that it reads and other parts make."""
    sent: tuple[Var, ...]
    """Values that it makes and other parts read."""
    results: tuple[int, ...]
    """Outputs of the program that it makes, by number."""


def split_program(program: ClosedJaxpr, owners: Owners, num_parts: int) -> list[Part]:
    """The parts of a program, in order.

    What is computed by one part only is sent to the others that read it; what is
    computed by several is there wherever it is read.
    """
    jaxpr = program.jaxpr
    maker = {
        v: next(iter(owner))
        for operation, owner in zip(jaxpr.eqns, owners, strict=True)
        for v in operation.outvars
        if len(owner) == 1
    }
    blocks = [_operations_of(jaxpr, owners, number) for number in range(num_parts)]
    read = [_read_from_outside(block) for block in blocks]
    made = [{v for op in block for v in op.outvars} for block in blocks]
    received = [[v for v in each if v in maker] for each in read]
    wanted = {v for each in received for v in each}
    numbers = {v: i for i, v in enumerate(jaxpr.invars)}
    return [
        Part(
            operations=tuple(blocks[part]),
            arguments=tuple(numbers[v] for v in read[part] if v in numbers),
            received=tuple(received[part]),
            sent=tuple(
                v
                for op in blocks[part]
                for v in op.outvars
                if v in wanted and maker[v] == part
            ),
            results=_results_of(jaxpr, made, part),
        )
        for part in range(num_parts)
    ]


def _operations_of(jaxpr: Jaxpr, owners: Owners, part: int) -> list[Any]:
    pairs = zip(jaxpr.eqns, owners, strict=True)
    return [operation for operation, owner in pairs if part in owner]


def _read_from_outside(block: list[Any]) -> list[Var]:
    made = {v for operation in block for v in operation.outvars}
    used = [v for op in block for v in op.invars if isinstance(v, Var)]
    return [v for v in dict.fromkeys(used) if v not in made]


def _results_of(jaxpr: Jaxpr, made: list[set[Any]], part: int) -> tuple[int, ...]:
    return tuple(n for n, v in enumerate(jaxpr.outvars) if _is_in(v, made[part]))


def _is_in(atom: Any, made: set[Any]) -> bool:
    return isinstance(atom, Var) and atom in made


def as_function(
    program: ClosedJaxpr, part: Part, inputs: Sequence[Var], outputs: Sequence[Var]
) -> Callable[..., list[Any]]:
    """A part as a function of some values to others."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    wanted = set(_read_from_outside(list(part.operations)))
    wanted |= {v for v in outputs if isinstance(v, Var)}
    used = [v for v in jaxpr.constvars if v in wanted]
    names = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    inner = jaxpr.replace(
        constvars=used,
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(part.operations),
        debug_info=names,
    )
    # Constants of the host belong to no device.
    consts = [_on_host(values[v]) for v in used]
    return jaxpr_as_fun(ClosedJaxpr(inner, consts))


def _on_host(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
    return value if is_key else np.asarray(value)


def in_halves(
    program: ClosedJaxpr, early: Sequence[int]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A program as two: what some outputs need, and the rest.

    Arguments:
        program: The program.
        early: Numbers of the outputs that the first half makes.

    Returns:
        A function of the inputs that returns the early outputs and a list of what the
        other half wants of it, and one of the inputs and that list that returns the
        other outputs.
    """
    jaxpr = program.jaxpr
    late = [n for n in range(len(jaxpr.outvars)) if n not in early]
    first = _needed_for(jaxpr, [jaxpr.outvars[n] for n in early])
    is_first = [number in first for number in range(len(jaxpr.eqns))]
    owners = [frozenset({0 if each else 1}) for each in is_first]
    before, after = split_program(program, owners, 2)
    made = {v for operation in before.operations for v in operation.outvars}
    wanted = [jaxpr.outvars[n] for n in late if _is_in(jaxpr.outvars[n], made)]
    between = list(dict.fromkeys((*before.sent, *wanted)))
    outputs = [jaxpr.outvars[n] for n in early]
    begin = as_function(program, before, jaxpr.invars, [*outputs, *between])
    inputs = [*jaxpr.invars, *between]
    end = as_function(program, after, inputs, [jaxpr.outvars[n] for n in late])

    def run_first(*args: Any) -> tuple[list[Any], list[Any]]:
        values = begin(*args)
        return values[: len(early)], values[len(early) :]

    return run_first, lambda args, between: end(*args, *between)


def _needed_for(jaxpr: Jaxpr, outputs: Sequence[Any]) -> set[int]:
    """The operations that some values depend on, by number."""
    wanted = {v for v in outputs if isinstance(v, Var)}
    found = set()
    for number in reversed(range(len(jaxpr.eqns))):
        operation = jaxpr.eqns[number]
        if any(v in wanted for v in operation.outvars):
            found.add(number)
            wanted |= {v for v in operation.invars if isinstance(v, Var)}
    return found


def bytes_of(variable: Any) -> int:
    """The size of a value; keys of random numbers count nothing."""
    aval: Any = variable.aval
    if isinstance(variable, Literal) or not hasattr(aval, "dtype"):
        return 0
    if is_key(variable):
        return 0
    return int(aval.size) * int(aval.dtype.itemsize)


def is_key(variable: Any) -> bool:
    """Whether a value is a key of random numbers."""
    return bool(jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended))


def is_inexact(variable: Any) -> bool:
    """Whether a value has a gradient."""
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))
