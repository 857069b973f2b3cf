"""Batches that are made ready in a thread, ahead of their use.

The thread holds nothing of the consumer's, so that a consumer that is dropped is
collected, and takes the thread with it.
"""

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")
Placed = TypeVar("Placed")

THREAD_NAME = "meshwright-prefetch"
"""The name of the thread, for who lists threads."""

PATIENCE = 2.0
"""Seconds that `close` waits for a source that does not answer."""


def prefetch(
    source: Iterator[Batch], put: Callable[[Batch], Placed], depth: int = 2
) -> "Prefetch[Placed]":
    """Yields `put(batch)` for every batch; a thread computes it ahead of its use.

    Arguments:
        source: The batches; read by the thread only, one after the other.
        put: What to do with each.
        depth: How many results are ready or in the making at the most, from 1.

    Returns:
        An iterator. An exception of `source` or `put` is raised where its batch would
        have come. `close` stops the thread, as does dropping the iterator.

    >>> list(prefetch(iter([1, 2, 3]), lambda batch: 10 * batch))
    [10, 20, 30]
    """
    return Prefetch(source, put, depth)


class Prefetch(Generic[Placed]):
    """The iterator that `prefetch` returns."""

    def __init__(
        self, source: Iterator[Any], put: Callable[[Any], Placed], depth: int
    ) -> None:
        assert depth >= 1, "without room the thread would wait forever"
        self._belt = _Belt(depth)
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(_fill, self._belt, source, put),
            name=THREAD_NAME,
            daemon=True,
        )
        # Called when this is collected, and when the interpreter ends.
        self._stop = weakref.finalize(self, self._belt.stop)
        self._thread.start()

    def __iter__(self) -> "Prefetch[Placed]":
        return self

    def __next__(self) -> Placed:
        return self._belt.take()

    def close(self) -> None:
        """Stops the thread; one whose source is waiting ends when that answers."""
        self._stop()
        self._thread.join(PATIENCE)


class _Belt:
    """Results on their way from the thread to the consumer."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._changed = threading.Condition()
        self._results: deque[Any] = deque()
        self._error: BaseException | None = None
        self._is_complete = False
        self._is_stopped = False

    def wait_for_room(self) -> bool:
        """Waits until another result is wanted; False if none ever will be."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or len(self._results) < self._depth
            )
            return not self._is_stopped

    def add(self, result: Any) -> None:
        """Puts a result on the belt."""
        with self._changed:
            if not self._is_stopped:
                self._results.append(result)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Says that nothing comes any more, because of an error or as it should be."""
        with self._changed:
            self._error = error
            self._is_complete = True
            self._changed.notify_all()

    def take(self) -> Any:
        """Waits for the next result; raises the error, and StopIteration after it."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._is_complete)
            if self._results:
                self._changed.notify_all()
                return self._results.popleft()
            error, self._error = self._error, None
        try:
            raise StopIteration if error is None else error
        finally:
            del error  # or its traceback would hold itself

    def stop(self) -> None:
        """Lets go of everything; whoever waits wakes up."""
        with self._changed:
            self._is_stopped = True
            self._results.clear()
        self.end()


def _fill(belt: _Belt, source: Iterator[Any], put: Callable[[Any], Any]) -> None:
    try:
        while belt.wait_for_room():
            try:
                batch = next(source)
            except StopIteration:
                break
            belt.add(put(batch))
    except BaseException as error:
        belt.end(error)
    else:
        belt.end()
