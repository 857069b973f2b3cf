"""What the data of one `fit`, `evaluate` or `predict` goes through.

Arrays are checked before Keras starts; streams batch by batch as they arrive. Batches
are put onto the mesh by a thread, ahead of the step that needs them.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from meshwright.cluster.identity import process_count
from meshwright.cluster.randomness import share_random_state
from meshwright.data.agreement import Agreement, agree_on_samples
from meshwright.data.checks import (
    Parts,
    Where,
    check_arrays,
    check_batch,
    check_values,
    in_memory,
    is_on_disk,
    settle_shapes,
)
from meshwright.data.demands import Demands, demands_of
from meshwright.data.prefetch import prefetch
from meshwright.data.resident import ArraysInMemory, ResidentStream
from meshwright.data.sources import are_arrays, open_source, refuse_empty
from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import adapt_arrays, arrays_behind
from meshwright.devices.step import batch_size

_ARRAYS = "_meshwright_arrays"

Settle = Callable[[], None]
"""What remains to be checked in the thread that runs the step."""


class Arrived(NamedTuple):
    """A batch that was read."""

    batch: Any
    settle: Settle | None
    size: int


class Pace(Protocol):
    """How the steps of the call are dispatched."""

    listeners: Any

    def listen(self, callbacks: Any) -> None:
        """Looks at what the callbacks want."""

    def keeps(self, data: ArraysInMemory | None) -> bool:
        """Whether arrays stay on the devices."""

    def choose_length(self, data: ArraysInMemory, size: int, num_left: int) -> int:
        """How many of the steps that are left are dispatched together."""

    def prepare_validation(
        self, data: ArraysInMemory, num_steps: int | None, callbacks: Any
    ) -> None:
        """Begins to compile what `evaluate` will need inside of `fit`."""


class Intake:
    """The data of one call of `fit`, `evaluate` or `predict`.

    Used as a context: its threads end with it.
    """

    def __init__(
        self,
        model: Any,
        verb: str,
        pace: Pace,
        *,
        check_nan: bool = True,
        depth: int = 2,
    ) -> None:
        self.pace = pace
        self._model = model
        self._verb = verb
        self._check_nan = check_nan
        self._depth = depth
        self._checker: BatchChecker | None = None
        self._until_built: list[tuple[Parts, Where]] = []
        # Each holds the order of its epoch, so they go when Keras lets go of them.
        self._streams: WeakSet[Stream] = WeakSet()
        self._kept: dict[Any, ArraysInMemory | None] = {}
        self._prepare: Callable[[], None] | None = None

    def __enter__(self) -> "Intake":
        return self

    def __exit__(self, *error: Any) -> None:
        for stream in list(self._streams):
            stream.close()

    def take(self, arguments: dict[str, Any]) -> None:
        """Checks the arguments of the call, and replaces what Keras does not know."""
        share_random_state()
        self.pace.listen(arguments.get("callbacks"))
        parts = Parts(*(arguments.get(name) for name in Parts._fields))
        is_cached = arguments.get("kwargs", {}).get("_use_cached_eval_dataset", False)
        if not is_cached:
            others = {"class_weight": arguments.get("class_weight")}
            arguments["x"] = self._open(parts, Where(self._verb), others)
            self._take_validation(arguments)
            if are_arrays(parts):
                self._prepare = partial(self._prepare_validation, dict(arguments))
        if not are_arrays(parts) or is_on_disk(parts):
            self._checker = BatchChecker(
                self._model, self._verb, parts.x, self._check_nan
            )

    def _take_validation(self, arguments: dict[str, Any]) -> None:
        import keras

        if arguments.get("validation_data") is None:
            return
        given = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        parts = Parts(*given)
        x = self._open(parts, Where(self._verb, "validation_data"), {})
        arguments["validation_data"] = parts._replace(x=x)

    def _prepare_validation(self, arguments: dict[str, Any]) -> None:
        parts, size = validation_arrays(arguments), arguments.get("batch_size")
        if parts is None:
            return
        size = arguments.get("validation_batch_size") or size
        num_steps = arguments.get("validation_steps")
        adapted = adapt_arrays(parts, size, num_steps)
        if adapted is not None:
            data, callbacks = ArraysInMemory(*adapted), arguments.get("callbacks")
            self.pace.prepare_validation(data, num_steps, callbacks)

    def _open(self, parts: Parts, where: Where, others: dict[str, Any]) -> Any:
        if not are_arrays(parts):
            targets = {"y": parts.y, "sample_weight": parts.sample_weight}
            return open_source(parts.x, where.verb, targets | others)
        if any(True for _ in parts.leaves()):
            demands = demands_of(self._model, self._verb)
            check_arrays(parts, demands, self._model, where, self._check_nan)
            agree_on_samples(where.verb, batch_size(parts.x))
            if not self._model.built:
                self._until_built.append((in_memory(parts), where))
        return parts.x

    def keeps(self, adapter: Any) -> bool:
        """Whether the arrays behind a data adapter of Keras' stay on the devices."""
        if adapter not in self._kept:
            data = _arrays_of(adapter)
            self._kept[adapter] = data if self.pace.keeps(data) else None
        return self._kept[adapter] is not None

    def resident(self, adapter: Any) -> ResidentStream:
        """An epoch over arrays that stay on the devices."""
        if self._model.built:
            self._check_what_waited()
        data = self._kept[adapter]
        assert data is not None, "keeps has said so"
        return ResidentStream(data, partial(self.pace.choose_length, data))

    def run_stretch(self, step: Any, state: Any, stream: ResidentStream) -> Any:
        """Runs the steps that come next in a stream; returns logs and state."""
        of_each = self.pace.listeners.wants_each
        if step.measures_kernels:
            self._prepare_once()
        result = step.run_stretch(state, stream.take_stretch(), of_each)
        # The devices are at work now, so there is time.
        self._prepare_once()
        return result

    def _prepare_once(self) -> None:
        prepare, self._prepare = self._prepare, None
        if prepare is not None:
            prepare()

    def stream(self, batches: Iterator[Any], limit: int | None) -> "Stream":
        """The batches of Keras' iterator, on their way through this intake.

        Arguments:
            batches: The batches.
            limit: How many are used in an epoch at the most, if that is known.
        """
        if self._model.built:
            self._check_what_waited()
        if self._checker is not None:
            self._checker.look_at_model()
        reader = _Reader(iter(batches), self._checker)
        agreement = Agreement(self._verb) if process_count() > 1 else None
        stream = Stream(reader, limit, self._depth, agreement)
        self._streams.add(stream)
        return stream

    def _check_what_waited(self) -> None:
        """Labels can be compared with classes only when the model is built."""
        waited, self._until_built = self._until_built, []
        for parts, where in waited:
            demands = demands_of(self._model, self._verb)
            check_values(parts, demands, where, check_nan=False)


def validation_arrays(arguments: dict[str, Any]) -> Parts | None:
    """What `fit` will evaluate, if that is arrays: given, or split off the others."""
    given, share = arguments.get("validation_data"), arguments.get("validation_split")
    if given is not None:
        parts = Parts(*given)
        return parts if are_arrays(parts) else None
    if not share:
        return None
    parts = Parts(*(arguments.get(name) for name in Parts._fields))
    start = int(batch_size(parts.x) * (1.0 - share))
    return Parts(*map_leaves(lambda array: array[start:], tuple(parts)))


def _arrays_of(adapter: Any) -> ArraysInMemory | None:
    """The arrays behind a data adapter; it keeps them, so they are placed only once."""
    if not hasattr(adapter, _ARRAYS):
        behind = arrays_behind(adapter)
        is_usable = behind is not None and not is_on_disk(behind.arrays)
        data = ArraysInMemory(*behind) if behind and is_usable else None
        setattr(adapter, _ARRAYS, data)
    found: ArraysInMemory | None = getattr(adapter, _ARRAYS)
    return found


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


class _Reader:
    """Reads and checks batches, one after the other; knows nothing of its readers."""

    def __init__(self, batches: Iterator[Any], checker: BatchChecker | None) -> None:
        self._batches = batches
        self._checker = checker
        self._number = 0

    def __iter__(self) -> "_Reader":
        return self

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


class Stream:
    """Batches as they come, or put onto the mesh ahead of their use.

    Keras looks at a first batch to build a model; that one is read as it comes.
    """

    def __init__(
        self,
        reader: _Reader,
        limit: int | None,
        depth: int,
        agreement: Agreement | None,
    ) -> None:
        self._reader = reader
        self._limit = limit
        self._depth = depth
        self._agreement = agreement
        self._chunk: _Chunk | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Any:
        return _next_for_all(self._reader, self._agreement)

    def ahead(self, put: Callable[[Any], Any]) -> Iterator[Any]:
        """The batches after `put`, which a thread does ahead, but not past an epoch.

        Reading further would take batches from a generator that nobody uses.
        """
        if self._depth < 1:
            return map(put, self)
        if self._chunk is None or self._chunk.num_left == 0:
            self._chunk = _Chunk(
                self._reader, put, self._limit, self._depth, self._agreement
            )
        return self._chunk

    def close(self) -> None:
        """Ends the thread."""
        if self._chunk is not None:
            self._chunk.close()


class _Chunk:
    """The batches of one epoch, put ahead of their use."""

    def __init__(
        self,
        reader: _Reader,
        put: Callable[[Any], Any],
        limit: int | None,
        depth: int,
        agreement: Agreement | None,
    ) -> None:
        def put_batch(arrived: Arrived) -> Arrived:
            return arrived._replace(batch=put(arrived.batch))

        self.num_left = limit
        self._agreement = agreement
        self._batches = prefetch(islice(reader, limit), put_batch, depth)

    def __iter__(self) -> "_Chunk":
        return self

    def __next__(self) -> Any:
        placed = _next_for_all(self._batches, self._agreement)
        if self.num_left is not None:
            self.num_left -= 1
        return placed

    def close(self) -> None:
        """Ends the thread."""
        self._batches.close()


def _next_for_all(arriving: Iterator[Arrived], agreement: Agreement | None) -> Any:
    """The next batch, if every process has one like it."""

    def read() -> tuple[Any, int]:
        arrived = next(arriving)
        if arrived.settle is not None:
            arrived.settle()
        return arrived.batch, arrived.size

    return read()[0] if agreement is None else agreement.on(read)
