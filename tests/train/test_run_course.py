"""What ends a fit in a run besides its last step: wishes to stop, and NaN."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.cluster import preemption
from meshwright.cluster.preemption import Preempted, watch_for_preemption
from meshwright.errors import (
    CheckpointError,
    CheckpointWarning,
    NumericError,
    StrategyError,
)

import keras
import numpy as np
import pytest

from interruptions import bits_of, in_one_go, start_of_script, taking_part

pytestmark = pytest.mark.usefixtures("small_programs_are_cached")

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = X @ np.ones((4, 1), "float32")
BAD = Y.copy()
BAD[17] = np.nan


def make_model(strategy: Any = None) -> Any:
    with (strategy or mw.Mirrored(["CPU:0", "CPU:1"])).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def fit(y: Any = Y, **options: Any) -> Any:
    """Five batches an epoch, of which the third has samples 16 to 23."""
    model = make_model(options.pop("strategy", None))
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    model._meshwright_strategy.check_nan = False
    model.fit(X, y, **arguments)
    return model


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def asked_to_stop() -> Iterator[Any]:
    """Sends this process the signal, and forgets it afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    watch_for_preemption()
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    preemption._asked.clear()
    signal.signal(signal.SIGTERM, before)


def test_who_is_asked_to_stop_saves_and_stops(
    asked_to_stop: Any, tmp_path: Path
) -> None:
    # faults.md rows 6 and 7
    asking = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 3 and asked_to_stop()
    )
    start_of_script()
    with taking_part(tmp_path), pytest.raises(Preempted) as caught:
        fit(callbacks=[asking])
    assert (caught.value.code, caught.value.step) == (75, 4)
    assert steps_in(tmp_path) == [4]
    preemption._asked.clear()
    expected = in_one_go(lambda: bits_of(fit(epochs=2)), tmp_path / "whole")
    assert in_one_go(lambda: bits_of(fit(epochs=2)), tmp_path) == expected


def test_a_loss_that_is_nan_stops_a_run_and_is_not_saved(tmp_path: Path) -> None:
    # faults.md row 39 and G12
    start_of_script()
    with taking_part(tmp_path, save_every=1), pytest.raises(NumericError) as caught:
        fit(BAD)
    assert (caught.value.exit_code, caught.value.step) == (8, 3)
    assert str(caught.value).split("\n") == [
        "Step 3 of 'sequential' came to a loss of nan, in epoch 1; the newest "
        "checkpoint is from before.",
        "With --on-nan stop a run does not go on with numbers that are none, and does "
        "not save them.",
        "Look at the data of that step, lower the learning rate or clip gradients. "
        "--on-nan rollback tries again from the checkpoint, --on-nan skip leaves such "
        "steps out.",
    ]
    assert steps_in(tmp_path) == [1, 2]


def test_weights_that_are_nan_are_not_saved(tmp_path: Path) -> None:
    start_of_script()
    model = make_model()
    # Its only step has a good loss, and leads to weights that are none.
    model.optimizer.learning_rate = np.inf
    with taking_part(tmp_path), pytest.raises(NumericError) as caught:
        model.fit(X[:8], Y[:8], verbose=0)
    assert "came to weights that are NaN or infinite" in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("save_every", [None, 1])
def test_a_step_that_leads_to_nan_is_left_out(
    save_every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = slice(16, 24)

    def without_the_bad_batch() -> Any:
        model = make_model()
        good = [np.delete(array, bad, axis=0) for array in (X, Y)]
        model.fit(*good, batch_size=8, shuffle=False, epochs=2, verbose=0)
        return model

    def weights(model: Any) -> Any:
        return model.get_weights(), int(model.optimizer.iterations)

    start_of_script()
    expected = weights(without_the_bad_batch())
    said: list[Any] = []
    start_of_script()
    with taking_part(tmp_path, on_nan="skip", save_every=save_every) as run:
        monkeypatch.setattr(run.channel, "say", lambda **facts: said.append(facts))
        found = weights(fit(BAD, epochs=2))
    assert found[1] == expected[1] == 8
    for ours, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    notices = [facts["notice"] for facts in said if "notice" in facts]
    assert notices == [
        f"1 of 5 steps in epoch {epoch} led to NaN or infinity and were left out."
        for epoch in (1, 2)
    ]


def test_a_pipeline_leaves_no_steps_out(tmp_path: Path) -> None:
    start_of_script()
    with (
        taking_part(tmp_path, on_nan="skip"),
        pytest.raises(StrategyError) as caught,
    ):
        fit(strategy=mw.Layerwise(2, devices=["CPU:0", "CPU:1"]))
    assert str(caught.value).split("\n") == [
        "A run with --on-nan skip trains 'sequential' in 2 stages.",
        "The stages of a pipeline update their weights on their own, before it is "
        "known whether a step is to be left out.",
        "Use --on-nan rollback or stop.",
    ]


def test_a_poisoned_weight_is_found_out(tmp_path: Path) -> None:
    start_of_script()
    with (
        taking_part(tmp_path, fault="nan@step=4", save_every=2),
        pytest.raises(NumericError, match="a loss of nan"),
    ):
        fit()
    assert steps_in(tmp_path) == [2]


@pytest.fixture
def disk_with_room_again() -> Iterator[None]:
    """Whatever becomes of the test, those after it can write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.filterwarnings("ignore::meshwright.errors.CheckpointWarning")
@pytest.mark.filterwarnings("ignore:Error writing persistent compilation cache")
@pytest.mark.usefixtures("disk_with_room_again")
def test_a_full_disk_stops_nothing_but_the_end(tmp_path: Path) -> None:
    # faults.md rows 26 and 34, G3, G4
    with pytest.warns(CheckpointWarning, match="was not saved"):
        in_one_go(lambda: fit(), tmp_path / "a", save_every=1, fault="disk-full@step=3")
    assert steps_in(tmp_path / "a")[-1] == 5
    start_of_script()
    with (
        taking_part(tmp_path / "b", fault="disk-full@step=5"),
        pytest.raises(CheckpointError) as caught,
    ):
        fit()
    assert caught.value.exit_code == 5
