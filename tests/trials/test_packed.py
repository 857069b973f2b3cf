"""Packed trials: each member ends as its solo run does, and what cannot is refused."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import meshwright as mw
from meshwright.data.checks import Parts
from meshwright.devices.strategy_hooks import trace_hooks
from meshwright.errors import DataError, MemoryLimitError, PackedTrialsError
from meshwright.trials import packed_places, packed_programs, packed_room
from meshwright.trials.packed_data import take_data
from meshwright.trials.packed_steps import TracedModel

import jax
import keras
import numpy as np
import pytest

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[RNG.integers(0, 3, 22)]
WEIGHTS = RNG.uniform(0.5, 2.0, 22).astype(np.float32)
TWO = ["CPU:0", "CPU:1"]
FIT: dict[str, Any] = {"epochs": 3, "batch_size": 4}

NAMES = ("seed", "rate", "beta", "decay", "drop", "smooth", "l2", "clip")
VALUES: list[dict[str, Any]] = [
    dict(zip(NAMES, values, strict=True))
    for values in (
        (1, 0.01, 0.9, 0.1, 0.5, 0.2, 0.01, 0.5),
        (1, 0.02, 0.8, 0.2, 0.3, 0.1, 0.02, 1.0),
        (2, 0.03, 0.7, 0.3, 0.1, 0.3, 0.03, 0.1),
    )
]


def make_any(config: dict[str, Any]) -> keras.Model:
    """Everything that may differ."""
    keras.utils.set_random_seed(config["seed"])
    hidden = L.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(config["l2"]))
    layers = [hidden, L.Dropout(config["drop"]), L.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(
        keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(config["rate"], 2, 0.9),
            beta_1=config["beta"],
            weight_decay=config["decay"],
            clipnorm=config["clip"],
            epsilon=config["rate"] / 1000,
        ),
        keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config["smooth"]
        ),
        metrics=["accuracy"],
        weighted_metrics=["mae"],
    )
    return model


def make_small(config: dict[str, Any]) -> keras.Model:
    """Keras' cheapest to make and to compile."""
    keras.utils.set_random_seed(config.get("seed", 0))
    hidden = [L.Dense(config["width"])] if "width" in config else []
    model = keras.Sequential([keras.Input((6,)), *hidden, L.Dense(3)])
    optimizer = getattr(keras.optimizers, config.get("optimizer", "SGD"))
    model.compile(optimizer(config.get("rate", 0.1)), config.get("loss", "mse"))
    return model


def solo(make: Callable[[Any], keras.Model], config: Any, **options: Any) -> Any:
    """The history and weights of stock Keras."""
    model = make(config)
    history = model.fit(X, Y, verbose=0, **options).history
    return history, model.get_weights()


def assert_like_solo(
    trial: Any, make: Callable[[Any], keras.Model], **options: Any
) -> None:
    history, weights = solo(make, trial.config, **options)
    assert list(trial.history) == list(history)
    for name, values in history.items():
        np.testing.assert_allclose(trial.history[name], values, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(trial.weights, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def refusal(*args: Any, error: Any = PackedTrialsError, **options: Any) -> Any:
    with pytest.raises(error) as raised:
        mw.packed_trials(*args, **options)
    return raised.value


def test_members_of_other_values_equal_their_solo_runs() -> None:
    options = {**FIT, "sample_weight": WEIGHTS, "validation_split": 0.3}
    trials = mw.packed_trials(make_any, VALUES, X, Y, **options, devices=TWO)
    assert [trial.config for trial in trials] == VALUES
    for trial in trials:
        assert_like_solo(trial, make_any, **options)


@pytest.mark.parametrize("batch_size", [4, 22])
def test_members_that_a_gpu_would_give_copies_of_a_shared_batch_equal_their_runs(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of more values than the model has weights stays one."""
    repeated: list[int] = []

    def count(batch: Any, members: int) -> Any:
        repeated.append(members)
        return repeat(batch, members)

    repeat = packed_programs._repeated
    monkeypatch.setattr(packed_programs, "_repeated", count)
    monkeypatch.setattr(packed_programs.PackedPrograms, "_is_on_cpu", False)
    options = {**FIT, "batch_size": batch_size}
    configs = [value | {"seed": 1} for value in VALUES]
    trials = mw.packed_trials(make_any, configs, X, Y, **options, devices=TWO[:1])
    for trial in trials:
        assert_like_solo(trial, make_any, **options)
    assert set(repeated) == ({len(configs)} if batch_size == 4 else set())


def test_without_shuffling_and_with_a_single_short_batch_members_equal_their_runs() -> (
    None
):
    options: dict[str, Any] = {
        "batch_size": 64,
        "shuffle": False,
        "validation_data": (X[:5], Y[:5]),
    }
    configs = [{"rate": 0.1}, {"rate": 0.2}]
    for trial in mw.packed_trials(
        make_small, configs, X, Y, **options, devices=TWO[:1]
    ):
        assert_like_solo(trial, make_small, **options)


def test_a_member_starts_in_the_random_state_of_the_call_wherever_it_stands() -> None:
    def make(config: float) -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), L.Dense(3)])  # draws its weights
        model.compile(keras.optimizers.SGD(config), "mse")
        return model

    keras.utils.set_random_seed(5)
    trials = mw.packed_trials(make, [0.2, 0.1], X, Y, devices=TWO)

    def make_seeded(config: float) -> keras.Model:
        keras.utils.set_random_seed(5)
        return make(config)

    for trial in trials:
        assert_like_solo(trial, make_seeded)


def test_members_stop_early_by_themselves_and_leave_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    leave = packed_places.Places.leave

    def note(places: Any, members: Any) -> None:
        leave(places, members)
        sizes.append(places.size)

    monkeypatch.setattr(packed_places.Places, "leave", note)
    rates = [0.1, 3.0, 4.0, 5.0, 0.05]  # those above 2 get worse from the start

    def options() -> dict[str, Any]:
        stop = keras.callbacks.EarlyStopping(
            "loss", patience=1, restore_best_weights=True
        )
        return {"epochs": 4, "batch_size": 8, "callbacks": [stop]}

    configs = [{"rate": rate, "seed": number} for number, rate in enumerate(rates)]
    trials = mw.packed_trials(make_small, configs, X, Y, **options(), devices=TWO)
    assert [len(trial.history["loss"]) for trial in trials] == [4, 2, 2, 2, 4]
    assert sizes == [2], "of six places on two devices"
    for trial in trials:
        assert_like_solo(trial, make_small, **options())


def test_nan_of_a_member_stays_its_own() -> None:
    configs = [{"rate": 0.1}, {"rate": 1e30}, {"rate": 0.2}]
    options: dict[str, Any] = {"epochs": 2, "batch_size": 8}
    first, broken, last = mw.packed_trials(
        make_small, configs, X, Y, **options, devices=TWO[:1]
    )
    assert math.isnan(broken.history["loss"][-1])
    assert np.isnan(broken.weights[0]).all()
    for trial in (first, last):
        assert_like_solo(trial, make_small, **options)


def test_members_that_are_over_the_memory_limit_are_refused() -> None:
    mw.configure(memory_limit="1KiB")
    error = refusal(make_small, [{}] * 4, X, Y, devices=TWO, error=MemoryLimitError)
    assert error.received.startswith("4 packed members, 2 on a device, need ")
    assert error.received.endswith("per device; the limit is 1.0 KiB.")
    assert "at the same time" in error.rule
    assert "for example configs[:2], or pass more devices" in error.change
    assert error.needed > error.limit == 1024
    mw.configure(memory_limit="1GiB")
    assert mw.packed_trials(make_small, [{}], X, Y, devices=TWO)


def test_an_allocator_without_room_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nTrace")

    monkeypatch.setattr(packed_room, "run_in_turn", fail)
    error = refusal(make_small, [{}], X, Y, devices=TWO, error=MemoryLimitError)
    assert "found no room: RESOURCE_EXHAUSTED: Out of memory." in error.received


def test_layers_of_other_widths_are_refused_with_the_first_difference() -> None:
    error = refusal(make_small, [{"width": 3}, {"width": 3}, {"width": 4}], X, Y)
    assert "configs[0] = {'width': 3} and configs[2] = {'width': 4}" in error.received
    assert "float32[6,3] in the one" in error.received
    assert "float32[6,4] in the other" in error.received
    assert "layers, shapes, kinds of optimizer, loss and metrics" in error.rule
    assert error.change.startswith("Call packed_trials once for each group")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"optimizer": "Adam"}, "the optimizer SGD in the one, Adam in the other"),
        ({"loss": "mae"}, "the operation "),
    ],
    ids=["optimizer", "loss"],
)
def test_other_structures_are_refused(other: dict[str, Any], told: str) -> None:
    error = refusal(make_small, [{}, other], X, Y)
    assert f"The first difference: {told}" in error.received


def test_other_metrics_and_numbers_of_variables_are_refused() -> None:
    def make(config: str) -> keras.Model:
        bias = config != "no bias"
        model = keras.Sequential([keras.Input((6,)), L.Dense(3, use_bias=bias)])
        model.compile("sgd", "mse", metrics=[config] if config == "mae" else None)
        return model

    error = refusal(make, ["plain", "mae"], X, Y)
    assert "the logs loss in the one, loss, mae in the other" in error.received
    error = refusal(make, ["plain", "no bias"], X, Y)
    assert "2 times a trainable variable in the one, 1 in the other" in error.received


def test_momentum_that_is_switched_off_is_told_by_the_variables_that_it_needs() -> None:
    def make(momentum: float) -> keras.Model:
        model = with_options(optimizer=keras.optimizers.SGD(0.1, momentum=momentum))
        model.build((None, 6))
        return model

    error = refusal(make, [0.9, 0.0], X, Y)
    assert "4 times a variable of the optimizer in the one, 2 in the" in error.received


def test_recurrent_layers_are_not_left_to_a_library_that_takes_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jax.experimental import rnn as library

    rnn = importlib.import_module("keras.src.backend.jax.rnn")
    in_steps: list[bool] = []

    def lstm(*args: Any, **kwargs: Any) -> Any:
        in_steps.append(trace_hooks() is not None)
        raise NotImplementedError  # Keras goes on without it.

    def make(_: Any) -> keras.Model:
        model = keras.Sequential([keras.Input((5, 3)), L.LSTM(4), L.Dense(3)])
        model.compile("sgd", "mse")
        return model

    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(library, "lstm", lstm)
    model = make(None)
    data = take_data(Parts(np.ones((4, 5, 3)), np.ones((4, 3))), 4, True, None, 0.0)
    model.fit(*data.train.arrays, epochs=0, verbose=0)
    assert in_steps, "it would have been used"
    in_steps.clear()
    TracedModel.of(model, data)
    assert not any(in_steps)


def test_a_value_that_switches_something_off_is_another_program() -> None:
    error = refusal(make_any, [VALUES[0], {**VALUES[0], "smooth": 0.0}], X, Y)
    assert "in the training step" in error.received
    assert "A value of 0 or None that switches something off" in error.rule


@pytest.mark.parametrize("configs", [[], "abc", iter([{}])], ids=["none", "text", "it"])
def test_configs_are_a_list_of_at_least_one(configs: Any) -> None:
    error = refusal(make_small, configs, X, Y)
    assert "configs=" in error.received
    assert "at least one config" in error.rule
    assert "Pass a list" in error.change


@pytest.mark.parametrize(
    ("options", "told", "rule"),
    [
        ({"epochs": 0}, "epochs=0", "a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5", "a whole number of at least 1"),
        ({"shuffle": "batch"}, "shuffle='batch'", "in a new order in each epoch"),
        (
            {"callbacks": [keras.callbacks.TerminateOnNaN()]},
            "a callback of type TerminateOnNaN",
            "EarlyStopping alone is followed",
        ),
    ],
    ids=["epochs", "batch size", "shuffle", "callback"],
)
def test_arguments_are_refused(options: Any, told: str, rule: str) -> None:
    error = refusal(make_small, [{}], X, Y, **options)
    assert told in error.received
    assert rule in error.rule
    assert error.change.startswith(("Pass", "Leave the callback out"))


def test_streams_and_shares_that_leave_nothing_are_refused() -> None:
    error = refusal(make_small, [{}], iter([(X, Y)]), error=DataError)
    assert "x of type" in error.received
    assert "arrays in memory" in error.rule
    assert "Pass NumPy arrays" in error.change
    error = refusal(make_small, [{}], X, Y, validation_split=1.0, error=DataError)
    assert "validation_split=1.0 for 22 samples, which leaves 0" in error.received
    assert "at least one sample" in error.rule
    assert "between 0 and 1" in error.change


def test_bad_data_is_refused_as_in_fit() -> None:
    bad = X.copy()
    bad[7, 2] = np.nan
    error = refusal(make_small, [{}], bad, Y, error=DataError)
    assert error.index == 7
    assert error.received.startswith("packed_trials received x[7, 2]")
    error = refusal(make_small, [{}], X, Y[:9], error=DataError)
    assert "y of 9 samples" in error.received


def test_what_is_no_compiled_model_is_refused() -> None:
    error = refusal(lambda _: 3, [{}], X, Y)
    assert "make_model(configs[0]) returned an object of type int" in error.received
    assert "compiled Keras model" in error.rule
    assert "model.compile(...)" in error.change
    error = refusal(lambda _: keras.Sequential([L.Dense(3)], name="raw"), [{}], X, Y)
    assert "'raw', uncompiled" in error.received


def with_options(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), L.Dense(3)], name="net")
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


@pytest.mark.parametrize(
    ("make", "told", "change"),
    [
        (lambda: with_options(run_eagerly=True), "with run_eagerly", "without these"),
        (
            lambda: with_options(
                optimizer=keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(use_ema=True)
                )
            ),
            "has use_ema=True",
            "Leave use_ema out",
        ),
        (
            lambda: mw.distribute(with_options(), mw.Mirrored(TWO)),
            "with the strategy Mirrored(data=2)",
            "Leave out the strategy",
        ),
    ],
    ids=["eager", "averages", "strategy"],
)
def test_models_that_are_trained_in_another_way_are_refused(
    make: Any, told: str, change: str
) -> None:
    error = refusal(lambda _: make(), [{}], X, Y)
    assert error.received.startswith("make_model(configs[0]) returned 'net'")
    assert told in error.received
    assert "Keras' own step as one compiled program" in error.rule
    assert change in error.change


class Growing(keras.Model):
    """A step whose state changes its type."""

    def __init__(self) -> None:
        super().__init__(name="growing")
        self.head = L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, (weights, *rest) = super().train_step(state, data)
        halves = [keras.ops.cast(w, "float16") for w in weights]
        return logs, (halves, *rest)


def test_a_step_whose_state_changes_is_refused() -> None:
    def make(_: Any) -> keras.Model:
        model = Growing()
        model.compile("sgd", "mse")
        return model

    error = refusal(make, [{}], X, Y)
    assert "The train_step of 'growing' returns a state of other" in error.received
    assert "a loop of steps" in error.rule
    assert "in the same types" in error.change


def test_a_model_that_does_not_fit_the_data_is_named() -> None:
    def make(units: int) -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), L.Dense(units)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(TypeError, match="incompatible shapes") as raised:
        mw.packed_trials(make, [3, 4], X, Y)
    assert raised.value.__notes__[-1] == "It came of the model of configs[1]."


def test_an_error_of_make_model_says_for_which_config() -> None:
    def make(config: int) -> keras.Model:
        return make_small({"rate": 1 / config})

    with pytest.raises(ZeroDivisionError) as raised:
        mw.packed_trials(make, [1, 0], X, Y)
    assert raised.value.__notes__[-1] == "It came of the model of configs[1]."


def test_a_run_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.trials.packed.process_count", lambda: 2)
    error = refusal(make_small, [{}], X, Y)
    assert "in a run of 2 processes" in error.received
    assert "the devices of one process" in error.rule
    assert "a process of its own" in error.change
