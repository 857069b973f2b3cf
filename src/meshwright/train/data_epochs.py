"""Data sets that change from epoch to epoch, and how they get there again.

A `PyDataset` may draw a new order in `on_epoch_end`. What it keeps for that can be
large and is its own affair, so it is not saved: the methods are called again, each with
the random state that it had.
"""

from typing import Any

from meshwright.cluster.randomness import random_state, set_random_state


class DataEpochs:
    """The epochs of one data set in one `fit`.

    Arguments:
        source: What was given to `fit` as its data.
        states: The random states before the calls of before, if there were any.
    """

    def __init__(self, source: Any, states: list[Any] | None = None) -> None:
        self._source = source if _changes(source) else None
        self.states: list[Any] = []
        self._missed = states or []

    def begin(self, adapter: Any) -> None:
        """Begins an epoch; the first time, it goes through those of before."""
        if self._missed:
            *before, current = self._missed
            self._go_through(before)
            set_random_state(current)
            self._missed = []
        self._note()
        adapter.on_epoch_begin()

    def end(self, adapter: Any) -> None:
        """Ends an epoch."""
        self._note()
        adapter.on_epoch_end()

    def go_through_all(self) -> None:
        """Goes through the epochs of before, all of which have ended."""
        self._go_through(self._missed)

    def _note(self) -> None:
        if self._source is not None:
            self.states.append(random_state())

    def _go_through(self, states: list[Any]) -> None:
        if self._source is None:
            return
        for number, state in enumerate(states):
            set_random_state(state)
            if number % 2:
                self._source.on_epoch_end()
            else:
                self._source.on_epoch_begin()
        self.states = list(states)


def _changes(source: Any) -> bool:
    import keras

    base = keras.utils.PyDataset
    return isinstance(source, base) and (
        type(source).on_epoch_begin is not base.on_epoch_begin
        or type(source).on_epoch_end is not base.on_epoch_end
    )
