"""What the data of one `fit`, `evaluate` or `predict` goes through.

Arrays are checked before Keras starts; streams batch by batch as they arrive.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from meshwright.cluster.identity import process_count
from meshwright.cluster.randomness import share_random_state
from meshwright.data.agreement import Agreement, agree_on_arrays
from meshwright.data.checks import (
    Parts,
    Where,
    check_arrays,
    check_values,
    in_memory,
    is_on_disk,
)
from meshwright.data.course import Course, Start
from meshwright.data.demands import demands_of
from meshwright.data.resident import ArraysInMemory, ResidentStream
from meshwright.data.sources import are_arrays, open_source
from meshwright.data.streams import (
    BatchChecker,
    Reader,
    StackingStream,
    Stream,
    Turnstile,
)
from meshwright.data.tally import Tally
from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import adapt_arrays, arrays_behind
from meshwright.devices.sizes import is_count
from meshwright.devices.step import batch_size
from meshwright.errors import DataError

_ARRAYS = "_meshwright_arrays"


class Pace(Protocol):
    """How the steps of the call are dispatched."""

    listeners: Any

    @property
    def step(self) -> Any:
        """The step, or None as long as there is none."""

    def listen(self, callbacks: Any) -> None:
        """Looks at what the callbacks want."""

    def keeps(self, data: ArraysInMemory | None) -> bool:
        """Whether arrays stay on the devices."""

    def stacks(self, depth: int) -> bool:
        """Whether batches from the host may be dispatched several at a time."""

    def choose_length(self, data: ArraysInMemory, size: int, num_left: int) -> int:
        """How many of the steps that are left are dispatched together."""

    def choose_stack(self, batch: Any, num_left: int | None) -> int:
        """How many batches like this one are dispatched together."""

    def prepare_validation(
        self, data: ArraysInMemory, num_steps: int | None, callbacks: Any
    ) -> None:
        """Begins to compile what `evaluate` will need inside of `fit`."""


class Watch(Protocol):
    """Who wants to know when steps begin and end."""

    def enter_epoch(self) -> None:
        """Called before the first step of an epoch."""

    def before_steps(self, num_steps: int) -> None:
        """Called before steps are dispatched."""

    def see(self, logs: Any) -> None:
        """Called with what the dispatch returned."""

    def close(self, *, waits: bool) -> None:
        """Called at the end."""


class Intake:
    """The data of one call of `fit`, `evaluate` or `predict`.

    Used as a context: its threads end with it.

    Attributes:
        course: What a run takes part in while its steps go on.
    """

    def __init__(
        self,
        model: Any,
        verb: str,
        pace: Pace,
        course: Course,
        *,
        tally: Tally | None = None,
        watch: Watch | None = None,
        check_nan: bool = True,
        depth: int = 2,
    ) -> None:
        self.pace = pace
        self.course = course
        self._model = model
        self._verb = verb
        self._check_nan = check_nan
        self._depth = depth
        self._tally = tally or Tally()
        self._watch = watch
        self._checker: BatchChecker | None = None
        self._until_built: list[tuple[Parts, Where]] = []
        # Each holds the order of its epoch, so they go when Keras lets go of them.
        self._streams: WeakSet[Stream | StackingStream] = WeakSet()
        self._kept: dict[Any, ArraysInMemory | None] = {}
        self._prepare: Callable[[], None] | None = None

    def __enter__(self) -> "Intake":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        for stream in list(self._streams):
            stream.close()
        if self._watch is not None:
            self._watch.close(waits=kind is None)

    def enter_epoch(self, num_steps: int | None, num_batches: int | None) -> Start:
        """Where the epoch that begins now starts."""
        start = self.course.enter_epoch(num_steps, num_batches)
        if self._watch is not None:
            self._watch.enter_epoch()
        return start

    def before_steps(self, first: int, num_steps: int) -> None:
        """Called before steps are dispatched."""
        self.course.before_steps(first, num_steps)
        if self._watch is not None:
            self._watch.before_steps(num_steps)

    def see(self, logs: Any) -> None:
        """Called with what the dispatch returned."""
        self.course.see(logs)
        if self._watch is not None:
            self._watch.see(logs)

    def take(self, arguments: dict[str, Any]) -> None:
        """Checks the arguments of the call, and replaces what Keras does not know."""
        for name in ("batch_size", "validation_batch_size"):
            _check_size(self._verb, name, arguments.get(name))
        share_random_state()
        self.pace.listen(arguments.get("callbacks"))
        parts = Parts(*(arguments.get(name) for name in Parts._fields))
        is_cached = arguments.get("kwargs", {}).get("_use_cached_eval_dataset", False)
        if not is_cached:
            others = {"class_weight": arguments.get("class_weight")}
            arguments["x"] = self._open(parts, Where(self._verb), others)
            self._take_validation(arguments)
            if are_arrays(parts):
                self.course.see_arrays(tuple(parts))
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
            agree_on_arrays(where.verb, tuple(parts))
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
        choose_length = partial(self.pace.choose_length, data)
        return ResidentStream(data, choose_length, self._tally)

    def stretches(self, adapter: Any) -> bool:
        """Whether steps are dispatched several at a time, as streams settle."""
        return self.keeps(adapter) or self.pace.stacks(self._depth)

    def run_stretch(
        self, step: Any, state: Any, stream: ResidentStream | StackingStream
    ) -> Any:
        """Runs the steps that come next in a stream; returns logs and state."""
        of_each = self.pace.listeners.wants_each
        if isinstance(stream, StackingStream):
            return step.run_placed(state, stream.take_stretch(), of_each)
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

    def stream(
        self, batches: Iterator[Any], limit: int | None, has_tail: bool
    ) -> Stream | StackingStream:
        """The batches of Keras' iterator, on their way through this intake.

        Arguments:
            batches: The batches.
            limit: How many are used in an epoch at the most, if that is known.
            has_tail: Whether it is known that the last of these is smaller.
        """
        if self._model.built:
            self._check_what_waited()
        if self._checker is not None:
            self._checker.look_at_model()
        reader = Reader(iter(batches), self._checker)
        agreement = Agreement(self._verb) if process_count() > 1 else None
        turnstile = Turnstile(agreement, self._tally)
        stream: Stream | StackingStream
        if self.pace.stacks(self._depth):
            stream = StackingStream(reader, self._depth, turnstile, self.pace, has_tail)
        else:
            stream = Stream(reader, limit, self._depth, turnstile)
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


def _check_size(verb: str, name: str, size: Any) -> None:
    """Refuses what is no number of samples; Keras takes 0 for 32."""
    if size is None or (is_count(size) and size > 0):
        return
    raise DataError(
        f"{verb} received {name}={size!r} (a {type(size).__name__}).",
        "It is the number of samples of a batch, a whole number from 1.",
        f"Use {name}=32, or leave it out, which means 32.",
    )
