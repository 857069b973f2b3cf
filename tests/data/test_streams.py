"""Batches of a stream that are dispatched several at a time are the same batches."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import meshwright as mw
from meshwright.data.streams import Arrived, gather_stacks
from meshwright.errors import DataError

import keras
import numpy as np
import pytest

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 6)).astype("float32")
Y = RNG.integers(0, 3, 80).astype("int32")
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 80, 8)]
MANY = {"steps_per_epoch": 10, "shuffle": False, "verbose": 0}


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(12, activation="relu"), keras.layers.Dropout(0.3)]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **options)
    return model


def distributed(**options: Any) -> tuple[keras.Model, mw.Mirrored]:
    strategy = mw.Mirrored([f"CPU:{i}" for i in range(4)], **options)
    return mw.distribute(make_model(), strategy), strategy


def assert_equal(ours: keras.Model, theirs: keras.Model) -> None:
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def batches(number: int) -> Iterator[Any]:
    yield from (BATCHES[n % 10] for n in range(number))


def test_a_generator_trains_as_with_stock_keras() -> None:
    theirs, (ours, strategy) = make_model(), distributed()
    expected = theirs.fit(batches(20), epochs=2, **MANY)
    found = ours.fit(batches(20), epochs=2, **MANY)
    assert "5 at a time" in str(strategy.pace["fit"])
    assert_equal(ours, theirs)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)


def test_a_generator_is_evaluated_as_with_stock_keras() -> None:
    (ours, strategy), theirs = distributed(), make_model()
    found = ours.evaluate(batches(10), steps=10, verbose=0)
    assert "5 at a time" in str(strategy.pace["evaluate"])
    np.testing.assert_allclose(
        found, theirs.evaluate(batches(10), steps=10, verbose=0), rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")
def test_microbatches_of_stacked_batches_are_those_of_single_ones() -> None:
    (ours, strategy), (theirs, one_by_one) = (distributed(accumulate=3) for _ in "ab")
    one_by_one.prefetch = 0
    ours.fit(batches(10), **MANY)
    theirs.fit(batches(10), **MANY)
    assert "5 at a time" in str(strategy.pace["fit"])
    assert "prefetch=0" in str(one_by_one.pace["fit"])
    assert_equal(ours, theirs)


class Reusing:
    """Iterable, and every batch is in the same arrays."""

    def __iter__(self) -> Iterator[Any]:
        x, y = np.empty((8, 6), "float32"), np.empty(8, "int32")
        for batch in BATCHES:
            x[:], y[:] = batch
            yield x, y


class Watch(keras.callbacks.Callback):
    """Wants to see the model after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("callbacks", [[], [Watch()]])
def test_a_source_may_use_its_arrays_again(prefetch: int, callbacks: list[Any]) -> None:
    theirs, (ours, strategy) = make_model(), distributed()
    strategy.prefetch = prefetch
    theirs.fit(batches(10), **MANY)
    ours.fit(Reusing(), callbacks=callbacks, **MANY)
    assert_equal(ours, theirs)


def test_shapes_may_change_at_any_time() -> None:
    sizes = [8, 8, 8, 4, 8, 8, 8, 8, 8, 2]

    def changing() -> Iterator[Any]:
        for (x, y), size in zip(BATCHES, sizes, strict=True):
            yield x[:size], y[:size]

    theirs, (ours, strategy) = make_model(), distributed()
    theirs.fit(changing(), **MANY)
    ours.fit(changing(), **MANY)
    assert "5 at a time" in str(strategy.pace["fit"])
    assert_equal(ours, theirs)


def test_the_end_of_a_stream_of_unknown_length_is_trained_too() -> None:
    theirs, (ours, strategy) = make_model(), distributed()
    with pytest.warns(UserWarning, match="ran out of data"):
        theirs.fit(batches(37), shuffle=False, verbose=0)
    with pytest.warns(UserWarning, match="ran out of data"):
        ours.fit(batches(37), shuffle=False, verbose=0)
    assert "32 at a time" in str(strategy.pace["fit"])
    assert ours.optimizer.iterations == 37
    assert_equal(ours, theirs)


def test_a_stream_that_ends_early_is_trained_as_far_as_it_goes() -> None:
    theirs, (ours, _) = make_model(), distributed()
    with pytest.warns(UserWarning, match="ran out of data"):
        expected = theirs.fit(batches(17), epochs=2, **MANY)
    with pytest.warns(UserWarning, match="ran out of data"):
        found = ours.fit(batches(17), epochs=2, **MANY)
    assert ours.optimizer.iterations == 17
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], 1e-5)
    assert_equal(ours, theirs)


def test_what_came_before_an_error_is_trained() -> None:
    def failing() -> Iterator[Any]:
        yield from batches(8)
        raise OSError("disk on fire")

    (ours, _), theirs = distributed(), make_model()
    theirs.fit(batches(8), **MANY | {"steps_per_epoch": 8})
    with pytest.raises(OSError, match="disk on fire"):
        ours.fit(failing(), **MANY)
    assert ours.optimizer.iterations == 8
    assert_equal(ours, theirs)


def test_a_bad_batch_in_a_stack_is_refused_by_its_number() -> None:
    def bad() -> Iterator[Any]:
        yield from batches(7)
        yield X[:8] * np.nan, Y[:8]

    ours, _ = distributed()
    with pytest.raises(DataError, match=r"fit received batch 7 with x\[0, 0\] = nan"):
        ours.fit(bad(), **MANY)
    assert ours.optimizer.iterations == 7


def test_as_many_batches_are_read_as_keras_would_read() -> None:
    """Keras executes several steps also where fewer are wanted."""
    numbers = []
    for model in (make_model(steps_per_execution=4), distributed()[0]):
        model.steps_per_execution = 4
        source = batches(40)
        model.fit(source, epochs=2, **MANY | {"steps_per_epoch": 6})
        numbers.append((40 - len(list(source)), int(model.optimizer.iterations)))
    assert numbers == [(16, 16)] * 2


def arriving(*sizes: int) -> Iterator[Arrived]:
    for number, size in enumerate(sizes):
        yield Arrived((np.full(size, number), None), None, size)


@pytest.mark.parametrize(
    ("sizes", "numbers"),
    [
        ((), []),
        ((2, 2, 2), [3]),
        ((2, 2, 2, 2, 2, 2, 2), [3, 3, 1]),
        ((2, 2, 4, 2, 2, 2), [1, 1, 1, 3]),
        ((4, 2, 2, 2, 1), [1, 3, 1]),
    ],
)
def test_batches_of_the_same_shapes_make_stacks(
    sizes: tuple[int, ...], numbers: list[int]
) -> None:
    stacks = list(gather_stacks(arriving(*sizes), 3))
    assert [stack.number for stack in stacks] == numbers
    seen = [number for stack in stacks for number in stack.batch[0].ravel()]
    assert seen == [n for n, size in enumerate(sizes) for _ in range(size)]


def test_every_batch_of_a_stack_is_settled() -> None:
    settled: list[int] = []
    checks = [partial(settled.append, number) for number in range(3)]
    source = (Arrived((np.zeros(2),), check, 2) for check in checks)
    (stack,) = gather_stacks(source, 3)
    assert stack.settle is not None
    stack.settle()
    assert settled == [0, 1, 2]


def test_a_first_batch_of_a_wrong_shape_is_refused_before_a_step_is_traced() -> None:
    ours, _ = distributed()
    ours.fit(batches(10), **MANY)  # so that Keras looks at no batch beforehand

    def wrong() -> Iterator[Any]:
        yield X[:8, :5], Y[:8]

    with pytest.raises(DataError, match=r"fit received batch 0 with x of shape"):
        ours.fit(wrong(), **MANY)
