"""How an axis of the mesh splits what a training step computes.

The split of the weights is given; from there it is followed through the operations, as
XLA's partitioner does. A value is split along one of its dims, or it is whole. Where a
split dim is summed over, every device has a part of the sum, and the parts are added up
between the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.models.kernels import Kernels
from meshwright.models.operations import FlatProgram, Operation
from meshwright.parallel.plan import Spec

import numpy as np


@dataclass(frozen=True)
class Division:
    """What of a program is split.

    Attributes:
        dims: For each value the dim that is split, or None.
        sums: Values that are added up between the devices.
        gathers: Values that are split, by the operations that read them whole.
        divided: For each operation, whether each device does a part of it only.
    """

    dims: list[int | None]
    sums: frozenset[int]
    gathers: dict[int, list[int]]
    divided: list[bool]


@dataclass(frozen=True)
class TensorSplit:
    """What the axis `tensor` does to the kernels of a step.

    Attributes:
        divided_buffers: For each buffer, whether a device holds a part of it.
        divided_kernels: For each kernel, whether a device computes a part of it.
        all_reduced: The buffers that are added up between the devices.
    """

    divided_buffers: "np.ndarray[Any, Any]"
    divided_kernels: "np.ndarray[Any, Any]"
    all_reduced: tuple[int, ...]


def split_by_tensor(kernels: Kernels, specs: Mapping[int, Spec]) -> TensorSplit:
    """How kernels are split if the values that a step takes are.

    Arguments:
        kernels: The kernels of a step.
        specs: By the numbers of the step's inputs, how they are split.
    """
    flat = kernels.flat
    given = {
        flat.inputs[number]: spec.index("tensor")
        for number, spec in specs.items()
        if "tensor" in spec
    }
    found = divide(flat, given)
    buffers = [found.dims[buffer.value] is not None for buffer in kernels.buffers]
    work = [
        any(found.divided[number] for number in kernel.members)
        for kernel in kernels.kernels
    ]
    sums = [i for i, b in enumerate(kernels.buffers) if b.value in found.sums]
    return TensorSplit(np.array(buffers), np.array(work), tuple(sums))


def divide(
    flat: FlatProgram,
    given: Mapping[int, int],
    results: Mapping[int, int] | None = None,
) -> Division:
    """Follows the split of some values through a program.

    Arguments:
        flat: The program.
        given: The dims that are split, of values that the program is given.
        results: Those of values that it makes and that are wanted split.
    """
    if not given and not results:
        whole: list[int | None] = [None] * len(flat.values)
        return Division(whole, frozenset(), {}, [False] * len(flat.operations))
    return _Follower(flat, given, results or {}).run()


class _Follower:
    """Goes through a program, once forwards and once backwards."""

    def __init__(
        self, flat: FlatProgram, given: Mapping[int, int], results: Mapping[int, int]
    ) -> None:
        self._flat = flat
        self._results = results
        self._dims: list[int | None] = [None] * len(flat.values)
        self._sums: set[int] = set()
        self._gathers: dict[int, list[int]] = {}
        self._wanted = self._find_wanted()
        self._divided = [False] * len(flat.operations)
        for value, dim in given.items():
            self._dims[value] = dim

    def run(self) -> Division:
        """Follows the split until nothing changes any more, by and large."""
        for _ in range(2):
            self._gathers = {}
            for number, operation in enumerate(self._flat.operations):
                self._forwards(number, operation)
            self._dims = [
                self._results.get(value, dim) for value, dim in enumerate(self._dims)
            ]
            for number in reversed(range(len(self._flat.operations))):
                self._backwards(number, self._flat.operations[number])
        sums = frozenset(self._sums)
        return Division(self._dims, sums, self._gathers, self._divided)

    def _find_wanted(self) -> dict[int, int]:
        """How values are wanted split, from how results are."""
        wanted = dict(self._results)
        for operation in reversed(self._flat.operations):
            dim = wanted.get(operation.outputs[0]) if operation.outputs else None
            if dim is None or operation.sort not in ("elementwise", "transpose"):
                continue
            shape = self._flat.values[operation.outputs[0]].shape
            if operation.sort == "transpose":
                dim = int(operation.params["permutation"][dim])
                shape = operation.shapes[0]
            for value in operation.inputs:
                read = dim_after_reshape(shape, dim, self._flat.values[value].shape)
                if read is not None and value not in wanted:
                    wanted[value] = read
        return wanted

    def _forwards(self, number: int, operation: Operation) -> None:
        rule = _RULES.get(operation.sort, _whole)
        dims = [
            self._as_read(value, shape)
            for value, shape in zip(operation.inputs, _read(operation), strict=False)
        ]
        if all(dim is None for dim in dims) or not operation.outputs:
            return
        made = operation.outputs[0]
        if operation.sort == "product":
            dims = self._without_conflict(number, operation, dims)
        dim, is_sum = rule(operation, dims, self._flat.values[made].shape)
        self._divided[number] = is_sum or dim is not None
        if is_sum:
            self._sums.add(made)
        elif dim is not None:
            self._dims[made] = dim

    def _without_conflict(
        self, number: int, operation: Operation, dims: list[int | None]
    ) -> list[int | None]:
        """Makes a factor whole if the axis cannot split both as they are."""
        if None in dims:
            return dims
        sides = [[dims[0], None], [None, dims[1]]]
        found = [_product(operation, side, ()) for side in sides]
        if found[0] == found[1]:
            return dims
        wanted = self._wanted.get(operation.outputs[0])
        keeps = next((i for i in (1, 0) if found[i] == (wanted, False)), None)
        if keeps is None:
            # A sum would have to be gathered; so the side that is summed over is.
            keeps = 0 if found[1][1] else 1
        value = operation.inputs[1 - keeps]
        self._gathers.setdefault(value, []).append(number)
        return sides[keeps]

    def _as_read(self, value: int, shape: tuple[int, ...]) -> int | None:
        dim, each = self._dims[value], self._flat.values[value]
        maker = None if each.maker is None else self._flat.operations[each.maker]
        is_constant = maker is not None and not maker.inputs
        # Operations far apart may read the same constant.
        if dim is None or is_constant:
            return None
        return dim_after_reshape(each.shape, dim, shape)

    def _backwards(self, number: int, operation: Operation) -> None:
        """Splits what split operations read, if that costs nothing."""
        is_random = operation.name == "random_bits"
        if not is_random and operation.sort not in ("elementwise", "broadcast"):
            return
        for value in operation.outputs if is_random else operation.outputs[:1]:
            self._split_for_readers(number, value)

    def _split_for_readers(self, number: int, value: int) -> None:
        made = self._flat.values[value]
        if self._dims[value] is not None or value in self._sums or not made.readers:
            return
        wanted = [self._wanted_by(reader, value) for reader in made.readers]
        known = [dim for dim in wanted if dim is not None]
        if known and value not in self._flat.outputs:
            self._dims[value] = known[0]
            self._divided[number] = True

    def _wanted_by(self, reader: int, value: int) -> int | None:
        operation = self._flat.operations[reader]
        made = operation.outputs[0] if operation.outputs else value
        dim, shape = self._dims[made], self._flat.values[made].shape
        if operation.sort != "elementwise" or dim is None:
            return None
        return dim_after_reshape(shape, dim, self._flat.values[value].shape)


def _read(operation: Operation) -> list[tuple[int, ...]]:
    """The shapes that an operation reads, factors and kernels as they are moved."""
    if operation.sort not in ("product", "convolution"):
        return operation.shapes
    return [
        shape if order is None else tuple(shape[dim] for dim in order)
        for shape, order in zip(operation.shapes, operation.orders, strict=True)
    ]


def dim_after_reshape(
    shape: Sequence[int], dim: int, reshaped: Sequence[int]
) -> int | None:
    """Where a dim is after a tensor got another shape; None if it is taken apart.

    >>> dim_after_reshape((8, 16, 4), 2, (128, 4))
    1
    >>> dim_after_reshape((8, 16), 1, (8, 4, 4))
    1
    >>> dim_after_reshape((8, 16), 1, (128,)) is None
    True
    """
    if tuple(shape) == tuple(reshaped):
        return dim
    before = prod(shape[:dim])
    for number, size in enumerate(reshaped):
        if prod(reshaped[:number]) == before and size > 1:
            return number
    return None


Found = tuple[int | None, bool]
"""The dim of the result that is split; whether it is a part of a sum."""

Dims = Sequence[int | None]


def _whole(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    """Operations that see whole tensors, unless they leave the dims alone."""
    del operation
    for dim in dims[:1]:
        if dim is not None and len(shape) > dim and shape[dim] > 1:
            return dim, False
    return None, False


def _first(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del operation, shape
    return next((dim for dim in dims if dim is not None), None), False


def _broadcast(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    (dim, *_) = dims
    places = operation.params["broadcast_dimensions"]
    return (None if dim is None else int(places[dim])), False


def _transpose(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    (dim,) = dims
    order = list(operation.params["permutation"])
    return (None if dim is None else order.index(dim)), False


def _moving(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    """Slices and the like; a dim that they change is made whole before."""
    for dim, read in zip(dims, operation.shapes, strict=False):
        if dim is not None and len(read) == len(shape) and read[dim] == shape[dim]:
            return dim, False
    return None, False


def _reduction(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    dim = next((dim for dim in dims if dim is not None), None)
    axes = operation.params.get("axes", ())
    if dim is None or dim in axes:
        return None, dim is not None
    return dim - sum(axis < dim for axis in axes), False


def _product(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    sums, batches = operation.params["dimension_numbers"]
    placed: list[int | None] = []
    for side in (0, 1):
        order, dim = operation.orders[side], dims[side]
        dim = dim if dim is None or order is None else order[dim]
        if dim is not None and dim in sums[side]:
            return None, True
        placed.append(_place_in_product(operation, side, dim, sums, batches))
    return next((dim for dim in placed if dim is not None), None), False


def _place_in_product(
    operation: Operation, side: int, dim: int | None, sums: Any, batches: Any
) -> int | None:
    """Where a dim of a factor is in the product."""
    if dim is None:
        return None
    if dim in batches[side]:
        return list(batches[side]).index(dim)
    free = [
        [d for d in range(len(shape)) if d not in (*sums[i], *batches[i])]
        for i, shape in enumerate(operation.shapes[:2])
    ]
    before = len(batches[0]) + (len(free[0]) if side else 0)
    return int(before + free[side].index(dim))


def _convolution(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    numbers = operation.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    left, right = dims[:2]
    order = operation.orders[1]
    right = right if right is None or order is None else order[right]
    is_grouped = operation.params["feature_group_count"] > 1
    if is_grouped and (left == lhs[1] or right == rhs[0]):
        return out[1], False
    if left == lhs[1] or right == rhs[1]:
        return None, True
    if right == rhs[0]:
        return out[1], False
    return (out[0] if left == lhs[0] else None), False


def _gather(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    del shape
    dim = dims[0]
    if dim is None:
        return None, False
    numbers = operation.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if dim in gone:
        return None, True
    kept = [d for d in range(len(operation.shapes[0])) if d not in gone]
    return int(numbers.offset_dims[kept.index(dim)]), False


def _update(operation: Operation, dims: Dims, shape: tuple[int, ...]) -> Found:
    """Scattering; the dims of what is scattered are among those of the result."""
    if dims[0] is not None or not operation.name.startswith("scatter"):
        return dims[0], False
    updates = dims[2]
    numbers = operation.params["dimension_numbers"]
    if updates is None or updates not in numbers.update_window_dims:
        return None, False
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in gone]
    return kept[list(numbers.update_window_dims).index(updates)], False


_RULES: dict[str, Callable[[Operation, Dims, tuple[int, ...]], Found]] = {
    "elementwise": _first,
    "broadcast": _broadcast,
    "transpose": _transpose,
    "moving": _moving,
    "reduction": _reduction,
    "product": _product,
    "convolution": _convolution,
    "gather": _gather,
    "update": _update,
    "other": _whole,
}
