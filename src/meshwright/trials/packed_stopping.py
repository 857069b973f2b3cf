"""Early stopping of packed members: each has a copy of the callback."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.errors import PackedTrialsError

Weights = list[Any]


class EarlyStops:
    """The copies of the callbacks of all members.

    Arguments:
        callbacks: What the user passed; all of it is `keras.callbacks.EarlyStopping`.
        model: The model that stands for all, whose metrics are looked at.
        number: How many members there are.
    """

    def __init__(self, callbacks: Sequence[Any], model: Any, number: int) -> None:
        self._members = [_Listening(callbacks, model) for _ in range(number)]

    def end_epoch(
        self,
        member: int,
        epoch: int,
        logs: dict[str, float],
        get_weights: Callable[[], Weights],
    ) -> bool:
        """Tells the callbacks of a member what it logged; returns whether it stops."""
        return self._members[member].end_epoch(epoch, logs, get_weights)

    def end(self, member: int, get_weights: Callable[[], Weights]) -> Weights:
        """The weights with which a member ends: its last, or its best if wanted."""
        return self._members[member].end(get_weights)


def refuse_other_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuses callbacks that cannot be had for each member."""
    import keras

    for callback in callbacks:
        if type(callback) is not keras.callbacks.EarlyStopping:
            raise PackedTrialsError(
                f"packed_trials received a callback of type {type(callback).__name__}.",
                "Members are trained an epoch at a time, all at once, and have no "
                "model that a callback could look at: EarlyStopping alone is "
                "followed, by each member for itself.",
                "Leave the callback out, look at the results' histories, or train "
                "this model by itself.",
            )


class _Listening:
    """What takes a model's place for the callbacks of one member."""

    def __init__(self, callbacks: Sequence[Any], model: Any) -> None:
        self.metrics = model.metrics
        self.stop_training = False
        self.get_weights: Callable[[], Weights] = list
        self._set: Weights | None = None
        self._callbacks = [copy.copy(callback) for callback in callbacks]
        for callback in self._callbacks:
            callback.set_model(self)
            callback.on_train_begin()

    def set_weights(self, weights: Weights) -> None:
        """Keeps what a callback restores."""
        self._set = weights

    def end_epoch(
        self, epoch: int, logs: dict[str, float], get_weights: Callable[[], Weights]
    ) -> bool:
        self.get_weights = get_weights
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)
        return self.stop_training

    def end(self, get_weights: Callable[[], Weights]) -> Weights:
        for callback in self._callbacks:
            callback.on_train_end()
        return get_weights() if self._set is None else self._set
