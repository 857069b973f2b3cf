"""The data that packed members share, and the order in which each goes through it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

from meshwright.cluster.randomness import random_state, set_random_state
from meshwright.data.checks import Parts, Where, check_arrays
from meshwright.data.demands import demands_of
from meshwright.data.resident import ArraysInMemory
from meshwright.data.sources import are_arrays
from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import adapt_arrays
from meshwright.errors import DataError

import jax
import numpy as np

VERB = "packed_trials"


@dataclass(frozen=True, kw_only=True)
class PackedData:
    """What all members are trained and validated on."""

    train: ArraysInMemory
    validation: ArraysInMemory | None
    parts: Parts
    """The training data as the user gave it, without what validates."""
    validation_parts: Parts | None

    def check(self, model: Any) -> None:
        """Refuses data that the model cannot work on, as `fit` does."""
        wanted = demands_of(model, "fit")
        check_arrays(self.parts, wanted, model, Where(VERB), check_nan=True)
        if self.validation_parts is not None:
            where = Where(VERB, "validation_data")
            check_arrays(self.validation_parts, wanted, model, where, check_nan=True)


def take_data(
    parts: Parts,
    batch_size: int,
    shuffle: bool,
    validation_data: Any,
    validation_split: float,
) -> PackedData:
    """The data as Keras' `fit` would take it from such arguments."""
    import keras

    given = None
    _refuse_streams(parts, "x")
    if validation_data is not None:
        given = Parts(*keras.utils.unpack_x_y_sample_weight(validation_data))
        _refuse_streams(given, "validation_data")
    elif validation_split:
        parts, given = _split(parts, validation_split)
    return PackedData(
        train=_adapt(parts, batch_size, shuffle),
        validation=None if given is None else _adapt(given, batch_size, False),
        parts=parts,
        validation_parts=given,
    )


def _refuse_streams(parts: Parts, name: str) -> None:
    if parts.x is None or not are_arrays(tuple(parts)):
        raise DataError(
            f"packed_trials received {name} of type {type(parts.x).__name__}.",
            "The members go through the same samples in orders of their own, so these "
            "are arrays in memory.",
            "Pass NumPy arrays, or containers of them.",
        )


def _split(parts: Parts, share: float) -> tuple[Parts, Parts]:
    size = next((len(leaf) for _, leaf in parts.leaves()), 0)
    # As Keras rounds it.
    at = floor(size * (1.0 - share))
    if not 0 < at < size:
        raise DataError(
            f"packed_trials received validation_split={share!r} for {size} samples, "
            f"which leaves {max(min(at, size), 0)} to train on.",
            "Both parts have at least one sample.",
            "Choose a share between 0 and 1, or pass more samples.",
        )
    before, after = slice(None, at), slice(at, None)
    return (
        Parts(*map_leaves(lambda leaf: np.asarray(leaf)[before], tuple(parts))),
        Parts(*map_leaves(lambda leaf: np.asarray(leaf)[after], tuple(parts))),
    )


def _adapt(parts: Parts, batch_size: int, shuffle: bool) -> ArraysInMemory:
    arrays = map_leaves(np.asarray, tuple(parts))
    adapted = adapt_arrays(arrays, batch_size, None)
    assert adapted is not None, "they are NumPy arrays"
    return ArraysInMemory(
        adapted.arrays, adapted.num_samples, batch_size, shuffle=shuffle
    )


class Orders:
    """The order of the samples for each member, epoch by epoch.

    Each member draws from a random state of its own, as Keras does from NumPy's in the
    member's own `fit`. Members whose states are equal share what is drawn.

    Arguments:
        data: The training data.
        states: The random state of each member before its first epoch.
    """

    def __init__(self, data: ArraysInMemory, states: Sequence[Any]) -> None:
        self._data = data
        numbers: dict[str, int] = {}
        self._states: list[Any] = []
        self._source: list[int] = []
        for state in states:
            # Only the generator that draws decides.
            key = repr(state[1]) if data.shuffle else ""
            if key not in numbers:
                numbers[key] = len(self._states)
                self._states.append(state)
            self._source.append(numbers[key])

    def are_shared(self, members: Sequence[int]) -> bool:
        """Whether these members have one order."""
        return len({self._source[member] for member in members}) == 1

    def draw(self, members: Sequence[int]) -> "np.ndarray[Any, Any]":
        """The next order: one for all if they share it, else a row for each."""
        sources = [self._source[member] for member in members]
        orders = {source: self._draw(source) for source in dict.fromkeys(sources)}
        if len(orders) == 1:
            return orders[sources[0]]
        return np.stack([orders[source] for source in sources])

    def _draw(self, source: int) -> "np.ndarray[Any, Any]":
        before = random_state()
        set_random_state(self._states[source])
        try:
            order = self._data.draw_order().astype(np.int32)
            self._states[source] = random_state()
        finally:
            set_random_state(before)
        return order


def batch_shapes(data: ArraysInMemory, size: int) -> Any:
    """The shapes of a batch."""

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(resized, data.shapes.tree)
