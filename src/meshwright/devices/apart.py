"""A training that has nothing to do with others that go on beside it.

Several models may be trained at the same time, each by a thread of one process, or by
one of several processes. What happens `apart` is of its thread alone: it sees no other
process, takes part in no run, and draws from random numbers of its own, as if it were
the only one.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

_turn = threading.Lock()
_chance: ContextVar["Chance | None"] = ContextVar("meshwright_chance", default=None)


class Chance:
    """NumPy's random numbers, from which Keras draws its shuffles, for one training.

    Arguments:
        state: Where they begin, as `numpy.random.get_state` gives it.
    """

    def __init__(self, state: Any) -> None:
        self.state = state

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Lets `numpy.random` draw from these inside; one training at a time."""
        with _turn:
            before = np.random.get_state()
            np.random.set_state(self.state)
            try:
                yield
            finally:
                self.state = np.random.get_state()
                np.random.set_state(before)

    def draw_all(self, values: Iterator[Any]) -> Iterator[Any]:
        """Values of an iterator that draws from `numpy.random` whenever it likes."""
        while True:
            with self.drawing():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield value


@contextlib.contextmanager
def apart(chance: Chance) -> Iterator[None]:
    """Keeps what this thread does inside to itself."""
    token = _chance.set(chance)
    try:
        yield
    finally:
        _chance.reset(token)


def is_apart() -> bool:
    """Whether what happens here is of this thread alone."""
    return _chance.get() is not None


def own_chance() -> Chance | None:
    """The random numbers of the training that this thread is at, if it is apart."""
    return _chance.get()


def drawing() -> contextlib.AbstractContextManager[None]:
    """Lets `numpy.random` draw for the training that this thread is at."""
    chance = _chance.get()
    return contextlib.nullcontext() if chance is None else chance.drawing()
