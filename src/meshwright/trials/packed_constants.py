"""What two traced programs differ in: constants alone, or more than that.

A program is read into rows, one for each operation, and the constants apart from them.
Programs of equal rows do the same with other numbers, so one of them can stand for all
if the numbers that differ become inputs.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from meshwright.errors import PackedTrialsError
from meshwright.models.loops import counts_of_scan

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}
"""Operations that only call a program, and the parameter that holds it."""


class Row(NamedTuple):
    """An operation without its constants."""

    name: str
    inputs: tuple[Any, ...]
    """Numbers of variables, and the types of constants."""
    outputs: tuple[Any, ...]
    parameters: tuple[Any, ...]
    layer: str
    """Where in the model it is; not compared."""

    def is_like(self, other: "Row") -> bool:
        """Whether it does the same, apart from constants."""
        return self[:4] == other[:4]

    def __str__(self) -> str:
        if not self.parameters and self.name in ("inputs", "outputs"):
            return self.name
        types = ", ".join(map(_show_type, self.outputs))
        return f"{self.name} -> {types}" + (f" in {self.layer}" if self.layer else "")


class Reading(NamedTuple):
    """A program as rows and constants."""

    rows: tuple[Row, ...]
    constants: tuple[Any, ...]


def read_program(program: ClosedJaxpr) -> Reading:
    """Reads a program; calls are read through."""
    reader = _Reader()
    reader.read_closed(program)
    return Reading(tuple(reader.rows), tuple(reader.constants))


class _Reader:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.constants: list[Any] = []

    def read_closed(self, program: ClosedJaxpr) -> None:
        self.constants += program.consts
        self.read(program.jaxpr)

    def read(self, jaxpr: Jaxpr) -> None:
        numbers: dict[Any, int] = {}
        given = (*jaxpr.constvars, *jaxpr.invars)
        self._add("inputs", (), self._number(numbers, given), ())
        for operation in jaxpr.eqns:
            inputs = self._refer(numbers, operation.invars)
            name, params = operation.primitive.name, operation.params
            inner = _CALLS.get(name)
            chosen = params.items() if inner is None else [(inner, params[inner])]
            ordered = sorted(chosen)
            outputs = self._number(numbers, operation.outvars)
            where = str(operation.source_info.name_stack)
            # The row comes before those of the programs in its parameters.
            place = len(self.rows)
            parameters = tuple((key, self._parameter(value)) for key, value in ordered)
            self.rows.insert(place, Row(name, inputs, outputs, parameters, where))
        self._add("outputs", self._refer(numbers, jaxpr.outvars), (), ())

    def _add(self, name: str, inputs: Any, outputs: Any, parameters: Any) -> None:
        self.rows.append(Row(name, inputs, outputs, parameters, ""))

    def _number(self, numbers: dict[Any, int], variables: Sequence[Any]) -> Any:
        for variable in variables:
            numbers[variable] = len(numbers)
        return tuple(_type_of(variable.aval) for variable in variables)

    def _refer(self, numbers: dict[Any, int], variables: Sequence[Any]) -> Any:
        return tuple(self._reference(numbers, variable) for variable in variables)

    def _reference(self, numbers: dict[Any, int], variable: Any) -> Any:
        if not isinstance(variable, Literal):
            return numbers[variable]
        self.constants.append(np.asarray(variable.val, variable.aval.dtype))
        return _type_of(variable.aval)

    def _parameter(self, value: Any) -> Any:
        """A parameter as something that can be compared."""
        if isinstance(value, ClosedJaxpr):
            self.read_closed(value)
            return "program"
        if isinstance(value, Jaxpr):
            self.read(value)
            return "program"
        if isinstance(value, list | tuple):
            return tuple(self._parameter(item) for item in value)
        if isinstance(value, np.ndarray | jax.Array):
            return _bits(value)
        return value


def _type_of(aval: Any) -> Any:
    return (tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", str(aval)))


def _show_type(found: Any) -> str:
    shape, dtype = found
    return f"{dtype}[{','.join(map(str, shape))}]"


def _bits(value: Any) -> Any:
    """An array as something that can be compared, NaN included."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    host = np.asarray(value)
    return host.shape, host.dtype, host.tobytes()


def first_difference(one: Reading, other: Reading) -> tuple[Any, Any] | None:
    """The first rows in which two programs differ by more than constants."""
    for mine, its in zip_longest(one.rows, other.rows):
        if mine is None or its is None or not mine.is_like(its):
            return mine or "its end", its or "its end"
    return None


def differing(constants: Sequence[Sequence[Any]]) -> dict[int, list[Any]]:
    """The constants that are not the same in all, by number: that of each program.

    Arguments:
        constants: Those of programs whose rows are the same.
    """
    columns = zip(*constants, strict=True)
    return {
        number: list(column)
        for number, column in enumerate(columns)
        if not _are_same(column)
    }


def _are_same(values: Sequence[Any]) -> bool:
    first, *others = values
    if all(value is first for value in others):
        return True
    bits = _bits(first)
    return all(_bits(value) == bits for value in others)


def run_program(program: ClosedJaxpr, args: Sequence[Any], inputs: Any) -> list[Any]:
    """Runs a program with other constants, inside of another one.

    Arguments:
        program: The program.
        args: Its arguments.
        inputs: Values of constants by their number; others are as they are.
    """
    constants: list[Any] = [None] * len(read_program(program).constants)
    for number, value in inputs.items():
        constants[number] = value
    return _run_closed(program, args, constants)


def _run_closed(
    program: ClosedJaxpr, args: Sequence[Any], constants: Sequence[Any]
) -> list[Any]:
    left = iter(constants)
    consts = [_choose(next(left), const) for const in program.consts]
    return _run(program.jaxpr, consts, args, left)


def _choose(given: Any, own: Any) -> Any:
    return own if given is None else given


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], left: Iterator[Any]
) -> list[Any]:
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(variable: Any) -> Any:
        if isinstance(variable, Literal):
            return _choose(next(left), variable.val)
        return known[variable]

    for operation in jaxpr.eqns:
        inputs = [read(v) for v in operation.invars]
        name = str(operation.source_info.name_stack)
        with jax.named_scope(name), operation.ctx.manager:
            outputs = _bind(operation, inputs, left)
        known.update(zip(operation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _bind(operation: Any, inputs: list[Any], left: Iterator[Any]) -> list[Any]:
    name, params = operation.primitive.name, operation.params
    if name in _CALLS:
        inner = params[_CALLS[name]]
        if isinstance(inner, ClosedJaxpr):
            consts = [_choose(next(left), const) for const in inner.consts]
            return _run(inner.jaxpr, consts, inputs, left)
        return _run(inner, [], inputs, left)
    own = {key: _take_own(params[key], left) for key in sorted(params)}
    if any(_is_changed(constants) for constants in own.values()):
        return _loop_of(name)(inputs, params, own)
    bound = operation.primitive.get_bind_params(params)
    outputs = operation.primitive.bind(*inputs, **bound)
    return list(outputs) if operation.primitive.multiple_results else [outputs]


def _take_own(value: Any, left: Iterator[Any]) -> list[Any]:
    """The constants of the programs in a parameter; one list for each in a tuple."""
    if isinstance(value, list | tuple):
        return [_take_own(item, left) for item in value]
    reader = _Reader()
    reader._parameter(value)
    return [next(left) for _ in reader.constants]


def _is_changed(constants: Any) -> bool:
    if isinstance(constants, list):
        return any(map(_is_changed, constants))
    return constants is not None


def _scan(inputs: list[Any], params: Any, own: Any) -> list[Any]:
    start, number = counts_of_scan(params)
    end = start + number
    fixed = inputs[:start]

    def body(carry: Any, each: Any) -> Any:
        args = [*fixed, *carry, *each]
        outputs = _run_closed(params["jaxpr"], args, own["jaxpr"])
        return outputs[: len(carry)], outputs[len(carry) :]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, each = jax.lax.scan(body, inputs[start:end], inputs[end:], **options)
    return [*carry, *each]


def _while(inputs: list[Any], params: Any, own: Any) -> list[Any]:
    start = params["cond_nconsts"]
    end = start + params["body_nconsts"]
    for_test, for_body = inputs[:start], inputs[start:end]

    def test(carry: Any) -> Any:
        args = [*for_test, *carry]
        return _run_closed(params["cond_jaxpr"], args, own["cond_jaxpr"])[0]

    def body(carry: Any) -> Any:
        args = [*for_body, *carry]
        return _run_closed(params["body_jaxpr"], args, own["body_jaxpr"])

    return list(jax.lax.while_loop(test, body, inputs[end:]))


def _cond(inputs: list[Any], params: Any, own: Any) -> list[Any]:
    def branch(program: ClosedJaxpr, constants: Any) -> Any:
        return lambda *args: _run_closed(program, args, constants)

    pairs = zip(params["branches"], own["branches"], strict=True)
    return list(jax.lax.switch(inputs[0], [branch(*p) for p in pairs], *inputs[1:]))


def _loop_of(name: str) -> Any:
    if name not in _LOOPS:
        raise PackedTrialsError(
            f"The configs differ in a constant inside of the operation {name}.",
            f"Constants may differ inside of {', '.join(_LOOPS)}, and everywhere "
            "outside of operations that have programs in them.",
            "Make it a variable of the model that is not trainable, or call "
            "packed_trials once for each of its values.",
        )
    return _LOOPS[name]


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
"""How operations run whose programs have other constants."""
