"""Which operations a compiler computes together; what is between them is not stored.

The rules are those of XLA, for CPUs and for GPUs: what is not of use to memory or time
by and large is left out.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

from meshwright.models.formulations import Platform
from meshwright.models.loops import counts_of_scan
from meshwright.models.operations import VERY_DEAR, FlatProgram, Operation, Size
from meshwright.models.training import SAMPLES

FUSIBLE = {
    *("elementwise", "broadcast", "transpose", "moving", "gather", "reduction"),
    "update",
}
"""Sorts of operations that are computed inside of the ones that read them."""

MOST_COPIES = 15
"""So often a fused operation may be written out at the most."""

MOST_REDUCTIONS = 5
"""So many reductions are fused at the most."""

LIBRARY_FROM = 4096
"""Tensors with fewer numbers are not given to the CPU's library."""

_LIBRARY_OPERATIONS = {
    *("abs", "ceil", "convert_element_type", "to_bfloat16", "erf", "exp", "expm1"),
    *("floor", "log", "log1p", "neg", "round", "rsqrt", "sign", "sqrt", "tanh"),
    *("add", "add_any", "div", "max", "min", "mul", "pow", "sub"),
}
_LIBRARY_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min"}
_LIBRARY_TYPES = {"float32", "bfloat16", "float64"}
_LIBRARY_MOST = 100

_MOST_ROUNDS = 4

RETURNED = -1
"""The reader of what a program returns."""


class Graph:
    """Operations that read each other; some are taken together, and count as one."""

    def __init__(self, flat: FlatProgram, samples: int = SAMPLES) -> None:
        self.flat = flat
        self.samples = samples
        self.operands: dict[int, dict[int, None]] = {}
        self.users: dict[int, dict[int, None]] = {}
        self.members: dict[int, list[int]] = {}
        for number, operation in enumerate(flat.operations):
            makers = [flat.values[v].maker for v in operation.inputs]
            self.operands[number] = {m: None for m in makers if m is not None}
            self.users[number] = {}
            for operand in self.operands[number]:
                self.users[operand][number] = None
        for value in flat.outputs:
            maker = flat.values[value].maker
            if maker is not None:
                self.users[maker][RETURNED] = None

    def operation(self, number: int) -> Operation:
        """The operation of a number; of several together, that of the last."""
        return self.flat.operations[number]

    def size(self, number: int) -> float:
        """How many numbers an operation makes."""
        return self.size_of(self.shape(number))

    def size_of(self, shape: tuple[int, ...]) -> float:
        """How many numbers a tensor has, for the samples that are asked for."""
        return Size.of(prod(shape)).at(self.samples)

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of what an operation makes."""
        outputs = self.flat.operations[number].outputs
        return self.flat.values[outputs[0]].shape if outputs else ()

    def dtype(self, number: int) -> str:
        """The type of what an operation makes."""
        outputs = self.flat.operations[number].outputs
        return self.flat.values[outputs[0]].dtype if outputs else ""

    def join(self, first: int, second: int, root: int) -> None:
        """Makes one of two operations; the result is known as `root`, one of them."""
        other = second if root == first else first
        mine = self.members.pop(first, [first]) + self.members.pop(second, [second])
        operands = {**self.operands[first], **self.operands[second]}
        operands.pop(first, None)
        operands.pop(second, None)
        users = dict(self.users[root])
        users.pop(other, None)
        for each in (first, second):
            for operand in self.operands[each]:
                self.users[operand].pop(each, None)
            for user in self.users[each]:
                if user not in (first, second, RETURNED):
                    self.operands[user].pop(each, None)
        for operand in operands:
            self.users[operand][root] = None
        for user in users:
            if user != RETURNED:
                self.operands[user][root] = None
        del self.operands[other], self.users[other]
        self.operands[root], self.users[root] = operands, users
        self.members[root] = mine


class LibraryFusion:
    """What XLA's CPU compiler gives to its library: products, sums, and what is around.

    What such a group reads is stored, even if it would cost nothing to compute again.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._taken: set[int] = set()
        self.groups: set[int] = set()

    def run(self) -> None:
        """Makes groups of the operations of the graph, from the last on."""
        for number in reversed(list(self._graph.operands)):
            operation = self._graph.operation(number)
            starts = operation.sort in ("product", "reduction")
            if starts and number not in self._taken and self._is_supported(number):
                self._taken.add(number)
                self._grow(number)

    def _grow(self, group: int) -> None:
        self._graph.members[group] = [group]
        self.groups.add(group)
        changed = True
        while changed:
            group, changed = self._grow_once(group)

    def _grow_once(self, group: int) -> tuple[int, bool]:
        graph, changed = self._graph, False
        ahead: list[tuple[int, str]] = []
        seen = {group}
        self._look_around(group, group, "both", ahead, seen)
        position = 0
        while position < len(ahead) and len(graph.members[group]) < _LIBRARY_MOST:
            number, direction = ahead[position]
            position += 1
            if number not in graph.operands:
                continue
            root = group if direction == "up" else number
            if number in self.groups:
                if len(graph.members[group]) + len(graph.members[number]) <= 100:
                    graph.join(number, group, root)
                    self.groups -= {number, group}
                    self.groups.add(root)
                    group, changed = root, True
                continue
            if number in self._taken or not self._is_supported(number):
                continue
            self._taken.add(number)
            self._look_around(group, number, direction, ahead, seen)
            graph.join(number, group, root)
            self.groups.discard(group)
            self.groups.add(root)
            group, changed = root, True
        return group, changed

    def _look_around(
        self,
        group: int,
        number: int,
        direction: str,
        ahead: list[tuple[int, str]],
        seen: set[int],
    ) -> None:
        graph = self._graph
        if direction in ("up", "both"):
            for operand in graph.operands[number]:
                alone = all(u in (group, number) for u in graph.users[operand])
                if operand not in seen and alone:
                    ahead.append((operand, "up"))
                    seen.add(operand)
        users = list(graph.users[number])
        is_only = len(users) == 1 and users[0] != RETURNED
        if direction in ("down", "both") and is_only and users[0] not in seen:
            ahead.append((users[0], "down"))
            seen.add(users[0])

    def _is_supported(self, number: int) -> bool:
        graph, operation = self._graph, self._graph.operation(number)
        if graph.dtype(number) not in _LIBRARY_TYPES:
            return False
        if operation.sort == "broadcast":
            return _is_in_order(operation)
        if operation.sort == "product":
            return operation.reads_rows and _is_matrix_product(operation)
        sizes = [graph.size_of(shape) for shape in operation.shapes]
        if max([graph.size(number), *sizes]) < LIBRARY_FROM:
            return False
        types = {graph.flat.values[v].dtype for v in operation.inputs}
        if operation.sort == "reduction":
            is_sum = operation.name == "reduce_sum"
            is_low = graph.dtype(number) == "bfloat16"
            return operation.name in _LIBRARY_REDUCTIONS and not (is_sum and is_low)
        return operation.name in _LIBRARY_OPERATIONS and types <= _LIBRARY_TYPES


def _is_in_order(operation: Operation) -> bool:
    dims = operation.params.get("broadcast_dimensions", ())
    return list(dims) == sorted(dims)


def _is_matrix_product(operation: Operation) -> bool:
    left, right = operation.shapes[:2]
    (sums, _), (batch, _) = operation.params["dimension_numbers"]
    together = prod(left[dim] for dim in batch)
    inner = prod(left[dim] for dim in sums)
    rows = prod(left) // max(together * inner, 1)
    columns = prod(right) // max(together * inner, 1)
    return rows > 1 and columns > 1 and max(rows, inner, columns) >= 8


class LoopFusion:
    """What XLA's compilers compute in one loop.

    Arguments:
        graph: The operations.
        opaque: Those that are computed by a library.
        platform: What they are compiled for.
    """

    def __init__(self, graph: Graph, opaque: set[int], platform: Platform) -> None:
        self._graph = graph
        self._opaque = opaque
        self._order = sorted(graph.operands)
        self._dear = self._find_dear(platform)
        self._ancestors = self._find_ancestors()
        self._paths: dict[tuple[int, int], bool] = {}
        self._kept: set[int] = set()
        if platform == "gpu":
            self._kept |= self._dearer_again()
        for number in reversed(self._order):
            if self._must_not_be_repeated(number):
                self._kept.add(number)

    def _dearer_again(self) -> set[int]:
        """What takes less time to store than to compute again for each of its readers.

        To compute it again is to read again what it is made of. Who reads it, and what
        it is made of, depends on what else is stored, so this is found out in rounds.
        """
        found: set[int] = set()
        for _ in range(_MOST_ROUNDS):
            before, found = found, self._dearer_than(self._readers(found))
            if found == before:
                break
        return found

    def _readers(self, kept: set[int]) -> dict[int, set[int]]:
        """The operations that are stored for which each of the others is computed."""
        found: dict[int, set[int]] = {}
        for number in reversed(self._order):
            found[number] = mine = set()
            for user in self._graph.users[number]:
                if user == RETURNED or user in kept or not self._passes_on(user):
                    mine.add(user)
                else:
                    mine |= found[user] or {user}
        return found

    def _passes_on(self, number: int) -> bool:
        is_sum = self._graph.operation(number).sort == "reduction"
        return self._takes_in(number) and not is_sum

    def _dearer_than(self, readers: dict[int, set[int]]) -> set[int]:
        found: set[int] = set()
        made_of: dict[int, dict[int, float]] = {}
        for number in self._order:
            made_of[number] = self._parts(number, found, made_of)
            times, again = len(readers[number]), sum(made_of[number].values())
            stored = sum(map(self._bytes, self._graph.operation(number).outputs))
            # What masks are made of is mostly kept for others, so they are not.
            is_mask = self._graph.dtype(number) == "bool"
            is_dearer = times * again > again + (1 + times) * stored
            if times > 1 and is_dearer and not is_mask:
                found.add(number)
        return found

    def _parts(
        self, number: int, stored: set[int], made_of: dict[int, dict[int, float]]
    ) -> dict[int, float]:
        """The bytes of the values that are read to compute an operation."""
        found: dict[int, float] = {}
        for value in self._graph.operation(number).inputs:
            maker = self._graph.flat.values[value].maker
            if maker is None or maker in stored or not self._passes_on(maker):
                found[value] = self._bytes(value)
            else:
                found |= made_of[maker]
        return found

    def _bytes(self, value: int) -> float:
        return self._graph.flat.values[value].bytes.at(self._graph.samples)

    def run(self) -> dict[int, list[int]]:
        """The operations that are stored, each with those computed for it."""
        found = {}
        ahead = [-number for number in self._order]
        heapify(ahead)
        while ahead:
            number = -heappop(ahead)
            if self._graph.users.get(number) or self._is_effect(number):
                found[number] = self._fuse(number)
            else:
                self._forget(number)
        return found

    def _is_effect(self, number: int) -> bool:
        return not self._graph.operation(number).outputs

    def _forget(self, number: int) -> None:
        for operand in self._graph.operands.pop(number):
            self._graph.users[operand].pop(number, None)

    def _find_ancestors(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for number in self._order:
            bits = 1 << number
            for operand in self._graph.operands[number]:
                bits |= found[operand]
            found[number] = bits
        return found

    def _fuse(self, root: int) -> list[int]:
        graph = self._graph
        fused = [root]
        if not self._takes_in(root):
            return graph.members.get(root, fused)
        loop = _Loop(graph, root)
        ahead = [-operand for operand in graph.operands[root]]
        heapify(ahead)
        seen = set(graph.operands[root])
        while ahead:
            number = -heappop(ahead)
            if not self._fuses(number, root, loop):
                continue
            loop.add(number)
            fused.append(number)
            graph.users[number].pop(root)
            del graph.operands[root][number]
            for operand in graph.operands[number]:
                graph.operands[root][operand] = None
                graph.users[operand][root] = None
                if operand not in seen:
                    seen.add(operand)
                    heappush(ahead, -operand)
            if not graph.users[number]:
                self._forget(number)
                graph.operands[number] = {}
        return fused

    def _takes_in(self, number: int) -> bool:
        operation = self._graph.operation(number)
        is_open = number not in self._opaque and operation.sort in FUSIBLE
        return is_open and operation.name not in ("scatter", "scatter-add")

    def _find_dear(self, platform: Platform) -> set[int]:
        """Operations that are not computed twice.

        On GPUs these are few, but what is computed with one of them counts as well.
        """
        found = set()
        for number in self._order:
            operation = self._graph.operation(number)
            is_dear = operation.is_dear
            if platform == "gpu":
                operands = self._graph.operands[number]
                alone = [o for o in operands if len(self._graph.users[o]) == 1]
                is_dear = operation.name in VERY_DEAR or (
                    operation.sort == "elementwise"
                    and any(
                        o in found and self._graph.operation(o).sort == "elementwise"
                        for o in alone
                    )
                )
            if is_dear or operation.sort in ("reduction", "gather"):
                found.add(number)
        return found

    def _is_dear(self, number: int) -> bool:
        return number in self._dear

    def _fuses(self, number: int, root: int, loop: "_Loop") -> bool:
        if number in self._kept or not self._takes_in(number):
            return False
        graph, operation = self._graph, self._graph.operation(number)
        if _is_wide_concatenation(graph, number) or (
            len(loop.members) == 1 and _is_wide_concatenation(graph, root)
        ):
            return False
        is_dear, is_broadcast = self._is_dear(number), operation.sort == "broadcast"
        if is_dear and loop.repeats(number):
            return False
        if is_dear and len(graph.users[number]) > 1:
            return False
        if operation.sort == "reduction" and loop.num_reductions > MOST_REDUCTIONS:
            return False
        return is_broadcast or not loop.is_copied_too_often(number)

    def _must_not_be_repeated(self, number: int) -> bool:
        """Whether several read it, of which one does not compute it itself."""
        graph, operation = self._graph, self._graph.operation(number)
        if number in self._opaque or operation.sort not in FUSIBLE:
            return False
        if _reads_one(graph, number):
            return False
        sizes = sum(_sizes_read(graph, number))
        if sizes <= graph.size(number):
            return False
        return not all(
            user != RETURNED and self._fuses_on_all_paths(number, user)
            for user in graph.users[number]
        )

    def _fuses_on_all_paths(self, number: int, user: int) -> bool:
        if number == user:
            return True
        key = (number, user)
        if key not in self._paths:
            self._paths[key] = self._takes_in(user) and all(
                self._fuses_alone(operand, user)
                and self._fuses_on_all_paths(number, operand)
                for operand in self._graph.operands[user]
                if self._ancestors[operand] >> number & 1
            )
        return self._paths[key]

    def _fuses_alone(self, number: int, user: int) -> bool:
        if number in self._kept or not self._takes_in(number):
            return False
        graph, operation = self._graph, self._graph.operation(number)
        if operation.sort == "broadcast":
            return True
        is_repeated = graph.operation(user).sort == "broadcast"
        return not (
            self._is_dear(number) and (is_repeated or len(graph.users[number]) > 1)
        )


class _Loop:
    """A loop that is being put together."""

    def __init__(self, graph: Graph, root: int) -> None:
        self._graph = graph
        self.members = {root}
        self.num_reductions = 0
        self._copies: dict[int, int] = {RETURNED: 1}
        self._places: dict[int, set[int]] = {root: {RETURNED}}
        self._repeated: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._note(root)

    def add(self, number: int) -> None:
        """Takes an operation in."""
        self.members.add(number)
        self._note(number)

    def repeats(self, number: int) -> bool:
        """Whether the loop would compute an operation several times for each number."""
        return number in self._repeated

    def is_copied_too_often(self, number: int) -> bool:
        copies = sum(self._copies[place] for place in self._places[number])
        if copies > MOST_COPIES:
            return True
        operation = self._graph.operation(number)
        interrupts = operation.sort == "reduction" or operation.name in (
            *("concatenate", "pad", "dynamic_update_slice"),
        )
        outside = len(self._graph.users[number]) - 1
        return interrupts and (copies > 1 or outside + self._uses[number] > 1)

    def _note(self, number: int) -> None:
        graph, operation = self._graph, self._graph.operation(number)
        self.num_reductions += operation.sort == "reduction"
        places = self._places[number]
        self._copies[number] = sum(self._copies[place] for place in places)
        shape = graph.shape(number)
        repeats = number in self._repeated or operation.sort == "broadcast"
        for operand, read in zip(operation.inputs, operation.shapes, strict=False):
            maker = graph.flat.values[operand].maker
            if maker is None or maker not in graph.operands:
                continue
            is_same = read == shape == graph.shape(maker)
            keeps_index = operation.name == "transpose" or is_same
            known = self._places.setdefault(maker, set())
            known.update(places if keeps_index else {number})
            self._uses[maker] += 1
            if repeats:
                self._repeated.add(maker)


def _reads_one(graph: Graph, number: int) -> bool:
    """Whether at most one of the tensors that an operation reads is large."""
    rank = sum(dim > 1 for dim in graph.shape(number))
    return sum(ranks >= rank for ranks in _ranks_read(graph, number)) <= 1


def _ranks_read(graph: Graph, number: int) -> Iterator[int]:
    operation = graph.operation(number)
    for value in operation.inputs:
        maker = graph.flat.values[value].maker
        if maker is not None and graph.operation(maker).sort == "broadcast":
            continue
        yield sum(dim > 1 for dim in graph.flat.values[value].shape)


def _sizes_read(graph: Graph, number: int) -> Iterator[float]:
    operation = graph.operation(number)
    for value in dict.fromkeys(operation.inputs):
        yield graph.size_of(graph.flat.values[value].shape)


def _is_wide_concatenation(graph: Graph, number: int) -> bool:
    operation = graph.operation(number)
    if operation.name != "concatenate":
        return False
    shape, dim = graph.shape(number), operation.params["dimension"]
    is_minor = len(shape) > 1 and dim == len(shape) - 1 and shape[dim] >= 128
    return len(operation.inputs) > 8 or is_minor


@dataclass(frozen=True, slots=True)
class Fused:
    """Operations that are computed together, for the last of them."""

    root: int
    members: list[int]
    reads: list[int]
    """The values that they read."""
    overwrites: list[int]
    """Those of them in whose place the result can lie."""


def fuse(flat: FlatProgram, platform: Platform, samples: int = SAMPLES) -> list[Fused]:
    """What is computed together; the results of the roots are stored, others are not.

    Arguments:
        flat: The operations.
        platform: What they are compiled for.
        samples: Of the batch, for decisions that depend on sizes.
    """
    graph = Graph(flat, samples)
    library = LibraryFusion(graph)
    if platform == "cpu":
        library.run()
    found = LoopFusion(graph, library.groups, platform).run()
    return [_described(graph, root, found[root]) for root in sorted(found)]


def _described(graph: Graph, root: int, members: list[int]) -> Fused:
    flat = graph.flat
    inside = set(members)
    made = {v for number in members for v in flat.operations[number].outputs}
    reads = {
        v: None
        for number in members
        for v in flat.operations[number].inputs
        if v not in made
    }
    overwrites = _overwritten(graph, root, inside, list(reads))
    return Fused(root, members, list(reads), overwrites)


def _overwritten(
    graph: Graph, root: int, inside: set[int], reads: list[int]
) -> list[int]:
    """The values that are read where the result is written, number by number."""
    flat, operation = graph.flat, graph.flat.operations[root]
    if operation.sort == "update":
        return operation.inputs[:1]
    if operation.sort == "loop":
        return _carried(operation)
    shape, dtype = graph.shape(root), graph.dtype(root)
    elsewhere = {
        v
        for number in inside
        if flat.operations[number].sort != "elementwise"
        for v in flat.operations[number].inputs
    }
    alike = [
        v
        for v in reads
        if flat.values[v].shape == shape and flat.values[v].dtype == dtype
    ]
    spoiled = _reached_from(graph, inside, elsewhere)
    return [v for v in alike if v not in spoiled]


def _carried(operation: Operation) -> list[int]:
    """What a loop changes from round to round, and what it fills."""
    params = operation.params
    if operation.name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return operation.inputs[first:]
    first, number = counts_of_scan(params)
    filled = operation.inputs[len(operation.shapes) :]
    return operation.inputs[first : first + number] + filled


def _reached_from(graph: Graph, inside: set[int], values: set[int]) -> set[int]:
    """Values that some operation reads in another order, on any path to the result."""
    flat, found = graph.flat, set(values)
    for number in sorted(inside, reverse=True):
        operation = flat.operations[number]
        if found.intersection(operation.outputs):
            found.update(operation.inputs)
    return found
