"""Batches that come from the host, on their way onto the mesh.

They are read and checked one after the other, and put onto the mesh by a thread ahead
of their steps, several at a time if several steps are dispatched together.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

from meshwright.data.agreement import Agreement
from meshwright.data.checks import Parts, Where, check_batch, settle_shapes
from meshwright.data.demands import Demands, demands_of
from meshwright.data.prefetch import Prefetch, prefetch
from meshwright.data.resident import Shapes
from meshwright.data.sources import refuse_empty
from meshwright.data.tally import Tally
from meshwright.devices.containers import map_leaves, named_leaves
from meshwright.devices.step import batch_size

import numpy as np

Settle = Callable[[], None]
"""What remains to be checked in the thread that runs the step."""


class Arrived(NamedTuple):
    """A batch that was read, or several of the same shapes as one."""

    batch: Any
    settle: Settle | None
    size: int
    """Samples of a batch."""
    number: int = 1
    """Batches."""

    def check(self) -> None:
        """Checks what remains to be checked."""
        if self.settle is not None:
            self.settle()


class Step(Protocol):
    """A step that takes batches from the host."""

    def put(self, batch: Any) -> Any:
        """Moves a batch onto the mesh."""

    def put_stack(self, stack: Any, size: int) -> Any:
        """Moves batches of that size, stacked along a first dim, onto the mesh."""


class Pace(Protocol):
    """How many batches are stacked."""

    @property
    def step(self) -> Step | None:
        """The step, once there is one."""

    def choose_stack(self, batch: Any, num_left: int | None) -> int:
        """How many batches like this one are dispatched together."""


class BatchChecker:
    """Checks the batches of a stream, each as it arrives."""

    def __init__(self, model: Any, verb: str, x: Any, check_nan: bool) -> None:
        self._model = model
        self._verb = verb
        self._source = x
        self._check_nan = check_nan
        self._demands = Demands()
        self._has_seen_any = False

    def look_at_model(self) -> None:
        """Finds out what the model wants; it may have been built since."""
        self._demands = demands_of(self._model, self._verb)

    def check(self, batch: Any, number: int) -> Settle | None:
        """Refuses a batch; may leave its shapes to a call in the main thread.

        Keras is asked about unusual shapes, and must not be asked in two threads.
        """
        self._has_seen_any = True
        is_tuple = isinstance(batch, list | tuple)
        if is_tuple and len(batch) > len(Parts._fields):
            return None  # for a step of the user's own
        parts = Parts(*batch) if is_tuple else Parts(batch)
        if self._verb == "predict":
            parts = Parts(parts.x)
        demands, where = self._demands, Where(self._verb, batch=number)
        if not check_batch(parts, demands, where, self._check_nan):
            return None
        return lambda: settle_shapes(parts, demands, self._model, where)

    def check_end(self) -> None:
        """Refuses a stream that ends before its first batch."""
        if not self._has_seen_any:
            refuse_empty(self._source, self._verb)


class Reader:
    """Reads and checks batches, one after the other; knows nothing of its readers."""

    def __init__(self, batches: Iterator[Any], checker: BatchChecker | None) -> None:
        self._batches = batches
        self._checker = checker
        self._number = 0

    def __iter__(self) -> "Reader":
        return self

    def skip(self, number: int) -> None:
        """Reads batches that nobody wants any more."""
        for _ in islice(self._batches, number):
            self._number += 1

    def __next__(self) -> Arrived:
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._checker is not None:
                self._checker.check_end()
            raise
        number, self._number = self._number, self._number + 1
        checker = self._checker
        settle = None if checker is None else checker.check(batch, number)
        return Arrived(batch, settle, batch_size(batch))


class Turnstile:
    """Lets batches through one after the other, and counts them.

    Arguments:
        agreement: What the other processes have to say, if there are any.
        tally: Counts samples, and the time that is waited for them.
    """

    def __init__(self, agreement: Agreement | None, tally: Tally) -> None:
        self._agreement = agreement
        self._tally = tally

    def take(self, next_one: Callable[[], Arrived]) -> Arrived:
        """What comes next, if every process has something like it."""

        def read() -> tuple[Arrived, int, int]:
            arrived = next_one()
            arrived.check()
            return arrived, arrived.size, arrived.number

        with self._tally.waiting():
            agreed = self._agreement
            found: Arrived = read()[0] if agreed is None else agreed.on(read)
        self._tally.add(found.size * found.number)
        return found


class Stream:
    """Batches as they come, or put onto the mesh ahead of their use.

    Keras looks at a first batch to build a model; that one is read as it comes.
    """

    draws_at_once = False
    """Whether the order of all batches is drawn before the first of them."""

    def __init__(
        self,
        reader: Reader,
        limit: int | None,
        depth: int,
        turnstile: Turnstile,
    ) -> None:
        self._reader = reader
        self._limit = limit
        self._depth = depth
        self._turnstile = turnstile
        self._chunk: _Chunk | None = None
        self._num_skipped = 0

    def __iter__(self) -> "Stream":
        return self

    def skip(self, step: int, taken: int) -> None:
        """Leaves out what was used before an interruption, as `ResidentStream.skip`."""
        self._reader.skip(taken)
        self._num_skipped = step

    def __next__(self) -> Any:
        return self._turnstile.take(partial(next, self._reader)).batch

    def ahead(self, put: Callable[[Any], Any]) -> Iterator[Any]:
        """The batches after `put`, which a thread does ahead, but not past an epoch.

        Reading further would take batches from a generator that nobody uses.
        """
        if self._depth < 1:
            return map(put, self)
        if self._chunk is None or self._chunk.num_left == 0:
            limit, skipped = self._limit, self._num_skipped
            self._num_skipped = 0
            if limit is not None:
                limit -= skipped
            self._chunk = _Chunk(self._reader, put, limit, self._depth, self._turnstile)
        return self._chunk

    def close(self) -> None:
        """Ends the thread."""
        if self._chunk is not None:
            self._chunk.close()


class _Chunk:
    """The batches of one epoch, put ahead of their use."""

    def __init__(
        self,
        reader: Reader,
        put: Callable[[Any], Any],
        limit: int | None,
        depth: int,
        turnstile: Turnstile,
    ) -> None:
        def put_batch(arrived: Arrived) -> Arrived:
            return arrived._replace(batch=put(arrived.batch))

        self.num_left = limit
        self._turnstile = turnstile
        self._batches = prefetch(islice(reader, limit), put_batch, depth)

    def __iter__(self) -> "_Chunk":
        return self

    def __next__(self) -> Any:
        placed = self._turnstile.take(partial(next, self._batches)).batch
        if self.num_left is not None:
            self.num_left -= 1
        if self.num_left == 0:
            self.close()
        return placed

    def close(self) -> None:
        """Ends the thread."""
        self._batches.close()


class StackingStream:
    """Batches that a thread puts onto the mesh ahead of their use, several at a time.

    Arguments:
        reader: Reads the batches.
        depth: For how many dispatches batches are ready at the most.
        turnstile: What lets batches through.
        pace: Says how many batches are dispatched together.
        has_tail: Whether it is known that an epoch ends with a smaller batch.
    """

    draws_at_once = False
    """Whether the order of all batches is drawn before the first of them."""

    def __init__(
        self,
        reader: Reader,
        depth: int,
        turnstile: Turnstile,
        pace: Pace,
        has_tail: bool,
    ) -> None:
        self._has_tail = has_tail
        self._reader = reader
        self._depth = depth
        self._turnstile = turnstile
        self._pace = pace
        self._stacks: Prefetch[Arrived] | None = None
        self._num_left: int | None = 0
        self._settled: Callable[[], Any] | None = None

    def __iter__(self) -> "StackingStream":
        return self

    def skip(self, step: int, taken: int) -> None:
        """Leaves out what was used before an interruption, as `ResidentStream.skip`."""
        self._reader.skip(taken)

    def __next__(self) -> Any:
        """The batch that was settled, for who looks at one before there is a step."""
        return self.take_stretch()

    def settle_stretch(self, num_wanted: int | None, num_of_epoch: int | None) -> int:
        """Settles how many steps are next, as `ResidentStream.settle_stretch`.

        What goes wrong is told by `take_stretch`, as is the end of the data: that is
        where Keras expects it.
        """
        try:
            arrived = self._read(num_wanted, num_of_epoch)
        except BaseException as error:
            self._settled = partial(_throw, error)
            return 1
        self._settled = lambda: arrived.batch
        return arrived.number

    def take_stretch(self) -> Any:
        """The batches that were settled: a stack of them, or one."""
        assert self._settled is not None, "settle_stretch comes first"
        settled, self._settled = self._settled, None
        return settled()

    def close(self) -> None:
        """Ends the thread."""
        if self._stacks is not None:
            self._stacks.close()

    def _read(self, num_wanted: int | None, num_of_epoch: int | None) -> Arrived:
        step = self._pace.step
        if step is None:
            return self._turnstile.take(partial(next, self._reader))
        take = partial(self._next_stack, step, num_wanted, num_of_epoch)
        arrived = self._turnstile.take(take)
        if self._num_left is not None:
            self._num_left -= arrived.number
        if self._num_left == 0:
            self.close()
        return arrived

    def _next_stack(
        self, step: Step, num_wanted: int | None, num_of_epoch: int | None
    ) -> Arrived:
        if self._num_left == 0 or self._stacks is None:
            self._num_left = num_wanted
            self._stacks = self._start(step, num_wanted, num_of_epoch)
        return next(self._stacks)

    def _start(
        self, step: Step, num_wanted: int | None, num_of_epoch: int | None
    ) -> Prefetch[Arrived]:
        """Starts a thread; it reads no further than the epoch goes."""
        first = list(islice(self._reader, 1))
        num_alike = num_of_epoch
        if num_of_epoch is not None and num_of_epoch > 1 and self._has_tail:
            num_alike = num_of_epoch - 1
        length = 1
        for arrived in first:
            # What cannot work is refused before a step on it is looked at.
            arrived.check()
            length = self._pace.choose_stack(arrived.batch, num_alike)
        arriving = islice(chain(first, self._reader), num_wanted)
        stacks = gather_stacks(arriving, length)
        return prefetch(stacks, partial(_put, step), self._depth)


def gather_stacks(arriving: Iterator[Arrived], length: int) -> Iterator[Arrived]:
    """Stacks of so many batches of the same shapes; what does not make one, alone."""
    if length == 1:
        yield from arriving
        return
    stack = Stack(length)
    try:
        for arrived in arriving:
            if not stack.fits(arrived):
                yield from stack.members()
                stack = Stack(length)
            stack.add(arrived)
            if stack.is_full:
                yield stack.whole()
                stack = Stack(length)
    except Exception:
        # What came before belongs to the run, as it would without stacks.
        yield from stack.members()
        raise
    yield from stack.members()


class Stack:
    """Batches of the same shapes, copied into arrays with a dim for their number.

    Copied as they arrive: a source may use its arrays again for the next one.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._held: list[Arrived] = []
        self._shapes: Shapes | None = None
        self._arrays: Any = None

    @property
    def is_full(self) -> bool:
        """Whether nothing more fits."""
        return len(self._held) == self._length

    def fits(self, arrived: Arrived) -> bool:
        """Whether a batch is like those that are there."""
        return not self._held or shapes_of(arrived.batch) == self._shapes

    def add(self, arrived: Arrived) -> None:
        """Copies a batch."""
        if not self._held:
            self._shapes = shapes_of(arrived.batch)
            self._arrays = map_leaves(self._make_room, arrived.batch)
        arrays = (leaf for _, leaf in named_leaves("", self._arrays))
        for room, (_, leaf) in zip(
            arrays, named_leaves("", arrived.batch), strict=True
        ):
            room[len(self._held)] = leaf
        self._held.append(arrived)

    def whole(self) -> Arrived:
        """All of them as one."""
        checks = [arrived.settle for arrived in self._held if arrived.settle]
        settle = partial(_settle_all, checks) if checks else None
        return Arrived(self._arrays, settle, self._held[0].size, self._length)

    def members(self) -> Iterator[Arrived]:
        """Those that are there, one by one."""
        for number, arrived in enumerate(self._held):
            batch = map_leaves(partial(_entry, number), self._arrays)
            yield arrived._replace(batch=batch)

    def _make_room(self, leaf: Any) -> Any:
        array = np.asarray(leaf)
        return np.empty((self._length, *array.shape), array.dtype)


def shapes_of(batch: Any) -> Shapes:
    """The shapes and types of a batch."""
    return Shapes.of(map_leaves(np.asarray, batch))


def _entry(number: int, array: Any) -> Any:
    return array[number]


def _settle_all(checks: list[Settle]) -> None:
    for check in checks:
        check()


def _put(step: Step, arrived: Arrived) -> Arrived:
    if arrived.number == 1:
        return arrived._replace(batch=step.put(arrived.batch))
    return arrived._replace(batch=step.put_stack(arrived.batch, arrived.size))


def _throw(error: BaseException) -> None:
    raise error
