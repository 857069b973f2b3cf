"""`tf.data.Dataset`."""

from typing import Any

from meshwright import tf

import keras
import numpy as np
import pytest

Dataset = tf.data.Dataset


def values(dataset: tf.data.Dataset) -> list[Any]:
    return [np.asarray(element).tolist() for element in dataset.as_numpy_iterator()]


def test_elements_are_chained() -> None:
    numbers = Dataset.range(10)
    assert values(numbers.map(lambda x: x * 2).take(2)) == [0, 2]
    assert values(numbers.skip(8).repeat(2)) == [8, 9, 8, 9]
    assert values(numbers.batch(4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert values(numbers.batch(4, drop_remainder=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert values(numbers.batch(4).unbatch()) == list(range(10))
    assert values(numbers.filter(lambda x: x > 7)) == [8, 9]
    assert values(numbers.shard(3, 1)) == [1, 4, 7]
    assert values(Dataset.range(2).concatenate(Dataset.range(3))) == [0, 1, 0, 1, 2]
    assert [n for n, _ in numbers.enumerate(5).take(2)] == [5, 6]
    assert values(Dataset.zip((numbers, numbers)).map(lambda x, y: x + y).take(2)) == [
        0,
        2,
    ]
    assert numbers.reduce(0, lambda total, x: total + x).numpy() == 45
    assert values(numbers.apply(lambda dataset: dataset.take(1))) == [0]
    assert values(Dataset.from_tensors([1, 2])) == [[1, 2]]
    assert values(numbers.take(0)) == []


def test_lengths_are_known_where_they_can_be() -> None:
    numbers = Dataset.range(10)
    assert len(numbers.batch(4)) == len(numbers.batch(4).repeat(1)) == 3
    assert len(numbers.shuffle(3).prefetch(tf.data.AUTOTUNE).cache()) == 10
    assert len(numbers.repeat().take(7)) == 7
    assert numbers.repeat().cardinality().numpy() == tf.data.INFINITE_CARDINALITY
    with pytest.raises(TypeError, match="infinite"):
        len(numbers.repeat())
    with pytest.raises(TypeError, match="unknown"):
        len(Dataset.from_generator(lambda: iter([1])))


def test_shuffling_follows_its_seed_and_loses_nothing() -> None:
    mixed = Dataset.range(20).shuffle(20, seed=1)
    first, second = values(mixed), values(mixed)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert values(Dataset.range(20).shuffle(20, seed=1)) == first
    same = Dataset.range(20).shuffle(5, seed=1, reshuffle_each_iteration=False)
    assert values(same) == values(same)


def test_what_is_cached_is_computed_once() -> None:
    calls = []

    def generate() -> Any:
        calls.append(1)
        yield from range(3)

    cached = Dataset.from_generator(generate).cache()
    assert values(cached) == values(cached) == [0, 1, 2]
    assert len(calls) == 1


def test_trees_and_their_specs() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.ones((4, 2)), "y": [1, 2, 3, 4]})
    assert dataset.element_spec["x"] == tf.TensorSpec((2,), tf.float32)
    assert dataset.batch(3).element_spec["x"].shape == (None, 2)
    with pytest.raises(ValueError, match="All have the same number of rows"):
        Dataset.from_tensor_slices(([1], [1, 2]))
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        dataset.batch(0)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = "OFF"
    assert len(dataset.with_options(options)) == 4


def test_fit_takes_a_dataset_with_and_without_a_strategy() -> None:
    x = np.random.default_rng(0).random((12, 2), "float32")
    dataset = Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    alone = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    alone.compile("sgd", "mse")
    history = alone.fit(dataset, validation_data=dataset, epochs=2, verbose=0)
    assert len(history.history["val_loss"]) == 2
    assert alone.evaluate(dataset, verbose=0) == pytest.approx(
        alone.evaluate(x, x[:, :1], batch_size=4, verbose=0), rel=1e-5
    )
    assert alone.predict(dataset, verbose=0).shape == (12, 1)
    only_x = Dataset.from_tensor_slices(x).batch(5)
    assert alone.predict(only_x, verbose=0).shape == (12, 1)
