"""The program that each device runs, with what it exchanges with the others.

A training step is compiled for a whole mesh, and XLA's partitioner makes the program of
one device of it: weights that are split over `fsdp` are gathered at the beginning, and
what is summed over samples, or over a dim that `tensor` splits, is added up between the
devices. Many small sums travel together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from meshwright.models.formulations import Platform
from meshwright.models.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    MAKE_WHOLE,
    FlatProgram,
    Operation,
)
from meshwright.planner.splitting import divide

MOST_COMBINED = 256
"""So many sums travel together at the most, on CPUs."""

MOST_COMBINED_BYTES = 30 * 2**20
"""So many bytes travel together at the most, on GPUs."""


COPY, JOIN = "copy", "join"
"""Names of operations that are put into programs, besides the collectives."""


@dataclass(frozen=True, slots=True)
class InputSplit:
    """How a value that a step takes is split: the dims, or None."""

    fsdp: int | None = None
    tensor: int | None = None
    is_gathered: bool = False
    """Whether it is gathered over `fsdp` before it is used."""


@dataclass(frozen=True)
class Partitioned:
    """A program of one device.

    Attributes:
        flat: Its operations; sizes are those of whole tensors.
        by_tensor: For each value, whether a device has a part of it along `tensor`.
        by_fsdp: Likewise for `fsdp`.
        of_all: For each value, whether a device has those of all along `fsdp`.
    """

    flat: FlatProgram
    by_tensor: list[bool]
    by_fsdp: list[bool]
    of_all: list[bool]


def partition(
    flat: FlatProgram,
    splits: Sequence[InputSplit],
    renewed: Mapping[int, int],
    platform: Platform,
    *,
    sums_over_samples: bool,
) -> Partitioned:
    """The program of one device.

    Arguments:
        flat: The program of all of them.
        splits: How each of its inputs is split.
        renewed: The values that take the place of inputs, with these.
        platform: What it is compiled for.
        sums_over_samples: Whether the batch is split, so that sums over it have parts.
    """
    given = dict(zip(flat.inputs, splits, strict=True))
    tensor = {v: each.tensor for v, each in given.items() if each.tensor is not None}
    fsdp = {v: each.fsdp for v, each in given.items() if each.fsdp is not None}
    gathered = {v: dim for v, dim in fsdp.items() if given[v].is_gathered}
    kept = {v: dim for v, dim in fsdp.items() if v not in gathered}
    results = {made: fsdp[v] for made, v in renewed.items() if v in fsdp}
    wanted = {made: tensor[v] for made, v in renewed.items() if v in tensor}
    by_tensor, by_fsdp = divide(flat, tensor, wanted), divide(flat, kept, results)
    sums = dict.fromkeys(by_tensor.sums, "tensor")
    if sums_over_samples:
        sums |= dict.fromkeys(_sums_over_samples(flat), "batch")
    parts = {v for v, dim in enumerate(by_fsdp.dims) if dim is not None} | fsdp.keys()
    exchange = _Exchange(flat, platform, parts)
    exchange.gather(gathered)
    for number in _sums_of_rows(flat, by_fsdp.dims):
        if sums.pop(flat.operations[number].outputs[0], None) == "batch":
            exchange.send_rows(number)
    exchange.add_up(sums)
    exchange.make_whole(by_tensor.gathers)
    is_split = [dim is not None for dim in by_tensor.dims]
    return exchange.result(is_split)


def _sums_of_rows(flat: FlatProgram, dims: Sequence[int | None]) -> Iterator[int]:
    """Operations that add to rows of which each device keeps some, along `fsdp`.

    They are the gradients of embeddings.
    """
    for number, operation in enumerate(flat.operations):
        if operation.name != "scatter-add":
            continue
        table, _, rows = operation.inputs
        readers = flat.values[operation.outputs[0]].readers
        kept = {dims[v] for n in readers for v in flat.operations[n].outputs}
        is_own = flat.values[table].readers == [number]
        numbers = operation.params["dimension_numbers"]
        adds_rows = numbers.scatter_dims_to_operand_dims == (0,)
        if kept == {0} and is_own and adds_rows and flat.values[rows].size.power:
            yield number


def _sums_over_samples(flat: FlatProgram) -> Iterator[int]:
    """What is made of all samples, and does not grow with them."""
    for operation in flat.operations:
        if operation.sort in ("product", "convolution", "reduction", "update", "loop"):
            read = max((flat.values[v].size.power for v in operation.inputs), default=0)
            for value in operation.outputs:
                if flat.values[value].size.power < read:
                    yield value


class _Exchange:
    """Puts what passes between devices into a program."""

    def __init__(self, flat: FlatProgram, platform: Platform, parts: set[int]) -> None:
        self._flat = flat
        self._platform = platform
        self._parts = parts
        self._values = [value.unread() for value in flat.values]
        self._instead: dict[int, int] = {}
        self._sources: dict[int, int] = {}
        self._wholes: dict[tuple[int, int], int] = {}
        self._of_all: set[int] = set()
        self._added: list[tuple[float, Operation]] = []

    def gather(self, dims: Mapping[int, int]) -> None:
        """Makes weights whole before they are used."""
        if any(operation.waits_for for operation in self._flat.operations):
            self._gather_by_block(dims)
            return
        for value, dim in dims.items():
            whole = self._new(value)
            self._add(ALL_GATHER, [value], [whole], -2.0)
            if self._platform == "cpu" and dim > 0:
                # It arrives with that dim first, and is put in order; updates read it
                # as it came.
                first, whole = whole, self._new(value)
                self._add(COPY, [first], [whole], -1.0)
                for number in self._flat.values[value].readers:
                    if "jvp(" not in self._flat.operations[number].scope:
                        self._wholes[number, value] = first
            self._instead[value] = whole

    def _gather_by_block(self, values: Iterable[int]) -> None:
        """What is computed again gathers its weights again; updates read the parts."""
        for value in values:
            blocks: dict[tuple[int, ...], list[int]] = {}
            for number in self._flat.values[value].readers:
                operation = self._flat.operations[number]
                if "jvp(" in operation.scope:
                    blocks.setdefault(operation.waits_for, []).append(number)
            for block, readers in blocks.items():
                whole = self._new(value)
                self._add(ALL_GATHER, [value], [whole], min(readers) - 0.5, block)
                self._wholes |= dict.fromkeys(((n, value) for n in readers), whole)

    def send_rows(self, number: int) -> None:
        """Gathers what is added to a table, so that each device adds to its part."""
        operation = self._flat.operations[number]
        table, _, rows = operation.inputs
        whole = self._new(rows)
        place = self._flat.values[rows].maker or 0
        self._add(MAKE_WHOLE, [rows], [whole], place + 0.6)
        self._wholes[number, rows] = whole
        self._of_all.add(whole)
        self._parts |= {table, operation.outputs[0]}

    def add_up(self, sums: Mapping[int, str]) -> None:
        """Adds up the parts of sums, as many at a time as may be."""
        makers = {v: self._flat.values[v].maker or 0 for v in sums}
        for group in _Combiner(self._flat, self._platform).groups(sums):
            place = max(makers[v] for v in group) + 0.5
            scattered = [v for v in group if self._is_scattered(v)]
            whole = [v for v in group if v not in scattered]
            if self._platform == "cpu":
                self._add_up(group, place)
                continue
            if scattered:
                self._add_up(scattered, place)
            if len(whole) > 1:
                self._add_up_joined(whole, place)
            elif whole:
                self._add_up(whole, place)

    def make_whole(self, readers: Mapping[int, list[int]]) -> None:
        """Gathers what is split by `tensor` for operations that want it whole."""
        for value, numbers in readers.items():
            self._values.append(self._values[value].unread())
            whole = len(self._values) - 1
            maker = self._flat.values[value].maker
            place = -1.0 if maker is None else maker + 0.6
            source = self._instead.get(value, value)
            self._add(MAKE_WHOLE, [source], [whole], place)
            for number in numbers:
                self._wholes[number, value] = whole

    def _add_up(self, group: list[int], place: float) -> None:
        made = [self._new(v) for v in group]
        self._add(ALL_REDUCE, group, made, place)
        for value, total in zip(group, made, strict=True):
            self._stand_for(value, total)

    def _add_up_joined(self, group: list[int], place: float) -> None:
        """Programs for GPUs put what is wanted whole into one, and take it apart."""
        number = sum(self._flat.values[v].size.number for v in group)
        first = self._flat.values[group[0]]
        like = replace(first, shape=(number,), readers=[])
        self._values += [like, like.unread()]
        joined, total = len(self._values) - 2, len(self._values) - 1
        # It is as much smaller along `tensor` as the largest of them.
        largest = max(group, key=lambda v: self._flat.values[v].size.number)
        self._sources |= {joined: largest, total: largest}
        self._add(JOIN, group, [joined], place)
        self._add(ALL_REDUCE, [joined], [total], place + 0.1)
        for value in group:
            self._stand_for(value, total)

    def _stand_for(self, value: int, total: int) -> None:
        self._instead[value] = total
        if self._platform == "gpu" and self._is_scattered(value):
            self._parts |= {total, *self._transposed(value)}

    def _is_scattered(self, value: int) -> bool:
        """Whether a device needs no more than its part of a sum."""
        readers = [self._flat.operations[n] for n in self._flat.values[value].readers]
        made = [op.outputs[0] for op in readers if op.outputs]
        moved = self._transposed(value)
        return bool(made) and all(
            v in self._parts or (v in moved and self._is_scattered(v)) for v in made
        )

    def _transposed(self, value: int) -> list[int]:
        readers = [self._flat.operations[n] for n in self._flat.values[value].readers]
        return [op.outputs[0] for op in readers if op.name == "transpose"]

    def result(self, by_tensor: list[bool]) -> Partitioned:
        """The program, each operation after what it reads."""
        operations = [
            (float(i), op.reading([self._read(i, v) for v in op.inputs]))
            for i, op in enumerate(self._flat.operations)
        ]
        flat, given = self._flat, set(self._flat.inputs)
        outputs = [v if v in given else self._instead.get(v, v) for v in flat.outputs]
        ordered = _sorted([*operations, *self._added])
        found = FlatProgram(self._values, ordered, flat.inputs, outputs, flat.constants)
        split = by_tensor + [False] * (len(self._values) - len(by_tensor))
        for value, source in self._sources.items():
            split[value] = split[source]
        numbers = range(len(self._values))
        parts, of_all = (
            [value in those for value in numbers]
            for those in (self._parts, self._of_all)
        )
        return Partitioned(found.connected(), split, parts, of_all)

    def _read(self, number: int, value: int) -> int:
        return self._wholes.get((number, value), self._instead.get(value, value))

    def _new(self, value: int) -> int:
        self._values.append(self._values[value].unread())
        self._sources[len(self._values) - 1] = value
        return len(self._values) - 1

    def _add(
        self,
        name: str,
        inputs: list[int],
        outputs: list[int],
        place: float,
        waits_for: tuple[int, ...] = (),
    ) -> None:
        shapes = [self._values[value].shape for value in inputs]
        operation = Operation(name, "other", {}, inputs, outputs, shapes, "")
        operation.waits_for = waits_for
        self._added.append((place, operation))


class _Combiner:
    """Finds the sums that travel together: such as do not wait for each other."""

    def __init__(self, flat: FlatProgram, platform: Platform) -> None:
        self._flat = flat
        self._platform = platform
        self._ancestors: list[int] = []
        for number, operation in enumerate(flat.operations):
            bits = 1 << number
            for value in (*operation.inputs, *operation.waits_for):
                maker = flat.values[value].maker
                bits |= self._ancestors[maker] if maker is not None else 0
            self._ancestors.append(bits)

    def groups(self, sums: Mapping[int, str]) -> Iterator[list[int]]:
        """The groups, one axis after the other."""
        for axis in ("tensor", "batch"):
            mine = [v for v, each in sums.items() if each == axis]
            places = {number: i for i, number in enumerate(self._postorder())}
            mine.sort(key=lambda v: places[self._maker(v)])
            yield from self._in_turn(mine)

    def _maker(self, value: int) -> int:
        maker = self._flat.values[value].maker
        assert maker is not None
        return maker

    def _in_turn(self, sums: Sequence[int]) -> Iterator[list[int]]:
        group: list[int] = []
        for value in sums:
            if group and not self._joins(value, group):
                yield group
                group = []
            group.append(value)
        if group:
            yield group

    def _joins(self, value: int, group: list[int]) -> bool:
        before = self._ancestors[self._maker(value)]
        if any(before >> self._maker(v) & 1 for v in group):
            return False
        if self._platform == "cpu":
            return len(group) < MOST_COMBINED
        values = [self._flat.values[v] for v in (*group, value)]
        are_alike = len({(v.dtype, v.size.power) for v in values}) == 1
        return are_alike and sum(v.bytes.number for v in values) <= MOST_COMBINED_BYTES

    def _postorder(self) -> list[int]:
        """Operations after what they read, those of the first outputs first."""
        flat = self._flat
        found: dict[int, None] = {}
        entered: set[int] = set()
        ends = [flat.values[v].maker for v in flat.outputs]
        ahead = [maker for maker in reversed(ends) if maker is not None]
        while ahead:
            number = ahead[-1]
            if number in found or number in entered:
                found[ahead.pop()] = None
                continue
            entered.add(number)
            operation = flat.operations[number]
            wanted = (*operation.inputs, *operation.waits_for)
            makers = [flat.values[v].maker for v in wanted]
            ahead += [m for m in reversed(makers) if m is not None and m not in found]
        return list(found)


def _sorted(operations: list[tuple[float, Operation]]) -> list[Operation]:
    """Operations in the order of their places, but each after what it reads."""
    makers = {v: i for i, (_, op) in enumerate(operations) for v in op.outputs}
    readers: dict[int, list[int]] = {}
    missing: list[int] = []
    for number, (_, operation) in enumerate(operations):
        before = {makers[v] for v in operation.inputs if v in makers}
        missing.append(len(before))
        for maker in before:
            readers.setdefault(maker, []).append(number)
    ready = [(operations[n][0], n) for n, count in enumerate(missing) if not count]
    heapify(ready)
    found = []
    while ready:
        _, number = heappop(ready)
        found.append(operations[number][1])
        for reader in readers.get(number, ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, (operations[reader][0], reader))
    return found
