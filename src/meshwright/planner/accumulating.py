"""A training step that goes through its batch in microbatches."""

from meshwright.models.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    MAKE_WHOLE,
    FlatProgram,
    Operation,
)
from meshwright.planner.partitioning import COPY, JOIN, Partitioned

LOOP = "accumulate"
"""The name of the operation that goes through the microbatches."""

_EXCHANGES = (ALL_REDUCE, MAKE_WHOLE, JOIN)
_BEFORE = (ALL_GATHER, COPY)
"""Operations that make weights whole, once for all microbatches."""


def accumulated(parts: Partitioned) -> Partitioned:
    """The step with its gradients inside of a loop, which adds them up.

    Values keep their numbers, inside of the loop and outside.

    Arguments:
        parts: The step on one microbatch.
    """
    flat = parts.flat
    by_tensor, by_fsdp, of_all = map(
        list, (parts.by_tensor, parts.by_fsdp, parts.of_all)
    )
    outside = [op for op in flat.operations if not _is_repeated(op)]
    repeated = _with_what_they_need(flat)
    made = {v for op in repeated for v in op.outputs}
    apart = {v for op in outside for v in op.outputs}
    wanted = {v for op in outside for v in op.inputs} | set(flat.outputs)
    results = [v for v in sorted(made - apart) if v in wanted]
    sums = [v for v in results if flat.values[v].size.power == 0]
    values = [value.unread() for value in flat.values]

    def new(like: int) -> int:
        values.append(values[like].unread())
        by_tensor.append(by_tensor[like])
        by_fsdp.append(by_fsdp[like])
        of_all.append(of_all[like])
        return len(values) - 1

    zeros, totals, added = ({v: new(v) for v in sums} for _ in range(3))
    # Sums lie as the weights do that they change.
    for v in _read_in_parts(outside, by_fsdp) & set(sums):
        for value in (zeros[v], totals[v], added[v]):
            by_fsdp[value] = True
    adds = [_add(values[v].shape, zeros[v], v, added[v]) for v in sums]
    read = dict.fromkeys(v for op in repeated for v in op.inputs if v not in made)
    body = FlatProgram(
        [value.unread() for value in values],
        [*repeated, *adds],
        [*read, *zeros.values()],
        [*added.values(), *(v for v in results if v not in totals)],
    )
    loop = Operation(
        name=LOOP,
        sort="loop",
        params={"num_carry": len(sums), "num_consts": 0},
        inputs=[*zeros.values(), *read],
        outputs=[*totals.values(), *(v for v in results if v not in totals)],
        shapes=[values[v].shape for v in (*zeros.values(), *read)],
        scope="",
        inner=body.connected(),
    )
    fills = [_zeros(values[v].shape, v) for v in zeros.values()]
    before = [op for op in outside if op.name in _BEFORE]
    after = [
        op.reading([totals.get(v, v) for v in op.inputs])
        for op in outside
        if op.name not in _BEFORE
    ]
    early, late = _apart(after, set(loop.outputs))
    outputs = [totals.get(v, v) for v in flat.outputs]
    operations = [*before, *fills, *early, loop, *late]
    found = FlatProgram(values, operations, flat.inputs, outputs, flat.constants)
    return Partitioned(found.connected(), by_tensor, by_fsdp, of_all)


def _read_in_parts(operations: list[Operation], by_fsdp: list[bool]) -> set[int]:
    """Values of which a device only uses its part, along `fsdp`."""
    return {
        v
        for op in operations
        if any(by_fsdp[made] for made in op.outputs)
        for v in op.inputs
    }


def _with_what_they_need(flat: FlatProgram) -> list[Operation]:
    """What computes gradients, and what is computed for it, gathered weights apart."""
    kept, wanted = [], set[int]()
    for operation in reversed(flat.operations):
        is_needed = bool(wanted.intersection(operation.outputs))
        if _is_repeated(operation) or (is_needed and operation.name not in _BEFORE):
            kept.append(operation)
            wanted.update(operation.inputs)
    return kept[::-1]


def _is_repeated(operation: Operation) -> bool:
    return "jvp(" in operation.scope or operation.name in _EXCHANGES


def _apart(
    operations: list[Operation], made: set[int]
) -> tuple[list[Operation], list[Operation]]:
    """Operations that do not wait for some values, and those that do."""
    early, late = [], []
    for operation in operations:
        if made.intersection(operation.inputs):
            made = made | set(operation.outputs)
            late.append(operation)
        else:
            early.append(operation)
    return early, late


def _zeros(shape: tuple[int, ...], made: int) -> Operation:
    return Operation("broadcast_in_dim", "broadcast", {}, [], [made], [], "")


def _add(shape: tuple[int, ...], first: int, second: int, made: int) -> Operation:
    shapes = [shape, shape]
    return Operation("add", "elementwise", {}, [first, second], [made], shapes, "")
