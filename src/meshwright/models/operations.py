"""The operations that a program is made of, as a compiler sees them."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any, Literal, NamedTuple

from meshwright.models.training import SAMPLES

Sort = Literal[
    "elementwise",
    "broadcast",
    "transpose",
    "moving",
    "gather",
    "reduction",
    "product",
    "convolution",
    "update",
    "other",
    "loop",
]
"""How an operation treats its inputs, which decides what it is computed with."""

LIBRARY_CALLS = {
    *("library_lstm", "library_lstm_gradient"),
    *("library_attention", "library_attention_gradient"),
}
"""Those that stand for calls of cuDNN, see `models/library.py`."""

SORTS: dict[str, Sort] = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "full", "empty"), "broadcast"),
    **dict.fromkeys(("slice", "pad", "concatenate", "rev", "dynamic_slice"), "moving"),
    **dict.fromkeys(("transpose",), "transpose"),
    **dict.fromkeys(("gather",), "gather"),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"),
            *("reduce_or", "argmax", "argmin", "reduce"),
        ),
        "reduction",
    ),
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    **dict.fromkeys(
        (
            *("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max"),
            *("dynamic_update_slice",),
        ),
        "update",
    ),
    **dict.fromkeys(("scan", "while"), "loop"),
    **dict.fromkeys(
        (
            *("sort", "cumsum", "cumlogsumexp", "cummax", "cumprod", "top_k"),
            *("select_and_scatter_add", "select_and_gather_add", "reduce_window_max"),
            *("reduce_window_sum", "reduce_window_min", "reduce_window", "fft"),
            *("cholesky", "eigh", "random_bits", "threefry2x32", "shard_map"),
            *("rng_bit_generator", "random_seed", "random_split", "random_fold_in"),
            *("custom_call", "ffi_call", "triangular_solve", "qr", "svd", "lu"),
            *LIBRARY_CALLS,
        ),
        "other",
    ),
}

"""By the names of operations; all others work element by element."""

VERY_DEAR = {"scramble", "erf_inv", "digamma", "lgamma", "erfc"}
"""Those that take so long that not even a GPU computes them twice."""

ALL_GATHER, ALL_REDUCE = "all_gather", "all_reduce"
MAKE_WHOLE = "all_gather_along_tensor"
COLLECTIVES = {ALL_GATHER, ALL_REDUCE, MAKE_WHOLE}
"""Those that pass something between devices."""

DEAR = {
    *("exp", "log", "log1p", "expm1", "pow", "tanh", "logistic", "erf", "erf_inv"),
    *("rsqrt", "sqrt", "cbrt", "atan2", "asin", "acos", "asinh", "acosh", "atanh"),
    *("sinh", "cosh", "div", "rem", "digamma", "lgamma", "to_bfloat16"),
}
"""Element by element, but not computed twice if several others read the result."""


class Size(NamedTuple):
    """A number, times the samples of a batch if they are counted in it."""

    number: int
    power: int

    @classmethod
    @cache
    def of(cls, number: int) -> "Size":
        """Takes the samples of a trace out of a number.

        >>> Size.of(3 * SAMPLES)
        Size(number=3, power=1)
        """
        power = 0
        while number and number % SAMPLES == 0:
            number, power = number // SAMPLES, power + 1
        return cls(number, power)

    def at(self, samples: float) -> float:
        """The number for so many samples."""
        return self.number * samples**self.power


@dataclass(slots=True)
class Value:
    """A tensor that an operation makes, or that the program is given."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    maker: int | None = None
    readers: list[int] = field(default_factory=list)

    def unread(self) -> "Value":
        """A copy that nobody reads."""
        return Value(self.shape, self.dtype, self.itemsize, self.maker)

    @property
    def size(self) -> Size:
        """How many numbers it has."""
        return Size.of(prod(self.shape))

    @property
    def bytes(self) -> Size:
        """How much memory it takes."""
        return Size.of(prod(self.shape) * self.itemsize)


@dataclass(slots=True)
class Operation:
    """Makes values of others."""

    name: str
    sort: Sort
    params: Any
    inputs: list[int]
    outputs: list[int]
    shapes: list[tuple[int, ...]]
    """Of what it reads, as it reads it."""
    scope: str
    inner: "FlatProgram | None" = None
    times: int = 1
    reads_rows: bool = True
    """Of a product: whether the rows of its first factor lie in order."""
    orders: tuple[tuple[int, ...] | None, ...] = (None, None)
    """Of a product or a convolution: in which order it gets the dims of what it reads,
    if not as is."""
    waits_for: tuple[int, ...] = ()
    """Values that have to be there before, though it does not read them."""

    def reading(self, inputs: list[int]) -> "Operation":
        """The same operation on other values."""
        return replace(self, inputs=inputs)

    @property
    def is_dear(self) -> bool:
        """Whether it takes many cycles for each number."""
        return self.name in DEAR


@dataclass(slots=True)
class FlatProgram:
    """Operations in order.

    Attributes:
        values: All tensors, by number.
        operations: What makes them.
        inputs: Numbers of the values that the program is given.
        outputs: Numbers of those that it returns.
        constants: Numbers of those that belong to it.
    """

    values: list[Value]
    operations: list[Operation]
    inputs: list[int]
    outputs: list[int]
    constants: list[int] = field(default_factory=list)

    def connected(self) -> "FlatProgram":
        """The program without what nobody reads; values know who makes and reads them.

        Operations may be given in any order in which none comes before what it reads.
        """
        self.operations = _wanted(self.operations, self.outputs)
        for value in self.values:
            value.maker, value.readers = None, []
        for number, operation in enumerate(self.operations):
            for each in operation.outputs:
                self.values[each].maker = number
            for each in dict.fromkeys(operation.inputs):
                self.values[each].readers.append(number)
        return self


def _wanted(operations: list[Operation], outputs: Iterable[int]) -> list[Operation]:
    wanted, kept = set(outputs), []
    for operation in reversed(operations):
        if wanted.intersection(operation.outputs):
            wanted.update(operation.inputs)
            kept.append(operation)
    return kept[::-1]
