"""A traced program as one line of simple operations, as a compiler sees it at first.

Calls are written out, what only renames is gone, what is computed twice is computed
once, and operations stand in a form in which a compiler would run them: a matrix
product has its dims in order, so that what it reads may have to be transposed before.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from meshwright.models.blocks import keeps_blocks_apart
from meshwright.models.formulations import Platform
from meshwright.models.loops import counts_of_scan
from meshwright.models.operations import SORTS, FlatProgram, Operation, Size, Value

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as Constant

_SAME = {
    *("reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient", "name"),
    *("sharding_constraint", "random_wrap", "random_unwrap", "pvary"),
    *("optimization_barrier", "reduce_precision"),
}
"""Operations whose result is their input, to the compiler."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
    "convert_element_type": lambda number: number,
    "select_n": lambda which, *cases: cases[int(which)],
}
"""Of what numbers that are known are made; the others need not be."""


def flatten(jaxpr: Jaxpr, platform: Platform = "cpu") -> FlatProgram:
    """The operations of a program, and of those that it calls.

    Arguments:
        jaxpr: The program.
        platform: What it is compiled for.
    """
    found = _Flattening(jaxpr, platform)
    return FlatProgram(
        found.values, found.operations, found.inputs, found.outputs, found.constants
    ).connected()


class _Flattening:
    """Writes operations one after the other."""

    def __init__(self, jaxpr: Jaxpr, platform: Platform) -> None:
        self._platform: Platform = platform
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._known_results: dict[Any, list[int]] = {}
        self._numbers: dict[int, Any] = {}
        self._block = 0
        self._awaited: tuple[int, ...] = ()
        known: dict[Any, int] = {}
        for v in (*jaxpr.constvars, *jaxpr.invars):
            known[v] = self._add(v.aval.shape, v.aval.dtype)
        self.constants = [known[v] for v in jaxpr.constvars]
        self.inputs = [known[v] for v in jaxpr.invars]
        self._walk(jaxpr, known, "")
        self.outputs = [self._read(v, known) for v in jaxpr.outvars]

    def _add(self, shape: Sequence[Any], dtype: Any) -> int:
        itemsize = int(getattr(dtype, "itemsize", 0))
        dims = tuple(int(dim) for dim in shape)
        self.values.append(Value(dims, str(dtype), itemsize))
        return len(self.values) - 1

    def _walk(self, jaxpr: Jaxpr, known: dict[Any, int], outer: str) -> None:
        for eqn in jaxpr.eqns:
            scope = "/".join(filter(None, [outer, str(eqn.source_info.name_stack)]))
            called = _called(eqn)
            if _renames(eqn):
                for v, given in zip(eqn.outvars, eqn.invars, strict=False):
                    known[v] = self._read(given, known)
            elif called is not None:
                inner, arguments = called
                inside = {
                    v: self._read(given, known)
                    for v, given in zip(inner.jaxpr.invars, arguments, strict=True)
                }
                for v in inner.jaxpr.constvars:
                    inside[v] = self._add(v.aval.shape, v.aval.dtype)
                with self._apart(eqn, tuple(inside.values())):
                    self._walk(inner.jaxpr, inside, scope)
                for v, made in zip(eqn.outvars, inner.jaxpr.outvars, strict=True):
                    known[v] = self._read(made, inside)
            else:
                self._write(eqn, known, scope)

    @contextmanager
    def _apart(self, eqn: Any, given: tuple[int, ...]) -> Iterator[None]:
        """Lets what is to be computed again not count as computed already.

        It waits for all that the block is given, the gradients of its results
        included.
        """
        before = self._block, self._awaited
        if eqn.params.get("differentiated") and keeps_blocks_apart(self._platform):
            self._block, self._awaited = len(self.operations), given
        yield
        self._block, self._awaited = before

    def _read(self, v: Any, known: dict[Any, int]) -> int:
        return self._constant(v, ()) if isinstance(v, Constant) else known[v]

    def _constant(self, v: Any, shape: tuple[int, ...]) -> int:
        """A number, or a tensor that is full of it."""
        if v.aval.shape:
            return self._full(("array", id(v.val)), v.aval.shape, v.aval.dtype)
        return self._full(v.val, shape, v.aval.dtype)

    def _full(self, number: Any, shape: Sequence[int], dtype: Any) -> int:
        dims, name = tuple(shape), "broadcast_in_dim"
        key = ("full", str(number), dims)
        made = self._once(name, key, [], [(dims, dtype)], [], "", {})[0]
        if not isinstance(number, tuple):
            self._numbers[made] = number
        return made

    def _once(
        self,
        name: str,
        key: Any,
        inputs: list[int],
        outputs: list[tuple[Any, Any]],
        shapes: list[Any],
        scope: str,
        params: Any,
        **more: Any,
    ) -> list[int]:
        """Appends an operation, unless the same is computed already."""
        types = tuple((tuple(shape), str(dtype)) for shape, dtype in outputs)
        whole = (name, key, tuple(inputs), types, self._block)
        if key is not None and whole in self._known_results:
            return self._known_results[whole]
        made = [self._add(shape, dtype) for shape, dtype in outputs]
        sort = SORTS.get(name, "elementwise")
        shapes = [tuple(int(dim) for dim in shape) for shape in shapes]
        operation = Operation(name, sort, params, inputs, made, shapes, scope, **more)
        operation.waits_for = self._awaited if inputs else ()
        self.operations.append(operation)
        for value in made:
            self.values[value].maker = len(self.operations) - 1
        if key is not None:
            self._known_results[whole] = made
        return made

    def _write(self, eqn: Any, known: dict[Any, int], scope: str) -> None:
        name = eqn.primitive.name
        outputs = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        writer = getattr(self, f"_write_{name}", None)
        if writer is not None:
            made = writer(eqn, known, scope, outputs)
        else:
            made = self._write_plainly(name, eqn, known, scope, outputs)
        known.update(zip(eqn.outvars, made, strict=True))

    def _write_plainly(
        self, name: str, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        inputs = [self._read(v, known) for v in eqn.invars]
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        if name not in SORTS:
            number = self._computed(name, inputs, outputs)
            if number is not None:
                return [self._full(number, *outputs[0])]
            chosen = self._chosen(name, inputs)
            if chosen is not None:
                return [chosen]
            shape = tuple(outputs[0][0])
            inputs = [
                self._spread(value, read, shape, scope)
                for value, read in zip(inputs, shapes, strict=True)
            ]
            shapes = [shape] * len(inputs)
        key = _key(eqn) if SORTS.get(name) != "loop" else None
        return self._once(name, key, inputs, outputs, shapes, scope, eqn.params)

    def _computed(self, name: str, inputs: list[int], outputs: Any) -> Any:
        """The number that an operation makes of numbers that are known."""
        known = [self._numbers.get(value) for value in inputs]
        rule = _ARITHMETIC.get(name)
        if rule is None or not inputs or any(number is None for number in known):
            return None
        try:
            return rule(*known)
        except (ArithmeticError, TypeError, ValueError):
            return None

    def _chosen(self, name: str, inputs: list[int]) -> int | None:
        """What is chosen between others, if that is known."""
        which = self._numbers.get(inputs[0]) if name == "select_n" else None
        if which is None:
            return None
        return inputs[1 + int(which)]

    def _spread(
        self, value: int, read: tuple[int, ...], shape: tuple[int, ...], scope: str
    ) -> int:
        """A value as it is read by an operation on tensors of another shape."""
        if prod(read) == prod(shape):
            return value
        each = self.values[value]
        dtype = _Dtype(each.dtype, each.itemsize)
        if value in self._numbers:
            return self._full(self._numbers[value], shape, dtype)
        dims = tuple(range(len(shape) - len(read), len(shape)))
        params = {"broadcast_dimensions": dims}
        name, output = "broadcast_in_dim", [(shape, dtype)]
        # Dims of size one are taken away before.
        key = (
            shape,
            tuple((dim, n) for dim, n in zip(dims, read, strict=True) if n > 1),
        )
        return self._once(name, key, [value], output, [read], scope, params)[0]

    def _elementwise(
        self, name: str, inputs: list[int], like: int, scope: str, key: Any = ""
    ) -> int:
        value = self.values[like]
        output = (value.shape, _Dtype(value.dtype, value.itemsize))
        shapes = [self.values[each].shape for each in inputs]
        return self._once(name, key, inputs, [output], shapes, scope, {})[0]

    def _write_logistic(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """One over one plus the exponential."""
        x = self._read(eqn.invars[0], known)
        power = self._elementwise(
            "exp", [self._elementwise("neg", [x], x, scope)], x, scope
        )
        total = self._elementwise("add", [power], x, scope, "1")
        return [self._elementwise("div", [total], x, scope, "1")]

    def _write_erfc(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """Polynomials in the argument, for small and for large ones."""
        x = self._read(eqn.invars[0], known)
        square = self._elementwise("mul", [x, x], x, scope)
        negative = self._elementwise("neg", [square], x, scope)
        power = self._elementwise("exp", [negative], x, scope)
        large = self._elementwise("mul", [power, x], x, scope)
        larger = self._elementwise("mul", [power, x], x, scope, "more")
        either = self._elementwise("select_n", [large, larger, x], x, scope)
        small = self._elementwise("mul", [x], x, scope, "small")
        return [self._elementwise("erfc", [either, small, x], x, scope)]

    def _write_integer_pow(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        x = self._read(eqn.invars[0], known)
        power = int(eqn.params["y"])
        made = x
        for count in range(abs(power) - 1):
            made = self._elementwise("mul", [made, x], x, scope, count)
        if power < 0:
            made = self._elementwise("div", [made], x, scope, "1")
        return [made]

    def _write_square(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        x = self._read(eqn.invars[0], known)
        return [self._elementwise("mul", [x, x], x, scope)]

    def _write_max(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """The larger one; anything is larger than minus infinity."""
        inputs = [self._read(v, known) for v in eqn.invars]
        for value, other in (inputs, inputs[::-1]):
            is_same = self.values[other].shape == tuple(outputs[0][0])
            if is_same and _is_number(self._numbers.get(value), float("-inf")):
                return [other]
        return self._write_plainly("max", eqn, known, scope, outputs)

    def _write_mul(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """A product; with yes and no as one and zero it is a choice."""
        inputs = [self._read(v, known) for v in eqn.invars]
        shape, dtype = outputs[0]
        for value, other in (inputs, inputs[::-1]):
            answer = self._answer_behind(value)
            sizes = {self.values[v].shape for v in (value, other)}
            if answer is not None and sizes == {tuple(shape)}:
                zero = self._full(0.0, shape, dtype)
                return [
                    self._elementwise("select_n", [answer, zero, other], other, scope)
                ]
        return self._write_plainly("mul", eqn, known, scope, outputs)

    def _answer_behind(self, value: int) -> int | None:
        """The yes and no that numbers were made of."""
        maker = self.values[value].maker
        operation = None if maker is None else self.operations[maker]
        if operation is None or operation.name != "convert_element_type":
            return None
        (source,) = operation.inputs
        return source if self.values[source].dtype == "bool" else None

    def _write_div(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """By a constant it is a multiplication."""
        is_known = self._read(eqn.invars[1], known) in self._numbers
        is_integer = "int" in str(outputs[0][1])
        name = "mul" if is_known and not is_integer else "div"
        return self._write_plainly(name, eqn, known, scope, outputs)

    def _write_convert_element_type(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        narrows = str(outputs[0][1]) == "bfloat16"
        name = "to_bfloat16" if narrows else "convert_element_type"
        return self._write_plainly(name, eqn, known, scope, outputs)

    def _write_broadcast_in_dim(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        (given, *_), (shape, dtype) = eqn.invars, outputs[0]
        shape = tuple(shape)
        if isinstance(given, Constant):
            return [self._constant(given, shape)]
        source = known[given]
        if source in self._numbers:
            return [self._full(self._numbers[source], shape, dtype)]
        read = tuple(given.aval.shape)
        dims = tuple(eqn.params["broadcast_dimensions"])
        pairs = zip(dims, read, strict=True)
        key = (shape, tuple((dim, n) for dim, n in pairs if n > 1))
        name = "broadcast_in_dim"
        return self._once(name, key, [source], outputs, [read], scope, eqn.params)

    def _write_transpose(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        given = self._read(eqn.invars[0], known)
        shape = tuple(eqn.invars[0].aval.shape)
        return [self._transposed(given, shape, eqn.params["permutation"], scope)]

    def _transposed(
        self, value: int, shape: tuple[int, ...], order: Sequence[int], scope: str
    ) -> int:
        """A value with its dims in another order; one that was so before, from it."""
        order = tuple(int(dim) for dim in order)
        moved = [dim for dim in order if shape[dim] > 1]
        if moved == sorted(moved):
            return value
        maker = self.values[value].maker
        before = None if maker is None else self.operations[maker]
        if before is not None and before.name == "transpose":
            made = tuple(before.shapes[0][dim] for dim in before.params["permutation"])
            if made == shape:
                first = before.params["permutation"]
                both = [first[dim] for dim in order]
                return self._transposed(before.inputs[0], before.shapes[0], both, scope)
        each = self.values[value]
        output = (tuple(shape[dim] for dim in order), _Dtype(each.dtype, each.itemsize))
        params = {"permutation": order}
        key = (shape, order)
        return self._once("transpose", key, [value], [output], [shape], scope, params)[
            0
        ]

    def _write_dot_general(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """A product whose factors have their dims in order: shared ones, rows, columns.

        Two dims that are only swapped are read so; others are moved before.
        """
        (sums, batches) = eqn.params["dimension_numbers"]
        factors = [
            _Factor(tuple(v.aval.shape), tuple(sums[i]), tuple(batches[i]), i == 0)
            for i, v in enumerate(eqn.invars)
        ]
        inputs = [self._read(v, known) for v in eqn.invars]
        in_order = all(factor.is_plain for factor in factors)
        orders = tuple(
            None if in_order or self._reads_as_is(factor) else factor.order
            for factor in factors
        )
        inputs = [
            value
            if order is None
            else self._transposed(value, factor.shape, order, scope)
            for factor, value, order in zip(factors, inputs, orders, strict=True)
        ]
        shapes = [factor.shape for factor in factors]
        key = (str(eqn.params), *shapes)
        rows = factors[0].has_rows_in_order or orders[0] is not None
        name, params = "dot_general", eqn.params
        more = {"reads_rows": rows, "orders": orders}
        return self._once(name, key, inputs, outputs, shapes, scope, params, **more)

    def _write_conv_general_dilated(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """A convolution; libraries for GPUs want the outputs of a kernel first."""
        inputs = [self._read(v, known) for v in eqn.invars]
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        order = None
        if self._platform == "gpu" and not Size.of(prod(shapes[1])).power:
            inputs[1], order = self._kernel_in_order(inputs[1], eqn.params, scope)
        key, name, params = _key(eqn), eqn.primitive.name, eqn.params
        more = {"orders": (None, order)}
        return self._once(name, key, inputs, outputs, shapes, scope, params, **more)

    def _kernel_in_order(
        self, kernel: int, params: Any, scope: str
    ) -> tuple[int, tuple[int, ...]]:
        """A kernel as it is read, and where its dims come from.

        Gradients of inputs read the same, though they are written with a flipped one.
        If it has a single place, its other order is that of a product, and as good.
        """
        first, last, *window = params["dimension_numbers"].rhs_spec
        maker = self.values[kernel].maker
        before = None if maker is None else self.operations[maker]
        is_flipped = before is not None and before.name == "rev"
        if before is not None and is_flipped:
            (kernel,) = before.inputs
        shape = self.values[kernel].shape
        if is_flipped and prod(shape[dim] for dim in window) > 1:
            first, last = last, first
        order = (first, *window, last)
        return self._transposed(kernel, shape, order, scope), order

    def _reads_as_is(self, factor: "_Factor") -> bool:
        """Whether a factor need not be moved.

        Libraries for GPUs read several dims as one, those for CPUs do not.
        """
        if self._platform == "gpu":
            return factor.is_stack
        return factor.is_read_swapped

    def _write_split(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        given = self._read(eqn.invars[0], known)
        shapes = [eqn.invars[0].aval.shape]
        return [
            self._once("slice", (key, number), [given], [output], shapes, scope, {})[0]
            for number, output in enumerate(outputs)
            for key in (_key(eqn),)
        ]

    def _write_random_bits(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """Two tensors are scrambled in place, with room for a third, and combined.

        For GPUs they are computed from the places of numbers, wherever they are needed.
        """
        inputs = [self._read(v, known) for v in eqn.invars]
        shapes = [v.aval.shape for v in eqn.invars]
        name, key, three = "random_bits", str(eqn.params), outputs * 3
        if self._platform == "gpu":
            name = "scramble"
            return self._once(name, key, inputs, outputs, shapes, scope, eqn.params)
        made = self._once(name, key, inputs, three, shapes, scope, eqn.params)
        return [self._elementwise("xor", made[:2], made[0], scope)]

    def _write_stack(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        inputs = [self._read(v, known) for v in eqn.invars]
        shapes = [v.aval.shape for v in eqn.invars]
        params = {"dimension": eqn.params["axis"]}
        name, key = "concatenate", f"stack {eqn.params}"
        return self._once(name, key, inputs, outputs, shapes, scope, params)

    def _write_scan(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        """A loop; each tensor that it stacks is written over zeros of its own."""
        inner = flatten(eqn.params["jaxpr"].jaxpr, self._platform)
        times = int(eqn.params["length"])
        _, num_carried = counts_of_scan(eqn.params)
        stacked = outputs[num_carried:]
        zeros = [
            self._once("broadcast_in_dim", None, [], [each], [], scope, {})[0]
            for each in stacked
        ]
        return self._loop(eqn, known, scope, outputs, inner, times, zeros)

    def _write_while(
        self, eqn: Any, known: dict[Any, int], scope: str, outputs: Any
    ) -> list[int]:
        inner = flatten(eqn.params["body_jaxpr"].jaxpr, self._platform)
        return self._loop(eqn, known, scope, outputs, inner, 1)

    def _loop(
        self,
        eqn: Any,
        known: dict[Any, int],
        scope: str,
        outputs: Any,
        inner: FlatProgram,
        times: int,
        zeros: Sequence[int] = (),
    ) -> list[int]:
        inputs = [self._read(v, known) for v in eqn.invars] + [*zeros]
        shapes = [v.aval.shape for v in eqn.invars]
        more = {"inner": inner, "times": times}
        name, params = eqn.primitive.name, eqn.params
        return self._once(name, None, inputs, outputs, shapes, scope, params, **more)


class _Dtype(NamedTuple):
    """The type of a value that is known by its name alone."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


class _Factor(NamedTuple):
    """One side of a matrix product."""

    shape: tuple[int, ...]
    sums: tuple[int, ...]
    batch: tuple[int, ...]
    is_left: bool

    @property
    def free(self) -> tuple[int, ...]:
        taken = {*self.sums, *self.batch}
        return tuple(dim for dim in range(len(self.shape)) if dim not in taken)

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which a compiler wants the dims."""
        ends = (self.free, self.sums) if self.is_left else (self.sums, self.free)
        return (*self.batch, *ends[0], *ends[1])

    @property
    def is_plain(self) -> bool:
        """Whether it is a stack of matrices, of either order."""
        is_first = self.batch == tuple(range(len(self.batch)))
        return is_first and len(self.sums) == 1 and len(self.free) <= 1

    @property
    def is_read_swapped(self) -> bool:
        return self.is_plain and len(self.free) == 1

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, if dims that lie together count as one."""
        ends = (self.sums, self.free) if self.is_left else (self.free, self.sums)
        swapped = (*self.batch, *ends[0], *ends[1])
        return any(
            moved == sorted(moved)
            for order in (self.order, swapped)
            for moved in ([dim for dim in order if self.shape[dim] > 1],)
        )

    @property
    def has_rows_in_order(self) -> bool:
        moved = [dim for dim in self.order if self.shape[dim] > 1]
        return moved == sorted(moved)


def _is_number(number: Any, wanted: float) -> bool:
    try:
        return number is not None and float(number) == wanted
    except (TypeError, ValueError):
        return False


def _renames(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return bool(eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype)
    if name == "broadcast_in_dim":
        sizes = [prod(v.aval.shape) for v in (eqn.invars[0], eqn.outvars[0])]
        return sizes[0] == sizes[1] and not isinstance(eqn.invars[0], Constant)
    if name in ("slice", "pad", "concatenate"):
        return bool(eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape)
    if name in ("reduce_sum", "reduce_max", "reduce_min"):
        return prod(eqn.invars[0].aval.shape) == prod(eqn.outvars[0].aval.shape)
    return name in _SAME and len(eqn.outvars) <= len(eqn.invars)


def _key(eqn: Any) -> str:
    if eqn.primitive.name not in SORTS and not any(eqn.params.values()):
        return ""
    shapes = [v.aval.shape for v in eqn.invars]
    return f"{eqn.params} {shapes}"


def _called(eqn: Any) -> tuple[ClosedJaxpr, list[Any]] | None:
    """The program that an operation stands for, and what it is given."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        largest = max(params["branches"], key=lambda each: len(each.jaxpr.eqns))
        return largest, list(eqn.invars[1:])
    if name in SORTS:
        return None
    for field_name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(field_name)
        if isinstance(inner, Jaxpr) and not inner.constvars:
            inner = ClosedJaxpr(inner, [])
        is_program = isinstance(inner, ClosedJaxpr)
        if is_program and len(inner.jaxpr.invars) == len(eqn.invars):
            return inner, list(eqn.invars)
    return None
