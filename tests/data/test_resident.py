"""Arrays that stay on the devices give the batches that Keras would make of them."""

from typing import Any

import meshwright as mw  # noqa: F401
from meshwright.data.resident import ArraysInMemory, ResidentStream, Shapes
from meshwright.data.tally import Tally

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

X = np.arange(30, dtype="float32").reshape(10, 3)
Y = np.arange(10)


def batches_of(stream: ResidentStream, num_wanted: int) -> list[Any]:
    """The batches that the steps of an epoch would gather."""
    found, num_of_epoch = [], num_wanted
    while num_wanted:
        num_wanted -= stream.settle_stretch(num_wanted, num_of_epoch)
        stretch = stream.take_stretch()
        for row in range(stretch.first, stretch.first + stretch.num_steps):
            indices = stretch.batches.arrays[row]
            found.append(tuple(array[indices] for array in stretch.data.arrays))
    return found


def assert_equal_batches(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("length", [1, 2, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 10, 16])
@pytest.mark.parametrize("shuffle", [True, False, "batch"])
def test_the_order_is_the_one_that_keras_draws(
    shuffle: bool | str, batch_size: int, length: int
) -> None:
    keras.utils.set_random_seed(3)
    data = ArraysInMemory((X, Y), 10, batch_size, shuffle)
    num_steps = -(-10 // batch_size)
    streams = [
        ResidentStream(data, lambda size, left: length, Tally()) for _ in range(2)
    ]
    ours = [batches_of(stream, num_steps) for stream in streams]
    keras.utils.set_random_seed(3)
    adapter = ArrayDataAdapter(X, Y, batch_size=batch_size, shuffle=shuffle)
    for epoch in ours:
        assert_equal_batches(epoch, list(adapter.get_numpy_iterator()))


def test_nothing_is_drawn_before_the_first_batch_is_asked_for() -> None:
    keras.utils.set_random_seed(3)
    ResidentStream(ArraysInMemory((X, Y), 10, 3, True), lambda size, left: 1, Tally())
    drawn_next = np.random.random()
    keras.utils.set_random_seed(3)
    assert np.random.random() == drawn_next


def test_a_look_at_the_first_batch_does_not_take_it() -> None:
    stream = ResidentStream(
        ArraysInMemory((X, Y), 10, 3, False), lambda size, left: 2, Tally()
    )
    assert stream.settle_stretch(4, 4) == 2
    np.testing.assert_array_equal(next(stream)[1], [0, 1, 2])
    np.testing.assert_array_equal(next(stream)[1], [0, 1, 2])
    stretch = stream.take_stretch()
    assert (stretch.first, stretch.num_steps, stretch.rest) == (0, 2, 1)


def test_a_smaller_last_batch_is_announced_only_if_the_epoch_gets_there() -> None:
    stream = ResidentStream(
        ArraysInMemory((X, Y), 10, 3, False), lambda size, left: 9, Tally()
    )
    assert stream.settle_stretch(3, 4) == 3
    assert stream.take_stretch().rest == 0
    assert stream.settle_stretch(5, 5) == 1
    last = stream.take_stretch()
    assert (last.batches.size, last.rest) == (1, 0)


def test_types_are_those_that_devices_have() -> None:
    wide = {"a": np.zeros((2, 3), "int64"), "b": np.zeros(2, "float64")}
    tree = Shapes.of(wide).tree
    assert tree["a"].shape == (2, 3)
    assert (tree["a"].dtype, tree["b"].dtype) == (np.int32, np.float32)
