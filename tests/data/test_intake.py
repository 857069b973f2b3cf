"""What `fit`, `evaluate` and `predict` take under a strategy, and when it is read."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import meshwright as mw
from meshwright.data.prefetch import THREAD_NAME
from meshwright.data.streams import StackingStream, Stream
from meshwright.errors import DataError
from meshwright.train.mesh_step import MeshStep

import keras
import numpy as np
import pytest

CPUS = ["CPU:0", "CPU:1"]
X = np.random.default_rng(0).normal(size=(20, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)
BATCHES = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)]


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse", **options)
    return model


def distributed(prefetch: int = 2, **options: Any) -> keras.Model:
    strategy = mw.Mirrored(CPUS)
    strategy.prefetch = prefetch
    return mw.distribute(make_model(**options), strategy)


def assert_equal(ours: keras.Model, theirs: keras.Model) -> None:
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def threads() -> int:
    return sum(t.name == THREAD_NAME for t in threading.enumerate())


class Loader:
    """Like a loader of PyTorch's: iterable, with a length, gives lists."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.num_iterations = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.num_iterations += 1
        for batch in self.batches:
            yield list(batch)


class Tensor:
    """A number array of another library: it only knows how to become NumPy's."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._array, dtype=dtype)


class IterDataset:
    """Like one of Grain's: iterable, without a length, gives tuples."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Sequence(keras.utils.PyDataset):
    def __init__(self, batches: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def generator(number: int = 5) -> Iterator[Any]:
    yield from (BATCHES[n % 5] for n in range(number))


def tensors() -> list[Any]:
    return [(Tensor(x), Tensor(y)) for x, y in BATCHES]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "make_data",
    [
        lambda: Loader(BATCHES),
        lambda: Loader(tensors()),
        lambda: IterDataset(BATCHES),
    ],
    ids=["loader", "tensors", "iterable"],
)
# Keras says so at the end of what has no length.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_iterables_train_as_arrays_do(make_data: Any, prefetch: int) -> None:
    reference = make_model()
    options: dict[str, Any] = {"epochs": 2, "shuffle": False, "verbose": 0}
    expected = reference.fit(
        X, Y, batch_size=4, validation_data=(X[:8], Y[:8]), **options
    )
    model = distributed(prefetch)
    validation = Loader(BATCHES[:2])
    history = model.fit(make_data(), validation_data=validation, **options)
    assert_equal(model, reference)
    for key in ("loss", "val_loss"):
        np.testing.assert_allclose(
            history.history[key], expected.history[key], rtol=1e-5
        )
    assert validation.num_iterations == 2
    scores = model.evaluate(make_data(), verbose=0)
    assert scores == pytest.approx(reference.evaluate(X, Y, verbose=0), rel=1e-5)
    np.testing.assert_allclose(
        model.predict(make_data(), verbose=0), reference.predict(X), atol=1e-6
    )
    assert not threads()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pydataset_trains_as_in_stock_keras(workers: int, shuffle: bool) -> None:
    reference, model = make_model(), distributed()
    for each in (reference, model):
        keras.utils.set_random_seed(9)
        data = Sequence(BATCHES, workers=workers)
        each.fit(data, epochs=3, shuffle=shuffle, verbose=0)
    assert_equal(model, reference)
    assert not threads()


def test_inputs_alone_are_taken_as_arrays_and_as_dicts() -> None:
    inputs = keras.Input((8,), name="features")
    model = keras.Model({"features": inputs}, keras.layers.Dense(2)(inputs))
    expected = model.predict({"features": X}, verbose=0)
    mw.distribute(model, mw.Mirrored(CPUS))
    loader = IterDataset([{"features": X[:12]}, {"features": X[12:]}])
    with pytest.warns(UserWarning, match="ran out of data"):
        found = model.predict(loader, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_shuffled_arrays_come_in_stock_keras_order(shuffle: Any) -> None:
    reference, model = make_model(), distributed()
    for each in (reference, model):
        keras.utils.set_random_seed(9)
        each.fit(X, Y, batch_size=6, epochs=3, shuffle=shuffle, verbose=0)
    assert_equal(model, reference)
    assert not threads()


def test_keras_without_a_strategy_does_not_know_an_iterable() -> None:
    distributed()
    with pytest.raises(ValueError, match="Unrecognized data type"):
        make_model().fit(Loader(BATCHES), verbose=0)


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3])
def test_a_generator_is_read_no_further_than_stock_keras_reads_it(
    steps_per_execution: int,
) -> None:
    def run(model: keras.Model) -> list[int]:
        taken: list[int] = []

        def source() -> Iterator[Any]:
            for number in range(100):
                taken.append(number)
                yield BATCHES[number % 5]

        data = source()
        options: dict[str, Any] = {"shuffle": False, "verbose": 0}
        counts = []
        for _ in range(2):
            model.fit(data, steps_per_epoch=5, epochs=2, **options)
            counts.append(len(taken))
        model.evaluate(data, steps=3, verbose=0)
        counts.append(len(taken))
        return counts

    reference = make_model(steps_per_execution=steps_per_execution)
    model = distributed(steps_per_execution=steps_per_execution)
    assert run(model) == run(reference)
    assert_equal(model, reference)


def test_a_generator_that_ends_early_warns_and_ends_training_as_in_keras() -> None:
    options: dict[str, Any] = {"steps_per_epoch": 8, "shuffle": False, "verbose": 0}
    reference, model = make_model(), distributed()
    histories = []
    for each in (reference, model):
        with pytest.warns(UserWarning, match="Your input ran out of data") as caught:
            histories.append(each.fit(generator(), **options).history["loss"])
        assert len(caught) == 1
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)
    assert_equal(model, reference)
    assert not threads()


class Empty(IterDataset):
    def __init__(self) -> None:
        super().__init__([])


@pytest.mark.parametrize(
    ("make_data", "kind"),
    [
        (lambda: generator(0), "generator"),
        (lambda: Sequence([]), "Sequence"),
        (lambda: Loader([]), "Loader"),
        (lambda: Empty(), "Empty"),
        (lambda: iter(()), "tuple_iterator"),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_data_without_a_batch_is_refused(make_data: Any, kind: str, verb: str) -> None:
    model = distributed()
    before = model.get_weights()
    with pytest.raises(DataError) as caught:
        getattr(model, verb)(make_data(), verbose=0)
    assert str(caught.value).split("\n") == [
        f"{verb} received a {kind} without a batch.",
        "Data has at least one batch.",
        "Look at where it comes from. An iterator can be gone through once only: pass "
        "an object whose __iter__ starts anew.",
    ]
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_batch_has_a_whole_number_of_samples(verb: str, size: Any) -> None:
    given = (X,) if verb == "predict" else (X, Y)
    with pytest.raises(DataError) as caught:
        getattr(distributed(), verb)(*given, batch_size=size, verbose=0)
    assert str(caught.value).split("\n") == [
        f"{verb} received batch_size={size!r} (a {type(size).__name__}).",
        "It is the number of samples of a batch, a whole number from 1.",
        "Use batch_size=32, or leave it out, which means 32.",
    ]


def test_the_batches_of_a_validation_have_samples_too() -> None:
    with pytest.raises(DataError, match="validation_batch_size=0"):
        distributed().fit(
            X, Y, validation_data=(X, Y), validation_batch_size=0, verbose=0
        )


def test_an_iterator_that_is_used_up_ends_training_as_in_keras() -> None:
    model = distributed()
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(iter(BATCHES), epochs=2, verbose=0)
    assert np.isfinite(model.predict(X, verbose=0)).all()


@pytest.mark.parametrize(
    ("batch", "words"), [((1, 2, 3, 4), "tuple of 4"), ("ab", "str of 2"), (3, "int")]
)
def test_something_that_is_no_batch_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        distributed().fit(Loader2([BATCHES[0], batch]), verbose=0)
    assert str(caught.value).split("\n") == [
        f"fit received batch 1 as a {words}.",
        "A batch is inputs alone, or a tuple (inputs, targets) or (inputs, targets, "
        "sample_weights).",
        "Let the Loader2 give such tuples of arrays.",
    ]
    assert caught.value.batch == 1


class Loader2(IterDataset):
    def __len__(self) -> int:
        return len(self.batches)


@pytest.mark.parametrize("name", ["y", "sample_weight", "class_weight"])
def test_targets_and_weights_beside_an_iterable_are_refused(name: str) -> None:
    value = {0: 1.0} if name == "class_weight" else Y
    with pytest.raises(DataError) as caught:
        distributed().fit(Loader(BATCHES), **{name: value}, verbose=0)
    assert str(caught.value).split("\n") == [
        f"fit received a Loader as x, and also {name}.",
        "Batches that are iterated bring their targets and weights along.",
        "Let every batch be (inputs, targets, sample_weights), and pass x alone.",
    ]


def test_batches_are_put_onto_the_mesh_by_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    makers: list[str] = []
    place = MeshStep._place

    def noted_place(*args: Any) -> Any:
        makers.append(threading.current_thread().name)
        return place(*args)

    monkeypatch.setattr(MeshStep, "_place", noted_place)
    model = distributed()
    model.fit(Loader(BATCHES), verbose=0)
    assert makers == [THREAD_NAME] * 3  # two, two, and the last one
    makers.clear()
    model.train_on_batch(X, Y)
    assert makers == [threading.main_thread().name]
    makers.clear()
    distributed(prefetch=0).fit(Loader(BATCHES), verbose=0)
    assert makers == [threading.main_thread().name] * 5


def test_a_placed_batch_runs_as_the_same_batch_from_the_host() -> None:
    model = distributed()
    seen = model.train_on_batch(X, Y)
    step = model.train_function.guarded
    placed = step.put((X, Y, None))
    assert placed.size == 20
    assert len(placed.arrays[0].devices()) == 2
    reference = make_model()
    assert seen == pytest.approx(reference.train_on_batch(X, Y), rel=1e-5)


@pytest.mark.parametrize("end", ["stop", "callback error", "source error"])
def test_the_thread_ends_with_the_run(end: str) -> None:
    def source() -> Iterator[Any]:
        yield from BATCHES[:3]
        if end == "source error":
            raise OSError("disk on fire")
        while True:
            yield BATCHES[0]

    class Ender(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert threads() == 1 or end == "source error"
            if batch == 2 and end == "stop":
                self.model.stop_training = True
            if batch == 2 and end == "callback error":
                raise OSError("disk on fire")

    model = distributed()
    reference = make_model()
    for batch in BATCHES[:3]:
        reference.train_on_batch(*batch)

    def run() -> None:
        options: dict[str, Any] = {"steps_per_epoch": 9, "shuffle": False}
        model.fit(source(), callbacks=[Ender()], verbose=0, **options)

    if end == "stop":
        run()
    else:
        with pytest.raises(OSError, match="disk on fire"):
            run()
    assert not threads()
    # The weights are those after the last step.
    assert_equal(model, reference)


class Failing(IterDataset):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("disk on fire")


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_fails_at_once_leaves_the_model_alone(
    verb: str, prefetch: int
) -> None:
    model = distributed(prefetch)
    model.evaluate(X, Y, verbose=0)  # so that Keras needs no batch to build it
    before = model.get_weights()
    with pytest.raises(OSError, match="disk on fire"):
        getattr(model, verb)(Failing([]), verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_another_model_inside_of_a_run_is_left_to_keras() -> None:
    other, own = make_model(), make_model()
    expected = own.predict(X, verbose=0)
    found: list[Any] = []

    class Asking(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append(other.predict(X, verbose=0))
            with pytest.raises(ValueError, match="Unrecognized data type"):
                other.evaluate(Loader(BATCHES), verbose=0)

    distributed().fit(X, Y, batch_size=10, callbacks=[Asking()], verbose=0)
    assert len(found) == 2
    np.testing.assert_allclose(found[1], expected, atol=1e-6)


def test_epochs_that_are_over_leave_nothing_behind() -> None:
    alive: list[int] = []

    class Counter(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            gc.collect()
            alive.append(
                sum(isinstance(o, Stream | StackingStream) for o in gc.get_objects())
            )

    source = Loader(BATCHES)
    distributed().fit(source, epochs=6, callbacks=[Counter()], verbose=0)
    assert alive[-1] == alive[1] > 0
