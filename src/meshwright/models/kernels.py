"""What a compiler makes of a traced training step: kernels, and buffers between them.

XLA computes most operations inside of the ones that read them (`models.fusing`), so
that only some of their results ever lie in memory. Sizes grow with the samples of the
batch, or do not; nothing is computed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from meshwright.models.flattening import flatten
from meshwright.models.formulations import BEST_FORMS, Platform
from meshwright.models.fusing import Fused, fuse
from meshwright.models.operations import FlatProgram, Operation, Size, Value
from meshwright.models.ordering import in_order
from meshwright.models.rewriting import rewritten
from meshwright.models.training import SAMPLES, StateKind, StepInput, TrainingStep

import numpy as np

Kind = Literal["product", "convolution", "elementwise", "reduction", "other", "loop"]

Phase = Literal["forward", "backward", "update"]

_KINDS: dict[str, Kind] = {
    "product": "product",
    "convolution": "convolution",
    "reduction": "reduction",
    "loop": "loop",
    "other": "other",
    "update": "other",
    "gather": "other",
}

_DEAR: dict[str, tuple[str, ...]] = {
    "exp": ("exp", "exp2", "expm1", "logistic", "sin", "cos"),
    "log": ("log", "log1p"),
    "tanh": ("tanh",),
    "erf": ("erf", "erf_inv"),
    "erfc": ("erfc",),
    "pow": ("pow", "cbrt", "atan2", "digamma", "lgamma", "tan"),
    "rsqrt": ("rsqrt", "sqrt"),
    "div": ("div", "rem"),
}
"""Operations that take many cycles for each number, with others that take as many."""

_DEAR_LIKE = {name: like for like, names in _DEAR.items() for name in names}


@dataclass(slots=True)
class Buffer:
    """A tensor that lies in memory."""

    shape: tuple[int, ...]
    dtype: str
    bytes: Size
    given: StepInput | None = None
    """What it is, if the step takes it."""
    updates: StateKind | None = None
    """What it becomes, if the step returns it."""
    value: int = -1
    """Which of the values of the flat program it is."""


@dataclass(slots=True)
class Kernel:
    """Operations that are computed together."""

    kind: Kind
    phase: Phase
    layer: str
    reads: tuple[int, ...]
    """The buffers that it reads."""
    makes: tuple[int, ...]
    numbers: Size
    """Numbers that it computes, those in between included."""
    dear: Mapping[str, Size]
    """Numbers among them that take many cycles, by operation."""
    random: Size
    """Random numbers that it makes, which take more."""
    summed: Size
    """Numbers that it sums up."""
    operation: Any
    """The one that the others are computed for."""
    products: "tuple[Product, ...]" = ()
    """The matrix products and convolutions among them."""
    inner: "Kernels | None" = None
    """What a loop repeats."""
    times: int = 1
    overwrites: tuple[int, ...] = ()
    """The buffers among those it reads in whose place it can put what it makes."""
    members: tuple[int, ...] = ()
    """The operations of the flat program that it computes."""
    tables: tuple[int, ...] = ()
    """The buffers among those it reads of which it wants only some rows."""
    rows: tuple[Size, ...] = ()
    """The bytes of these rows."""
    waits_for: tuple[int, ...] = ()
    """The buffers that have to be there before, though it does not read them."""


class Product(NamedTuple):
    """A matrix product, or a convolution as one: how many, rows, inner, columns."""

    batch: Size
    rows: Size
    inner: Size
    columns: Size
    dtype: str
    form: str
    """Of a product, which factors come transposed: nn, nt, tn or tt. Of a convolution,
    what it computes: outputs, or the gradients of its inputs (spread, if it has
    strides) or of its kernel."""
    groups: int = 1
    is_awkward: bool = False
    """Whether rows begin where the device is slow to read them."""

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution."""
        return self.form in _PARTS

    def flops(self, samples: float) -> float:
        """Its floating point operations."""
        sizes = (self.batch, self.rows, self.inner, self.columns)
        return 2 * prod(size.at(samples) for size in sizes)


_PARTS = ("outputs", "inputs", "kernel", "spread")


@dataclass
class Kernels:
    """A program as a compiler would run it.

    Attributes:
        kernels: In the order in which they run.
        buffers: What they read and make.
        flat: The operations that they were made of.
        returned: The buffers that the program returns, in order.
    """

    kernels: list[Kernel]
    buffers: list[Buffer]
    flat: FlatProgram
    returned: list[int] = field(default_factory=list)

    @cached_property
    def phases(self) -> "np.ndarray[Any, Any]":
        """The phase of each kernel."""
        return np.array([kernel.phase for kernel in self.kernels])

    @cached_property
    def last_reads(self) -> dict[int, int]:
        """The last kernel that reads each buffer."""
        return {b: i for i, kernel in enumerate(self.kernels) for b in kernel.reads}


def kernels_of(
    step: TrainingStep, platform: Platform = "cpu", samples: int = SAMPLES
) -> Kernels:
    """The kernels of a training step, in the order in which a compiler runs them.

    Arguments:
        step: The step.
        platform: What it is compiled for.
        samples: Of the batch on a device, for decisions that depend on sizes.
    """
    flat = flattened(step, platform)
    found = make_kernels(flat, platform, samples)
    places = {buffer.value: buffer for buffer in found.buffers}
    for value, given in zip(flat.inputs, step.inputs, strict=True):
        places[value].given = given
    for made, value in renewed_values(step, flat).items():
        if places[made].given is None:
            places[made].updates = step.inputs[flat.inputs.index(value)].kind
    return found


def make_kernels(
    flat: FlatProgram, platform: Platform, samples: int = SAMPLES
) -> Kernels:
    """The kernels of any program, in the order in which they run."""
    return _Maker(flat, platform, samples).put_in_order()


def renewed_values(step: TrainingStep, flat: FlatProgram) -> dict[int, int]:
    """The values that take the place of what a step was given, with these."""
    kept = [
        value
        for value, each in zip(flat.inputs, step.inputs, strict=True)
        if each.kind != "data"
    ]
    return dict(zip(flat.outputs[-len(kept) :], kept, strict=True)) if kept else {}


@lru_cache(maxsize=16)
def flattened(step: TrainingStep, platform: Platform) -> FlatProgram:
    """The operations of a step, in the form in which they are compiled."""
    program = rewritten(step.program, BEST_FORMS[platform])
    return flatten(program.jaxpr, platform)


class _Maker:
    """Makes kernels of the operations that are fused."""

    def __init__(self, flat: FlatProgram, platform: Platform, samples: int) -> None:
        self._flat = flat
        self._platform = platform
        self._samples = samples
        self._names: dict[int, int] = {}
        self.result = Kernels([], [], flat)
        for value in (*flat.inputs, *flat.constants):
            self.buffer(value)
        fused = fuse(flat, platform, samples)
        self._stored = {v for each in fused for v in flat.operations[each.root].outputs}
        self._awaited = lru_cache(maxsize=None)(self._find_awaited)
        for each in fused:
            self.result.kernels.append(self._kernel(each))

    def put_in_order(self, *, is_inner: bool = False) -> Kernels:
        """The kernels, in the order in which they run."""
        found = self.result
        found.returned = [self.buffer(value) for value in self._flat.outputs]
        order = in_order(found, self._platform, self._samples, is_inner=is_inner)
        found.kernels = [found.kernels[number] for number in order]
        return found

    def buffer(self, value: int) -> int:
        """The buffer of a value, which is made if there is none."""
        if value not in self._names:
            self._names[value] = len(self.result.buffers)
            each = self._flat.values[value]
            buffer = Buffer(each.shape, each.dtype, each.bytes, value=value)
            self.result.buffers.append(buffer)
        return self._names[value]

    def _kernel(self, fused: Fused) -> Kernel:
        flat = self._flat
        operation = flat.operations[fused.root]
        computed = [flat.operations[number] for number in fused.members]
        inner = None
        if operation.inner is not None:
            made = _Maker(operation.inner, self._platform, self._samples)
            inner = made.put_in_order(is_inner=True)
        main = _main(operation, computed)
        picks = [op for op in computed if op.name == "gather"]
        read = Counter(v for op in computed for v in op.inputs)
        picks = [op for op in picks if read[op.inputs[0]] == 1]
        tables = {op.inputs[0] for op in picks}
        return Kernel(
            kind=_KINDS.get(main.sort, "elementwise"),
            phase=_phase_of(main.scope),
            layer=main.scope,
            reads=tuple(self.buffer(v) for v in fused.reads),
            makes=tuple(self.buffer(v) for v in operation.outputs),
            numbers=_count(flat, [o for o in computed if o.sort != "broadcast"]),
            dear=_dear(flat, computed),
            random=_random(flat, computed),
            summed=_count(flat, [o for o in computed if o.sort == "reduction"]),
            operation=main.name,
            products=tuple(_products(computed, flat.values, self._platform)),
            inner=inner,
            times=operation.times,
            overwrites=tuple(self.buffer(v) for v in fused.overwrites),
            members=tuple(fused.members),
            tables=tuple(self.buffer(v) for v in fused.reads if v in tables),
            rows=tuple(flat.values[op.outputs[0]].bytes for op in picks),
            waits_for=self._awaited(tuple({op.waits_for: None for op in computed})),
        )

    def _find_awaited(self, groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
        """The buffers of values, or those that they are made of if they have none."""
        found: dict[int, None] = {}
        ahead = [value for group in groups for value in group]
        seen: set[int] = set()
        while ahead:
            value = ahead.pop()
            maker = self._flat.values[value].maker
            if value in seen or maker is None:
                continue
            seen.add(value)
            if value in self._stored:
                found[self.buffer(value)] = None
            else:
                ahead += self._flat.operations[maker].inputs
        return tuple(found)


def _main(root: Operation, computed: Sequence[Operation]) -> Operation:
    """The operation of a kernel that takes the longest."""
    for sort in ("product", "convolution", "reduction"):
        for operation in computed:
            if operation.sort == sort:
                return operation
    return root


def _count(flat: FlatProgram, operations: Sequence[Operation]) -> Size:
    sizes = [
        flat.values[v].size
        for op in operations
        if op.sort in ("elementwise", "reduction", "broadcast", "transpose", "moving")
        for v in (op.inputs[:1] if op.sort == "reduction" else op.outputs)
    ]
    power = max((size.power for size in sizes), default=0)
    return Size(sum(size.number for size in sizes if size.power == power), power)


def _dear(flat: FlatProgram, operations: Sequence[Operation]) -> dict[str, Size]:
    by_name: dict[str, list[Operation]] = {}
    for operation in operations:
        if operation.name in _DEAR_LIKE:
            by_name.setdefault(_DEAR_LIKE[operation.name], []).append(operation)
    return {name: _count(flat, group) for name, group in by_name.items()}


def _random(flat: FlatProgram, operations: Sequence[Operation]) -> Size:
    names = ("random_bits", "scramble")
    made = [op.outputs[0] for op in operations if op.name in names]
    sizes = [flat.values[value].size for value in made]
    power = max((size.power for size in sizes), default=0)
    return Size(sum(size.number for size in sizes if size.power == power), power)


def _products(
    operations: Sequence[Operation], values: Sequence[Value], platform: Platform
) -> Iterator[Product]:
    for operation in operations:
        if operation.name == "dot_general":
            yield _dot(operation, values, platform)
        elif operation.name == "conv_general_dilated":
            yield _convolution(operation, values, platform)


def _dot(operation: Operation, values: Sequence[Value], platform: Platform) -> Product:
    left, right = operation.shapes[:2]
    (inner, of_right), (batch, _) = operation.params["dimension_numbers"]
    together = prod(left[dim] for dim in batch)
    shared = prod(left[dim] for dim in inner)
    # Factors that were moved lie as they are read.
    moved = [order is not None for order in operation.orders]
    is_turned = (
        not moved[0] and len(left) - 1 not in inner,
        not moved[1] and len(right) - 1 in of_right,
    )
    columns = prod(right) // max(together * shared, 1)
    ends = (
        left[-1] if is_turned[0] else shared,
        right[-1] if is_turned[1] else columns,
        columns,
    )
    dtype = values[operation.inputs[0]].dtype
    return Product(
        Size.of(together),
        Size.of(prod(left) // max(together * shared, 1)),
        Size.of(shared),
        Size.of(columns),
        dtype,
        ("t" if is_turned[0] else "n") + ("t" if is_turned[1] else "n"),
        is_awkward=is_awkward(platform, dtype, *ends),
    )


def is_awkward(platform: Platform, dtype: str, *ends: int) -> bool:
    """Whether rows of so many numbers begin where a device is slow to read them.

    GPUs read 16 bytes at once. In caches of CPUs there is room for few rows that begin
    at the same place of a page.

    >>> is_awkward("gpu", "bfloat16", 300, 64), is_awkward("cpu", "float32", 1024)
    (True, True)
    """
    rows = [end * np.dtype(dtype).itemsize for end in ends if not Size.of(end).power]
    if platform == "gpu":
        return any(row % 16 for row in rows)
    return any(row % 4096 == 0 for row in rows)


def _convolution(
    operation: Operation, values: Sequence[Value], platform: Platform
) -> Product:
    kernel = operation.shapes[1]
    made = values[operation.outputs[0]].shape
    numbers = operation.params["dimension_numbers"]
    features = made[numbers.out_spec[1]]
    groups = max(
        operation.params["feature_group_count"], operation.params["batch_group_count"]
    )
    # Of inputs that are spread out most are zeros, which need not be multiplied.
    spread = prod(operation.params["lhs_dilation"])
    inner = prod(kernel) // kernel[numbers.rhs_spec[0]]
    dtype = values[operation.inputs[0]].dtype
    channels = [
        shape[place]
        for shape, spec in (
            (operation.shapes[0], numbers.lhs_spec),
            (kernel, numbers.rhs_spec),
            (made, numbers.out_spec),
        )
        for place in spec[:2]
    ]
    return Product(
        Size.of(groups),
        Size.of(prod(made) // features),
        Size.of(max(inner // spread, 1)),
        Size.of(features // groups),
        dtype,
        "nn" if platform == "cpu" and _is_product(operation) else _part(operation),
        groups,
        is_awkward(platform, dtype, *channels),
    )


def _is_product(operation: Operation) -> bool:
    """Whether a convolution looks at one place at a time; CPUs compute it as such."""
    params = operation.params
    spec = params["dimension_numbers"].rhs_spec
    window = [operation.shapes[1][dim] for dim in spec[2:]]
    steps = (params["window_strides"], params["lhs_dilation"], params["rhs_dilation"])
    return prod(window) == 1 and all(prod(each) == 1 for each in steps)


def _part(operation: Operation) -> str:
    is_again = "rematted_computation" in operation.scope
    if is_again or _phase_of(operation.scope) != "backward":
        return "outputs"
    # The gradient of a kernel sums over samples, which stand where channels do.
    channels = operation.params["dimension_numbers"].lhs_spec[1]
    sums_samples = Size.of(operation.shapes[0][channels]).power
    if sums_samples:
        return "kernel"
    return "spread" if prod(operation.params["lhs_dilation"]) > 1 else "inputs"


def _phase_of(scope: str) -> Phase:
    if "transpose(" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else "update"
