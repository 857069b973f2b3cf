"""Callbacks get what they ask for, and steps run together when nobody asks."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.train.listeners import Listeners

import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")
CALLBACKS = keras.callbacks


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def distributed() -> tuple[keras.Model, mw.Mirrored]:
    strategy = mw.Mirrored(["CPU:0", "CPU:1"])
    return mw.distribute(make_model(), strategy), strategy


def fit(model: keras.Model, **options: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(2)
    settings: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0}
    history: dict[str, list[float]] = model.fit(X, Y, **(settings | options)).history
    return history


class Watch(keras.callbacks.Callback):
    """Notes every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch,))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, *(round(logs[key], 4) for key in sorted(logs))))


class AsyncWatch(Watch):
    """Says that it wants the numbers alone."""

    async_safe = True


class StopAtThree(keras.callbacks.Callback):
    """Stops in the middle of an epoch, and looks at the weights there."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.jax_state_sync()
            self.weight = np.asarray(self.model.layers[0].kernel)
            self.model.stop_training = True


@pytest.mark.parametrize("make_watch", [Watch, AsyncWatch])
def test_a_callback_gets_the_true_numbers_of_every_batch(
    make_watch: Callable[[], Watch],
) -> None:
    theirs, ours = Watch(), make_watch()
    expected = fit(make_model(), callbacks=[theirs])
    model, _ = distributed()
    history = fit(model, callbacks=[ours])
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 2 * 2 * 6
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_numbers_of_every_batch_are_those_of_streams_too(prefetch: int) -> None:
    theirs, ours = Watch(), AsyncWatch()
    fit(make_model(), callbacks=[theirs])
    model, strategy = distributed()
    strategy.resident, strategy.prefetch = False, prefetch
    fit(model, callbacks=[ours])
    assert ours.seen == theirs.seen
    assert ("2 at a time" in str(strategy.pace["fit"])) is bool(prefetch)


def test_numbers_of_every_batch_do_not_make_steps_single() -> None:
    model, strategy = distributed()
    fit(model, callbacks=[AsyncWatch()])
    assert "5 at a time" in str(strategy.pace["fit"])


def test_a_callback_that_may_look_at_the_model_sees_it_after_that_batch() -> None:
    theirs, ours = StopAtThree(), StopAtThree()
    fit(make_model(), callbacks=[theirs])
    model, strategy = distributed()
    fit(model, callbacks=[ours])
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-5)
    assert model.optimizer.iterations == 3
    assert str(strategy.pace["fit"]).endswith(
        "Steps are dispatched one by one: StopAtThree wants to see each of them."
    )


@pytest.mark.parametrize(
    ("make", "listens"),
    [
        (lambda path: CALLBACKS.CSVLogger(path / "log.csv"), False),
        (lambda path: CALLBACKS.EarlyStopping(), False),
        (lambda path: CALLBACKS.LearningRateScheduler(lambda epoch: 0.1), False),
        (lambda path: CALLBACKS.ModelCheckpoint(path / "a.keras"), False),
        (lambda path: CALLBACKS.ModelCheckpoint(path / "a.keras", save_freq=3), True),
        (lambda path: CALLBACKS.BackupAndRestore(path / "b"), False),
        (lambda path: CALLBACKS.TerminateOnNaN(), True),
        (lambda path: CALLBACKS.LambdaCallback(on_epoch_end=print), False),
        (lambda path: CALLBACKS.LambdaCallback(on_train_batch_end=print), True),
        (lambda path: CALLBACKS.ProgbarLogger(), False),
    ],
)
def test_it_is_known_which_callbacks_do_something_between_steps(
    make: Callable[[Path], Any], listens: bool, tmp_path: Path
) -> None:
    assert bool(Listeners([make(tmp_path)], "fit").of_state) is listens


def test_callbacks_for_training_do_not_slow_an_evaluation() -> None:
    assert not Listeners([Watch()], "evaluate").of_state


def test_the_progress_bar_ends_with_the_numbers_of_the_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(make_model(), verbose=1)
    expected = capsys.readouterr().out
    model, strategy = distributed()
    fit(model, verbose=1)
    shown = capsys.readouterr().out
    assert "5 at a time" in str(strategy.pace["fit"])
    assert last_numbers(shown) == last_numbers(expected)
    assert shown.count("6/6") >= 2


def last_numbers(text: str) -> list[str]:
    """What stands at the end of each epoch."""
    epochs = text.split("Epoch")[1:]
    return [re.findall(r"accuracy: [0-9.]+ - loss: [0-9.]+", e)[-1] for e in epochs]


def test_evaluate_shows_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = distributed()
    model.evaluate(X, Y, batch_size=8, verbose=1)
    assert "6/6" in capsys.readouterr().out
