"""Which operation of a traced step is computed in which piece of a pipeline.

Operations keep their order: a piece is a stretch of the program. Two kinds are free to
move. What depends on weights alone (a cast, a transposition) is computed in every piece
that reads it. What makes one number of a weight alone (a penalty on its size) is
computed where the weight lives, because a number travels more easily.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from meshwright.devices.scope import HOME_MARK
from meshwright.models.parts import Owners, bytes_of, is_inexact, is_key
from meshwright.models.work import cost_of

from jax.extend.core import ClosedJaxpr, Var
from jax.extend.core import Literal as Constant

Role = Literal["weight", "state", "metric", "shared", "data"]
"""What an input of a step is: weights are trained, states are updated by the forward
pass, metrics belong to the end, what is shared is small and everywhere."""


@dataclass(frozen=True, order=True, slots=True)
class Input:
    """An input of a step: the so-manieth of its role."""

    role: Role
    index: int


@dataclass(frozen=True)
class StagedProgram:
    """A step without its gradients, and what its inputs and outputs are.

    Attributes:
        program: The operations.
        inputs: What each of its inputs is.
        updates: For each output the number of the input that it is the next value of,
            or None.
        starts: The numbers of the outputs from which gradients go back.
    """

    program: ClosedJaxpr
    inputs: tuple[Input, ...]
    updates: tuple[int | None, ...]
    starts: tuple[int, ...] = ()

    @cached_property
    def is_bound(self) -> list[bool]:
        """For each operation, whether it depends on more than weights."""
        bound = self._inputs(*_BINDING)
        found = []
        for operation in self.program.jaxpr.eqns:
            is_bound = any(v in bound for v in _variables(operation))
            found.append(is_bound)
            if is_bound or _makes_one_number(operation):
                bound |= set(operation.outvars)
        return found

    def _inputs(self, *roles: Role) -> set[Any]:
        pairs = zip(self.program.jaxpr.invars, self.inputs, strict=True)
        return {v for v, given in pairs if given.role in roles}

    def is_free(self, number: int) -> bool:
        """Whether an operation is computed wherever its outputs are read."""
        operation = self.program.jaxpr.eqns[number]
        return not self.is_bound[number] and not _makes_one_number(operation)

    @cached_property
    def costs(self) -> list[int]:
        """What each operation costs, in floating point operations and bytes."""
        pairs = zip(self.program.jaxpr.eqns, self.is_bound, strict=True)
        return [cost_of(op) if bound else 0 for op, bound in pairs]

    @cached_property
    def brings(self) -> list[int]:
        """Bytes of the weights that each operation is the first to read."""
        weights, found = self._inputs("weight"), []
        for operation in self.program.jaxpr.eqns:
            mine = {v for v in _variables(operation) if v in weights}
            weights -= mine
            found.append(sum(map(bytes_of, mine)))
        return found

    @cached_property
    def makes(self) -> list[int]:
        """Bytes that each operation makes of a batch."""
        pairs = zip(self.program.jaxpr.eqns, self.is_bound, strict=True)
        return [sum(map(bytes_of, op.outvars)) if bound else 0 for op, bound in pairs]

    @cached_property
    def alive(self) -> list[int]:
        """Bytes that would have to travel if the program were cut in front of each."""
        operations = self.program.jaxpr.eqns
        last = {v: i for i, op in enumerate(operations) for v in _variables(op)}
        ends = len(operations)
        # The next values of states stay where the states are.
        pairs = zip(self.program.jaxpr.outvars, self.updates, strict=True)
        last |= {v: ends for v, n in pairs if isinstance(v, Var) and n is None}
        changes = [0] * (ends + 2)
        for i, (operation, bound) in enumerate(
            zip(operations, self.is_bound, strict=True)
        ):
            for v in operation.outvars if bound else ():
                if v in last:
                    changes[i + 1] += bytes_of(v)
                    changes[last[v] + 1] -= bytes_of(v)
        found, now = [], 0
        for change in changes[:ends]:
            now += change
            found.append(now)
        return found

    @cached_property
    def is_cuttable(self) -> list[bool]:
        """Whether the program may be cut in front of each operation.

        A value that the forward pass updates is read and written in one piece: the
        next microbatch would else have to wait for the whole pipeline, and who reads
        it late would find the next value.
        """
        operations = self.program.jaxpr.eqns
        allowed = list(self.is_bound)
        readers = _readers(operations)
        made = {v: i for i, op in enumerate(operations) for v in op.outvars}
        for output, number in zip(
            self.program.jaxpr.outvars, self.updates, strict=True
        ):
            if (
                number is None
                or self.inputs[number].role != "state"
                or output not in made
            ):
                continue
            touched = [made[output], *readers[self.program.jaxpr.invars[number]]]
            for i in range(min(touched) + 1, max(touched) + 1):
                allowed[i] = False
        last = {v: i for i, op in enumerate(operations) for v in _variables(op)}
        for v, i in made.items():
            if is_key(v):
                # It belongs to one device, and costs nothing to make again.
                for j in range(i + 1, last.get(v, i) + 1):
                    allowed[j] = False
        seen = False
        for i, bound in enumerate(self.is_bound):
            # In front of the first operation there is nothing to cut off.
            if bound and not seen:
                allowed[i], seen = False, True
        return allowed

    @cached_property
    def layers(self) -> list[tuple[str, ...]]:
        """For each operation the names of the layers that it is part of."""
        return [_layers_of(operation) for operation in self.program.jaxpr.eqns]

    @cached_property
    def needs_gradient(self) -> set[Any]:
        """The values between weights and loss, whose gradients have to travel."""
        jaxpr = self.program.jaxpr
        active = self._inputs("weight")
        for operation in jaxpr.eqns:
            if any(v in active for v in _variables(operation)):
                active |= {v for v in operation.outvars if is_inexact(v)}
        useful = {jaxpr.outvars[number] for number in self.starts}
        for operation in reversed(jaxpr.eqns):
            if any(v in useful for v in operation.outvars):
                useful |= set(_variables(operation))
        return active & useful


_BINDING: tuple[Role, ...] = ("state", "metric", "shared", "data")
"""Roles of inputs whose readers stay in order."""

_HOUSED: tuple[Role, ...] = ("weight", "state", "metric")
"""Roles of inputs that live in one piece."""


def _variables(operation: Any) -> list[Any]:
    return [v for v in operation.invars if not isinstance(v, Constant)]


def _readers(operations: Sequence[Any]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = defaultdict(list)
    for i, operation in enumerate(operations):
        for v in _variables(operation):
            found[v].append(i)
    return found


def _makes_one_number(operation: Any) -> bool:
    outputs = [v.aval.size for v in operation.outvars]
    inputs = [v.aval.size for v in _variables(operation)]
    return max(outputs, default=0) == 1 and max(inputs, default=0) > 1


def _layers_of(operation: Any) -> tuple[str, ...]:
    names = scopes_of(operation)
    return tuple(name for name in names if name and not name.startswith(HOME_MARK))


def scopes_of(operation: Any) -> list[str]:
    """The names of the scopes that an operation was traced in, outermost first."""
    return str(operation.source_info.name_stack).split("/")


Homes = Mapping[Input, int]


@dataclass(frozen=True)
class Assignment:
    """Where everything is.

    Attributes:
        owners: The pieces that compute each operation.
        homes: The pieces of inputs that live in one.
    """

    owners: Owners
    homes: Homes


def assign_by_cuts(
    staged: StagedProgram, cuts: Sequence[int], num_pieces: int
) -> Assignment:
    """Pieces that begin at the operations in `cuts`."""
    starts = set(cuts)
    floors, piece = [], 0
    for i in range(len(staged.program.jaxpr.eqns)):
        piece += i in starts
        floors.append(piece)
    return _assign(staged, num_pieces, floors, {})


def assign_by_homes(staged: StagedProgram, homes: Homes, num_pieces: int) -> Assignment:
    """Every operation as early as its inputs and the weights that it reads allow."""
    floors = [0] * len(staged.program.jaxpr.eqns)
    return _assign(staged, num_pieces, floors, homes)


def _assign(
    staged: StagedProgram, num_pieces: int, floors: list[int], given: Homes
) -> Assignment:
    """Goes through the operations in order.

    Arguments:
        staged: The program.
        num_pieces: How many pieces there are.
        floors: For each operation the piece that it is in at the earliest.
        given: Homes that are known already; others are where they are read first.
    """
    jaxpr, last = staged.program.jaxpr, num_pieces - 1
    housed = [each for each in staged.inputs if each.role in _HOUSED]
    fixed = dict(given) | {each: last for each in housed if each.role == "metric"}
    homes = dict(fixed)
    # For values that depend on inputs alone, which these are; and where others are.
    pairs = zip(jaxpr.invars, staged.inputs, strict=True)
    behind = {v: {each} for v, each in pairs if each.role in _HOUSED}
    pieces: dict[Any, int] = {}
    owners: list[set[int]] = []
    for i, operation in enumerate(jaxpr.eqns):
        inputs = _variables(operation)
        read = {each for v in inputs for each in behind.get(v, ())}
        if staged.is_free(i):
            behind |= dict.fromkeys(operation.outvars, read)
            owners.append(set())
            continue
        known = [fixed[each] for each in read if each in fixed]
        piece = max([floors[i], *(pieces[v] for v in inputs if v in pieces), *known])
        if not staged.is_bound[i]:
            lived = {homes.get(each, piece) for each in read}
            piece = lived.pop() if len(lived) == 1 else piece
        for each in read:
            homes.setdefault(each, piece)
        owners.append({piece})
        pieces |= dict.fromkeys(operation.outvars, piece)
    homes = dict.fromkeys(housed, 0) | homes
    _follow_readers(staged, owners, homes, last)
    return Assignment([frozenset(owner) for owner in owners], homes)


def _follow_readers(
    staged: StagedProgram, owners: list[set[int]], homes: Homes, last: int
) -> None:
    """What depends on weights alone is computed wherever it is read."""
    jaxpr = staged.program.jaxpr
    readers: dict[Any, set[int]] = defaultdict(set)
    for v, number in zip(jaxpr.outvars, staged.updates, strict=True):
        if isinstance(v, Var):
            readers[v].add(last if number is None else homes[staged.inputs[number]])
    for i in reversed(range(len(jaxpr.eqns))):
        operation = jaxpr.eqns[i]
        if not owners[i]:
            owners[i] = set().union(*(readers[v] for v in operation.outvars))
        for v in _variables(operation):
            readers[v] |= owners[i]


def layers_of_pieces(
    staged: StagedProgram, owners: Owners, num_pieces: int
) -> list[list[str]]:
    """The names of the layers in each piece, in order; outermost names."""
    found: list[Counter[str]] = [Counter() for _ in range(num_pieces)]
    for names, owner in zip(staged.layers, owners, strict=True):
        for piece in owner if names else ():
            found[piece][names[0]] += 1
    return [list(each) for each in found]


def shares_of_pieces(
    staged: StagedProgram, owners: Owners, num_pieces: int
) -> list[float]:
    """The share of each piece of all work, by estimate."""
    sums = [0] * num_pieces
    for cost, owner in zip(staged.costs, owners, strict=True):
        for piece in owner:
            sums[piece] += cost
    return [each / max(sum(sums), 1) for each in sums]
