"""The data that packed members share, and the order in which each goes through it."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import floor
from typing import Any

from meshwright.data.checks import Parts, Where, check_arrays, equal_length
from meshwright.data.demands import demands_of
from meshwright.data.resident import ArraysInMemory
from meshwright.devices.containers import map_leaves
from meshwright.devices.keras_hooks import adapt_arrays
from meshwright.errors import DataError

import jax
import numpy as np

VERB = "packed_trials"

RandomState = Any
"""That of NumPy's generator, from which Keras draws the order of samples."""

Shuffler = np.random.RandomState | np.random.Generator


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
    equal_length(parts.leaves(), Where(VERB))
    if validation_data is not None:
        given = Parts(*keras.utils.unpack_x_y_sample_weight(validation_data))
        _refuse_streams(given, "validation_data")
        equal_length(given.leaves(), Where(VERB, "validation_data"))
    elif validation_split:
        parts, given = _split(parts, validation_split)
    return PackedData(
        train=_adapt(parts, batch_size, shuffle),
        validation=None if given is None else _adapt(given, batch_size, False),
        parts=parts,
        validation_parts=given,
    )


def _refuse_streams(parts: Parts, name: str) -> None:
    are_arrays = all(hasattr(leaf, "__array__") for _, leaf in parts.leaves())
    if parts.x is None or not are_arrays:
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

    Each member draws from a generator of its own, in the state in which NumPy's own is
    when the member's `fit` would draw from it. Members whose states are equal share
    what is drawn.

    Arguments:
        data: The training data.
        states: NumPy's random state before the first epoch of each member.
    """

    def __init__(self, data: ArraysInMemory, states: Sequence[RandomState]) -> None:
        self._data = data
        self._generators: list[Shuffler] = []
        self._source: list[int] = []
        numbers: dict[Any, int] = {}
        for state in states:
            _, keys, position, *_ = state
            key = (keys.tobytes(), position) if data.shuffle else None
            if key not in numbers:
                numbers[key] = len(self._generators)
                self._generators.append(_shuffler(state))
            self._source.append(numbers[key])

    def draw(self, members: Sequence[int]) -> "np.ndarray[Any, Any]":
        """The next order: one for all if they share it, else a row for each."""
        sources = [self._source[member] for member in members]
        rows = {source: row for row, source in enumerate(sources)}
        if len(rows) == 1:
            return self._draw(sources[0])
        orders = np.empty((len(sources), self._data.num_samples), np.int32)

        def draw(source: int) -> None:
            orders[rows[source]] = self._draw(source)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(draw, rows))
        for row, source in enumerate(sources):
            if row != rows[source]:
                orders[row] = orders[rows[source]]
        return orders

    def _draw(self, source: int) -> "np.ndarray[Any, Any]":
        number = self._data.num_samples
        if not self._data.shuffle:
            return np.arange(number, dtype=np.int32)
        return self._generators[source].permutation(number).astype(np.int32)


def _shuffler(state: RandomState) -> Shuffler:
    """A generator that goes on from a random state as NumPy's own would."""
    old = np.random.RandomState()
    old.set_state(state)
    return _newer(old) if _shuffles_alike() else old


def _newer(old: np.random.RandomState) -> np.random.Generator:
    """The same as NumPy's newer class, which lets other threads draw meanwhile."""
    bits = np.random.MT19937()
    state: Any = old.get_state(legacy=False)
    bits.state = state
    return np.random.Generator(bits)


@cache
def _shuffles_alike() -> bool:
    """Whether both classes of this NumPy draw the same, which it does not promise."""
    old = np.random.RandomState(0)
    new = _newer(old)
    sizes = (1, 2, 1000, 1025, 3)
    return all((old.permutation(n) == new.permutation(n)).all() for n in sizes)


def batch_shapes(data: ArraysInMemory, size: int) -> Any:
    """The shapes of a batch."""

    def resized(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)

    return jax.tree.map(resized, data.shapes.tree)
