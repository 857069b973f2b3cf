"""The battery for pipelines: every schedule trains every model as one device does.

Two references. Where samples do not meet, microbatches make no difference, and stock
Keras on whole batches is the reference, as it is for layer-wise placement, which has
one microbatch. BatchNorm, dropout and other random numbers do meet the cut into
microbatches; there it is one device that accumulates as many.

The issue's whole product of schedules, models and numbers of stages is in `make soak`;
here every schedule and every number of stages meets every model once. What a test
costs is compiling, once for each size of microbatches and of batches, hence the sizes.
"""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import StrategyError
from meshwright.strategies.strategy import Strategy

import keras
import numpy as np
import pytest

import test_equivalence as battery

CPUS = [f"CPU:{i}" for i in range(8)]
L = keras.layers

pytestmark = [
    pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning"),
    pytest.mark.usefixtures("small_programs_are_cached"),
]

SCHEDULES = ("1f1b", "gpipe", "zero_bubble", "interleaved", "layer-wise")
MODELS = ("cnn", "unet", "two-tower", "transformer", "lstm", "subclassed")
MIXING = ("cnn", "dropout", "joined", "vae", "frozen", "nested", "gru")
"""Models that see how batches are cut: by BatchNorm, a spectral norm, or randomness."""

UNEVEN = {"size": 28, "batch_size": 15}
"""Batches of 15 in microbatches of 4, 4, 4, 3, and tails of 13 in 4, 3, 3, 3."""

SMALL = {"size": 7, "batch_size": 4}
"""One sample in each of four microbatches, and tails of three."""

WHOLE = {"size": 8, "batch_size": 4}
"""One sample in each of four microbatches, and no tails, for what compiles long."""


LONG_TO_COMPILE = (
    *("cnn", "unet", "transformer", "lstm", "joined", "vae", "nested", "frozen"),
)


def sizes_for(name: str, schedule: str = "1f1b") -> dict[str, int]:
    if name == "cnn" and schedule != "layer-wise":
        return UNEVEN  # BatchNorm wants more than one sample
    return WHOLE if name in LONG_TO_COMPILE else SMALL


def make_strategy(schedule: str, stages: int, microbatches: int = 4) -> Strategy:
    devices = CPUS[:stages]
    if schedule == "layer-wise":
        return mw.Layerwise(stages, devices=devices)
    return mw.Pipeline(stages, microbatches, schedule, devices=devices)


@cache
def trained_by_keras(name: str, size: int, batch_size: int) -> Any:
    model = battery.build(name)
    return model, battery.train(model, name, size, batch_size=batch_size)


@cache
def trained_in_microbatches(name: str, number: int, size: int, batch_size: int) -> Any:
    strategy = mw.Single(CPUS[0], accumulate=number)
    model = mw.distribute(battery.build(name), strategy)
    return model, battery.train(model, name, size, batch_size=batch_size)


def assert_trains_alike(
    strategy: Strategy, name: str, *, size: int, batch_size: int
) -> keras.Model:
    """Trains a model of the battery and its reference, and compares all there is."""
    number = strategy.plan.microbatches
    if name in MIXING and number != 1:
        expected = trained_in_microbatches(name, number, size, batch_size)
    else:
        expected = trained_by_keras(name, size, batch_size)
    model = mw.distribute(battery.build(name), strategy)
    history = battery.train(model, name, size, batch_size=batch_size)
    battery.assert_equal_weights(model, expected[0], 2e-5)
    assert_same_history(history, expected[1])
    return model


def assert_same_history(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-4, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *(("1f1b", 3), ("gpipe", 3), ("zero_bubble", 3)),
        *(("layer-wise", 4), ("interleaved", 2)),
    ],
)
def test_two_epochs_equal_one_device(schedule: str, stages: int, name: str) -> None:
    strategy = make_strategy(schedule, stages)
    assert_trains_alike(strategy, name, **sizes_for(name, schedule))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_epochs_with_uneven_tails_equal_one_device(
    schedule: str, stages: int, name: str
) -> None:
    strategy = make_strategy(schedule, stages, 4 if stages != 3 else 3)
    assert_trains_alike(strategy, name, **UNEVEN)


HYBRIDS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "fsdp": {"fsdp": 2},
    "tensor": {"tensor": 2},
    "data-fsdp": {"data": 2, "fsdp": 2},
    "data-tensor": {"data": 2, "tensor": 2},
}


def make_hybrid(axes: str) -> Strategy:
    degrees = HYBRIDS[axes]
    devices = CPUS[: 2 * 2 ** len(degrees)]
    return mw.Hybrid(**degrees, stages=2, microbatches=4, devices=devices)


@pytest.mark.parametrize(
    ("axes", "name"), [*((axes, "two-tower") for axes in HYBRIDS), ("data-fsdp", "cnn")]
)
def test_stages_and_other_axes_equal_one_device(axes: str, name: str) -> None:
    assert_trains_alike(make_hybrid(axes), name, **sizes_for(name))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axes", HYBRIDS)
def test_every_model_on_stages_and_other_axes_equals_one_device(
    axes: str, name: str
) -> None:
    assert_trains_alike(make_hybrid(axes), name, **UNEVEN)


# ResNet50. Compiling is what it costs, so all microbatches have one size. In float32
# it turns changes of 1e-7 in its weights into 0.07 after a step, and a device of ours
# and stock Keras, which round differently, are 0.03 apart. So the reference is a device
# of ours, for layer-wise placement too. Both were 8e-13 from stock Keras in float64,
# measured once by hand; no test repeats that.


def resnet(last: str | None) -> keras.Model:
    """ResNet50, or the part of it that ends with a layer."""
    keras.utils.set_random_seed(7)
    model = keras.applications.ResNet50(
        input_shape=(32, 32, 3), weights=None, classes=4, classifier_activation=None
    )
    if last is not None:
        features = L.GlobalAveragePooling2D()(model.get_layer(last).output)
        model = keras.Model(model.input, L.Dense(4)(features))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def step_of_resnet(last: str | None, strategy: Strategy) -> Any:
    """The network after a step on 12 samples, and what the step says."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(12, 32, 32, 3)).astype(np.float32)
    y = rng.integers(0, 4, 12).astype(np.int32)
    model = mw.distribute(resnet(last), strategy)
    return model, model.train_on_batch(x, y, return_dict=True)


@cache
def resnet_alone(last: str | None, microbatches: int) -> Any:
    return step_of_resnet(last, mw.Single(CPUS[0], accumulate=microbatches))


def compare_resnets(schedule: str, stages: int, last: str | None) -> None:
    strategy = make_strategy(schedule, stages, 4 if stages != 3 else 3)
    assert strategy.plan.microbatches is not None
    reference, expected = resnet_alone(last, strategy.plan.microbatches)
    model, found = step_of_resnet(last, strategy)
    battery.assert_equal_weights(model, reference, 2e-5)
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 3)])
def test_first_blocks_of_resnet50_equal_one_device(schedule: str, stages: int) -> None:
    compare_resnets(schedule, stages, "conv2_block1_out")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resnet50_equals_one_device(schedule: str, stages: int) -> None:
    compare_resnets(schedule, stages, None)


# Everything else that models, losses and optimizers may be.

OTHERS = (
    *("dropout", "joined", "dict", "siamese", "two-headed", "vae", "frozen", "nested"),
    *("clipped", "averaged", "scaled"),
)
LARGE = ("grouped", "gru", "grouped-query")


@pytest.mark.parametrize("schedule", ["1f1b", "layer-wise"])
@pytest.mark.parametrize("name", ["tagger", "own-loss"])
def test_losses_of_whole_batches_equal_one_device(name: str, schedule: str) -> None:
    """So do metrics: Keras has lost the masks of outputs when it comes to them."""
    assert_trains_alike(make_strategy(schedule, 2), name, **UNEVEN)


@pytest.mark.parametrize("name", OTHERS)
def test_models_losses_and_optimizers_equal_one_device(name: str) -> None:
    assert_trains_alike(make_strategy("1f1b", 2), name, **sizes_for(name))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [*OTHERS, *LARGE])
def test_models_losses_and_optimizers_equal_one_device_in_uneven_microbatches(
    name: str,
) -> None:
    assert_trains_alike(make_strategy("1f1b", 2), name, **UNEVEN)


def test_a_training_step_of_the_users_own_is_refused() -> None:
    model = mw.distribute(battery.build("own-step"), make_strategy("1f1b", 2))
    with pytest.raises(StrategyError) as caught:
        battery.train(model, "own-step")
    assert str(caught.value) == (
        f"{model.name!r}, whose class OwnStep has a train_step of its own, was to be "
        "trained in pieces on several devices.\n"
        "Pieces replace the training step, so it would not be called.\n"
        "Override compute_loss instead of train_step, or train the model whole: under "
        "Mirrored, FSDP or TensorParallel, or on one device."
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_rematerialised_training_equals_one_device(schedule: str) -> None:
    strategy = mw.Pipeline(2, 4, schedule, devices=CPUS[:2], remat=True)
    assert_trains_alike(strategy, "dropout", **SMALL)


# Batches of any size. The reference is a network of two products in NumPy.


def two_products() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [L.Dense(5, use_bias=False), L.Dense(2, use_bias=False)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    return model


def two_products_after(batches: list[Any], first: Any, second: Any) -> Any:
    """The two matrices after a step down the squared error on each of the batches."""
    for x, y in batches:
        hidden = x @ first
        error = 2 * (hidden @ second - y) / y.size
        first, second = (
            first - 0.1 * x.T @ (error @ second.T),
            second - 0.1 * hidden.T @ error,
        )
    return first, second


def rows(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    return x, rng.normal(size=(size, 2)).astype(np.float32)


def test_batches_of_every_size_train_by_the_mean_over_their_samples() -> None:
    batches = [rows(size) for size in range(17, 0, -1)]
    model = two_products()
    wanted = two_products_after(batches, *model.get_weights())
    mw.distribute(model, make_strategy("1f1b", 2))
    for x, y in batches:
        model.train_on_batch(x, y)
    for found, expected in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved"])
def test_a_tail_smaller_than_the_microbatches_runs_as_fewer(schedule: str) -> None:
    x, y = rows(10)
    model = two_products()
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    wanted = two_products_after(batches, *model.get_weights())
    mw.distribute(model, make_strategy(schedule, 2, microbatches=8))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for found, expected in zip(model.get_weights(), wanted, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


# What Keras promises of fit, evaluate and predict, without random numbers: stock Keras
# is the reference.

X, Y = battery.table(15)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [L.Dense(16, activation="relu"), L.Dense(8), L.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    optimizer = keras.optimizers.Adam(0.01)
    model.compile(**battery.classified() | {"optimizer": optimizer})
    return model


def piped(stages: int = 2) -> keras.Model:
    return mw.distribute(classifier(), make_strategy("1f1b", stages))


def fit(model: keras.Model, **options: Any) -> Any:
    keras.utils.set_random_seed(4)
    given = {"x": X, "y": Y, "batch_size": 4, "epochs": 2, "verbose": 0, **options}
    return model.fit(**given).history


def assert_same(model: keras.Model, reference: keras.Model) -> None:
    battery.assert_equal_weights(model, reference, 1e-5)


def batches() -> Iterator[Any]:
    while True:
        yield from ((X[i : i + 4], Y[i : i + 4]) for i in (0, 4, 8, 12))


OPTIONS: dict[str, Any] = {
    "sample weights": lambda: {"sample_weight": np.linspace(0, 2, 15)},
    "class weights": lambda: {"class_weight": {0: 1.0, 1: 0.2, 2: 3.0, 3: 0.0}},
    "validation data": lambda: {
        "validation_data": (X[:7], Y[:7], np.linspace(1, 2, 7)),
        "validation_batch_size": 7,
    },
    "a generator": lambda: {
        **{"x": batches(), "y": None, "batch_size": None},
        **{"steps_per_epoch": 5, "shuffle": False},
    },
    "early stopping": lambda: {
        "validation_data": (X[:4], 3 - Y[:4]),
        "epochs": 5,
        "callbacks": [
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True)
        ],
    },
    "a learning rate that changes": lambda: {
        "callbacks": [
            keras.callbacks.LearningRateScheduler(lambda e, rate: rate / (e + 1))
        ]
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fit_does_what_stock_keras_does_with(name: str) -> None:
    reference, model = classifier(), piped()
    expected = fit(reference, **OPTIONS[name]())
    assert_same_history(fit(model, **OPTIONS[name]()), expected)
    assert_same(model, reference)


def test_a_second_fit_goes_on_where_the_first_one_ended() -> None:
    reference, model = classifier(), piped()
    for _ in range(2):
        expected, found = fit(reference), fit(model)
    assert_same_history(found, expected)
    assert_same(model, reference)


@cache
def two_trained() -> tuple[keras.Model, keras.Model]:
    reference, model = classifier(), piped(3)
    fit(reference)
    fit(model)
    return reference, model


def test_evaluate_and_predict_take_any_number_of_samples() -> None:
    reference, model = two_trained()
    options = {"batch_size": 4, "verbose": 0}
    for size in (1, 4, 5):
        x, y = X[:size], Y[:size]
        expected = reference.evaluate(x, y, return_dict=True, **options)
        found = model.evaluate(x, y, return_dict=True, **options)
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, rel=1e-4)
        outputs = model.predict(x, **options)
        assert isinstance(outputs, np.ndarray)
        wanted = reference.predict(x, **options)
        np.testing.assert_allclose(outputs, wanted, atol=1e-5)


def test_evaluate_and_predict_come_before_fit_as_well() -> None:
    reference, model = classifier(), piped()
    wanted = reference.predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), wanted, atol=1e-5)
    expected = reference.evaluate(X, Y, verbose=0)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-4)
    fit(reference, shuffle=False)
    fit(model, shuffle=False)
    assert_same(model, reference)


def test_frozen_layers_stay_as_they_are_when_a_model_is_compiled_again() -> None:
    reference, model = classifier(), piped()
    for each in (reference, model):
        fit(each)
        each.layers[0].trainable = False
        each.compile(optimizer=battery.momentum(), loss=battery.classified()["loss"])
        fit(each)
    assert_same(model, reference)


class Gated(keras.Model):
    """Its gate, a stage of its own, tells signs and passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = L.Dense(8), L.Dense(8), L.Dense(4)
        self.gate = L.Lambda(lambda x: keras.ops.cast(x > 0, "float32"), name="gate")
        self.join = L.Multiply(name="join")

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        value = self.second(hidden)
        return self.head(self.join([value, self.gate(hidden)]))


def gated() -> keras.Model:
    keras.utils.set_random_seed(6)
    model = Gated()
    model.compile(**battery.classified())
    return model


def test_a_stage_that_no_gradient_goes_through_equals_one_device() -> None:
    reference, model = gated(), gated()
    mw.distribute(model, mw.Pipeline(["gate", "join"], 4, devices=CPUS[:3]))
    assert_same_history(fit(model), fit(reference))
    assert_same(model, reference)


def test_models_and_weights_are_saved_for_those_without_a_pipeline(
    tmp_path: Path,
) -> None:
    reference, model = two_trained()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    wanted = reference.predict(X, verbose=0)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), wanted, atol=1e-5)
    assert_same(loaded, reference)
    fresh = classifier()
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_same(fresh, reference)


def test_a_log_on_disk_is_that_of_stock_keras(tmp_path: Path) -> None:
    def log(model: keras.Model, name: str) -> list[dict[str, float]]:
        fit(model, callbacks=[keras.callbacks.CSVLogger(tmp_path / name)])
        with open(tmp_path / name) as file:
            read = list(csv.DictReader(file))
        return [{key: float(row[key]) for key in ("epoch", "loss")} for row in read]

    expected, found = log(classifier(), "alone.csv"), log(piped(), "pipe.csv")
    assert len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_trained_model_moves_to_mirrors_and_back_with_its_optimizer() -> None:
    reference, model = classifier(), classifier()
    for strategy in (
        make_strategy("1f1b", 2),
        mw.Mirrored(CPUS[:2]),
        make_strategy("zero_bubble", 2),
    ):
        mw.distribute(model, strategy)
        assert_same_history(fit(model), fit(reference))
        assert_same(model, reference)
