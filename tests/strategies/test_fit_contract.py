"""Keras' contract of fit, evaluate and predict, kept on a mesh as on one device."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import meshwright as mw

import keras
import numpy as np
import pytest

from conftest import Run

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")

X = np.random.default_rng(0).normal(size=(22, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(22, 4)).astype(np.float32)
CALLBACKS = keras.callbacks


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(16), keras.layers.Dropout(0.2), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return model


def distributed(**options: Any) -> keras.Model:
    return mw.distribute(make_model(**options), mw.Hybrid(2, 2, 2))


def fit(model: keras.Model, **options: Any) -> Any:
    keras.utils.set_random_seed(4)
    given = {"x": X, "y": Y, "batch_size": 8, "epochs": 4, "verbose": 0, **options}
    return model.fit(**given)


def assert_same(model: keras.Model, reference: keras.Model) -> None:
    assert float(model.optimizer.learning_rate) == pytest.approx(
        float(reference.optimizer.learning_rate)
    )
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def assert_same_history(found: Any, expected: Any) -> None:
    assert found.epoch == expected.epoch
    assert list(found.history) == list(expected.history)
    for key, values in expected.history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-4, err_msg=key)


class StopInSecondEpoch(keras.callbacks.Callback):
    """Stops in the middle of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = (self.epoch, batch) == (1, 1)


def batches() -> Iterator[Any]:
    while True:
        yield from ((X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16))


Options = Callable[[], dict[str, Any]]
OPTIONS: dict[str, Options] = {
    "validation split": lambda: {"validation_split": 0.3},
    "validation every second epoch": lambda: {
        "validation_data": (X[:7], Y[:7]),
        "validation_freq": 2,
        "validation_batch_size": 5,
    },
    "validation of some steps": lambda: {
        "validation_data": (X, Y),
        "validation_steps": 1,
    },
    "initial epoch": lambda: {"initial_epoch": 2},
    "a generator": lambda: {
        **{"x": batches(), "y": None, "batch_size": None},
        **{"steps_per_epoch": 5, "shuffle": False},
    },
    "best weights": lambda: {
        "validation_data": (X[:7], -9 * Y[:7]),
        "callbacks": [CALLBACKS.EarlyStopping(patience=1, restore_best_weights=True)],
    },
    "a plateau": lambda: {
        "callbacks": [
            CALLBACKS.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=9.0)
        ]
    },
    "a schedule": lambda: {
        "callbacks": [CALLBACKS.LearningRateScheduler(lambda e, r: r / (e + 1))]
    },
    "a stop within an epoch": lambda: {"callbacks": [StopInSecondEpoch()]},
    "no shuffling": lambda: {"shuffle": False},
    "sample weights": lambda: {"sample_weight": np.linspace(0, 2, 22)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fit_does_what_stock_keras_does_with(name: str) -> None:
    reference, model = make_model(), distributed()
    expected = fit(reference, **OPTIONS[name]())
    found = fit(model, **OPTIONS[name]())
    assert_same_history(found, expected)
    assert_same(model, reference)


def test_several_steps_per_execution_are_the_same_steps() -> None:
    seen: dict[str, list[int]] = {"alone": [], "mesh": []}

    def watch(key: str) -> Any:
        return CALLBACKS.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen[key].append(batch)
        )

    reference = make_model(steps_per_execution=2)
    model = distributed(steps_per_execution=2)
    expected = fit(reference, callbacks=[watch("alone")])
    assert_same_history(fit(model, callbacks=[watch("mesh")]), expected)
    assert_same(model, reference)
    assert seen["mesh"] == seen["alone"]
    assert len(seen["mesh"]) == 2 * 4
    outputs = reference.predict(X, batch_size=5, verbose=0)
    found = model.predict(X, batch_size=5, verbose=0)
    np.testing.assert_allclose(found, outputs, atol=1e-5)


class Watch(keras.callbacks.Callback):
    """Notes every call, and the loss and weights after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.numbers: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"next {batch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"batch {batch} {sorted(logs)}")
        sums = [weight.sum() for weight in self.model.get_weights()]
        self.numbers.append([logs["loss"], *sums])

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(f"test {batch} {sorted(logs)}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"end {sorted(logs)}")

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("over")


def test_callbacks_see_the_logs_and_weights_of_every_batch() -> None:
    expected, found = Watch(), Watch()
    for model, watch in ((make_model(), expected), (distributed(), found)):
        fit(model, callbacks=[watch], epochs=2, validation_data=(X[:7], Y[:7]))
    assert found.calls == expected.calls
    np.testing.assert_allclose(found.numbers, expected.numbers, rtol=1e-4, atol=1e-5)


def test_weights_that_a_callback_sets_are_trained_on() -> None:
    def reset(model: keras.Model) -> Any:
        zeros = [np.zeros_like(w) for w in model.get_weights()]
        return CALLBACKS.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: model.set_weights(zeros)
        )

    reference, model = make_model(), distributed()
    expected = fit(reference, callbacks=[reset(reference)], epochs=2)
    assert_same_history(fit(model, callbacks=[reset(model)], epochs=2), expected)
    assert_same(model, reference)


def test_checkpoints_and_logs_on_disk_are_those_of_stock_keras(tmp_path: Path) -> None:
    def train(model: keras.Model, where: Path) -> list[list[float]]:
        where.mkdir()
        whole, weights = where / "whole-{epoch}.keras", where / "best.weights.h5"
        fit(
            model,
            epochs=2,
            callbacks=[
                CALLBACKS.ModelCheckpoint(whole),
                CALLBACKS.ModelCheckpoint(
                    weights, "loss", save_best_only=True, save_weights_only=True
                ),
                CALLBACKS.CSVLogger(where / "log.csv"),
            ],
        )
        with open(where / "log.csv") as file:
            rows = list(csv.DictReader(file))
        return [[float(row[key]) for key in ("epoch", "loss", "mae")] for row in rows]

    reference, model = make_model(), distributed()
    expected = train(reference, tmp_path / "alone")
    found = train(model, tmp_path / "mesh")
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    for epoch in (1, 2):
        name = f"whole-{epoch}.keras"
        ours, theirs = (
            keras.saving.load_model(tmp_path / where / name)
            for where in ("mesh", "alone")
        )
        assert_same(ours, theirs)
    fresh = make_model()
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "mesh" / "best.weights.h5")
    for ours, theirs in zip(fresh.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 13])
def test_evaluate_and_predict_take_any_number_of_samples(size: int) -> None:
    reference, model = make_model(), distributed()
    x, y = X[:size], Y[:size]
    options = {"batch_size": 8, "verbose": 0}
    expected = reference.evaluate(x, y, return_dict=True, **options)
    found = model.evaluate(x, y, return_dict=True, **options)
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-5)
    assert model.evaluate(x, y, **options) == pytest.approx(list(expected.values()))
    outputs = model.predict(x, **options)
    assert isinstance(outputs, np.ndarray)
    wanted = reference.predict(x, **options)
    np.testing.assert_allclose(outputs, wanted, atol=1e-5)
    np.testing.assert_allclose(model.predict_on_batch(x), wanted, atol=1e-5)
    one = model.test_on_batch(x, y, return_dict=True)
    assert one == pytest.approx(reference.test_on_batch(x, y, return_dict=True))


def test_a_saved_model_is_loaded_where_nobody_knows_meshwright(
    run_script: Run, tmp_path: Path
) -> None:
    model = distributed()
    fit(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    np.save(tmp_path / "outputs.npy", model.predict(X, verbose=0))
    np.save(tmp_path / "inputs.npy", X)
    run_script(
        "import sys\n"
        "import keras, numpy as np\n"
        "model = keras.saving.load_model('model.keras')\n"
        "x, outputs = np.load('inputs.npy'), np.load('outputs.npy')\n"
        "np.testing.assert_allclose(model.predict(x, verbose=0), outputs, atol=1e-5)\n"
        "assert int(model.optimizer.iterations) == 12\n"
        "model.fit(x, outputs, verbose=0)\n"
        "model.load_weights('model.weights.h5')\n"
        "np.testing.assert_allclose(model.predict(x, verbose=0), outputs, atol=1e-5)\n"
        "assert 'meshwright' not in sys.modules\n",
        KERAS_BACKEND="jax",
        JAX_PLATFORMS="cpu",
    )


def test_training_goes_on_from_a_saved_model(tmp_path: Path) -> None:
    reference, model = make_model(), distributed()
    for each, name in ((reference, "alone.keras"), (model, "mesh.keras")):
        fit(each, epochs=2)
        each.save(tmp_path / name)
    loaded = keras.saving.load_model(tmp_path / "mesh.keras")
    mw.distribute(loaded, mw.FSDP(4))
    fit(loaded, epochs=2)
    plain = keras.saving.load_model(tmp_path / "alone.keras")
    fit(plain, epochs=2)
    assert_same(loaded, plain)
