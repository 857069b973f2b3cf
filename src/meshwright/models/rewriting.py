"""A traced program with some of its operations computed in another way."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshwright.models.work import inner_programs

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding

Rule = Callable[..., Any]
"""Takes an operation's inputs and, by name, its parameters; returns its output.

It returns None for what is to stay as it is. The rule of a pair takes the inputs and
the parameters of the first operation, and by name the parameters of the second.
"""

Rules = Mapping[str | tuple[str, str], Rule]
"""By the name of an operation, or of one and of the only one that takes its output."""


def rewritten(
    program: ClosedJaxpr, rules: Rules, mesh: Mesh | None = None
) -> ClosedJaxpr:
    """The same program, with each operation that has a rule as the rule has it.

    It is done on a program that was differentiated already, so that gradients can have
    rules of their own.

    Arguments:
        program: The program.
        rules: Those of operations, and of pairs of them.
        mesh: Devices that take the place of those that the program speaks of, in a
            mesh of the same shape.
    """
    if not _mentions(program.jaxpr, rules, mesh):
        return program

    def run(*args: Any) -> list[Any]:
        return _run(program.jaxpr, program.consts, args, rules, mesh)

    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in program.in_avals]
    return jax.make_jaxpr(run)(*shapes)


def _mentions(jaxpr: Jaxpr, rules: Rules, mesh: Mesh | None) -> bool:
    names = {rule if isinstance(rule, str) else rule[1] for rule in rules}
    names |= set(_ON_DEVICES) if mesh is not None else set()
    return any(
        operation.primitive.name in names
        or any(_mentions(inner, rules, mesh) for inner in _inner_programs(operation))
        for operation in jaxpr.eqns
    )


_ON_DEVICES = ("sharding_constraint", "shard_map")
"""Operations that speak of devices."""

_CLOSED = ("shard_map",)
"""Operations whose inner programs make sense inside of them only."""


def _inner_programs(operation: Any) -> list[Jaxpr]:
    return [] if operation.primitive.name in _CLOSED else inner_programs(operation)


def _run(
    jaxpr: Jaxpr, consts: Any, args: Any, rules: Rules, mesh: Mesh | None
) -> list[Any]:
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))
    # Operations whose output the next one may take over, by that output.
    waiting: dict[Any, Any] = {}

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return variable.val
        if variable in waiting:
            compute(waiting.pop(variable))
        return known[variable]

    def compute(operation: Any) -> None:
        # The names of layers are in there, which errors about memory show.
        name = str(operation.source_info.name_stack)
        with jax.named_scope(name), operation.ctx.manager:
            outputs = _bind_pair(operation, waiting, read, rules)
            if outputs is None:
                inputs = [read(v) for v in operation.invars]
                outputs = _bind(operation, inputs, rules, mesh)
        known.update(zip(operation.outvars, outputs, strict=True))

    firsts = {rule[0] for rule in rules if isinstance(rule, tuple)}
    readers = Counter(v for v in _all_read(jaxpr) if not isinstance(v, Literal))
    for operation in jaxpr.eqns:
        output = operation.outvars[0] if operation.outvars else None
        if operation.primitive.name in firsts and readers[output] == 1:
            waiting[output] = operation
        else:
            compute(operation)
    return [read(v) for v in jaxpr.outvars]


def _all_read(jaxpr: Jaxpr) -> Iterator[Any]:
    """What the operations of a program read, and what it returns."""
    for operation in jaxpr.eqns:
        yield from operation.invars
    yield from jaxpr.outvars


def _bind_pair(
    operation: Any, waiting: Mapping[Any, Any], read: Callable[[Any], Any], rules: Rules
) -> list[Any] | None:
    """What comes out of an operation and the one before it, if there is a rule."""
    variable = operation.invars[0] if operation.invars else None
    before = None if isinstance(variable, Literal) else waiting.get(variable)
    if before is None:
        return None
    rule = rules.get((before.primitive.name, operation.primitive.name))
    if rule is None:
        return None
    inputs = tuple(read(v) for v in before.invars)
    output = rule(inputs, before.params, **operation.params)
    return None if output is None else [output]


def _bind(
    operation: Any, inputs: list[Any], rules: Rules, mesh: Mesh | None
) -> list[Any]:
    rule = rules.get(operation.primitive.name)
    output = None if rule is None else rule(*inputs, **operation.params)
    if output is not None:
        return [output]
    params = dict(operation.params)
    if operation.primitive.name not in _CLOSED:
        params = {k: _rewrite_parameter(v, rules, mesh) for k, v in params.items()}
    if mesh is not None and operation.primitive.name in _ON_DEVICES:
        params = {k: _on_mesh(v, mesh) for k, v in params.items()}
    bound = operation.primitive.get_bind_params(params)
    outputs = operation.primitive.bind(*inputs, **bound)
    return list(outputs) if operation.primitive.multiple_results else [outputs]


def _rewrite_parameter(value: Any, rules: Rules, mesh: Mesh | None) -> Any:
    if isinstance(value, ClosedJaxpr):
        return rewritten(value, rules, mesh)
    if isinstance(value, Jaxpr):
        # Such programs hold no arrays of their own.
        return rewritten(ClosedJaxpr(value, []), rules, mesh).jaxpr
    if isinstance(value, list | tuple) and any(
        isinstance(item, ClosedJaxpr | Jaxpr) for item in value
    ):
        return type(value)(_rewrite_parameter(item, rules, mesh) for item in value)
    return value


def _on_mesh(value: Any, mesh: Mesh) -> Any:
    if isinstance(value, NamedSharding):
        return NamedSharding(mesh, value.spec)
    return mesh if isinstance(value, Mesh) else value
