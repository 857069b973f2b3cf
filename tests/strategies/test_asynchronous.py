"""Workers that do not wait for each other, through Keras' own methods."""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import meshwright as mw
from meshwright.cluster.channel import Channel
from meshwright.data.mnist import load_digits
from meshwright.errors import (
    MemoryLimitError,
    NumericError,
    PlanError,
    StrategyError,
    UnknownDeviceError,
    WorkerError,
)
from meshwright.strategies import asynchronous
from meshwright.train.async_worker import DeviceWorker, Pulled, Task

import keras
import numpy as np
import pytest

from interruptions import bits_of, in_one_go, with_interruptions

pytestmark = pytest.mark.usefixtures("small_programs_are_cached")

CPUS = ["CPU:0", "CPU:1", "CPU:2"]
X = np.random.default_rng(0).normal(size=(120, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def make_model(rate: float = 0.05, *inner: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), *inner, keras.layers.Dense(2)]
    model = keras.Sequential(layers, name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def make_async(
    most: int | None = 4, rate: float = 0.05, *inner: Any, **options: Any
) -> tuple[keras.Model, mw.AsyncServer]:
    strategy = mw.AsyncServer(max_staleness=most, devices=CPUS)
    return mw.distribute(make_model(rate, *inner, **options), strategy), strategy


def fit(model: keras.Model, **options: Any) -> dict[str, list[float]]:
    keras.utils.set_random_seed(2)
    usual = {"x": X, "y": Y, "batch_size": 12, "verbose": 0}
    history: dict[str, list[float]] = model.fit(**{**usual, **options}).history
    return history


def num_threads() -> int:
    return sum(each.name.startswith("worker ") for each in threading.enumerate())


def test_a_fit_learns_and_tells_how_old_its_gradients_were() -> None:
    model, strategy = make_async()
    history = fit(model, epochs=4)
    assert history.keys() == {"accuracy", "loss"}
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert strategy.staleness.total() == 4 * 10 * 3
    assert strategy.staleness.largest <= 4
    assert str(strategy.staleness).startswith("staleness  updates\n")
    workers = strategy.workers
    assert sum(worker.updates for worker in workers) == 4 * 10 * 3
    assert sum(worker.samples for worker in workers) == 4 * 120
    assert "/device:CPU:2" in str(workers)
    assert num_threads() == 0


def test_loss_and_metrics_count_every_sample_once_however_old_its_weights() -> None:
    model, _ = make_async(8, 0.0)
    wanted = make_model().evaluate(X, Y, batch_size=12, verbose=0, return_dict=True)
    for size in (12, 50):  # 50: a tail of 20
        history = fit(model, batch_size=size)
        for name, value in wanted.items():
            np.testing.assert_allclose(history[name], [value], rtol=1e-5)


def test_a_slow_worker_does_less_and_the_others_do_not_wait_for_it() -> None:
    model, strategy = make_async(1000)
    strategy.delays = {1: 0.1}
    fit(model, epochs=2)
    first, slow, last = strategy.workers
    assert slow.updates < min(first.updates, last.updates)
    assert slow.updates + first.updates + last.updates == 60


def test_evaluate_and_predict_use_all_devices_and_give_what_stock_keras_gives() -> None:
    model, _ = make_async()
    fit(model, validation_data=(X, Y))
    alone = make_model()
    alone.set_weights([np.asarray(each) for each in model.get_weights()])
    expected = alone.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), expected, rtol=1e-5)
    predicted = model.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, alone.predict(X, verbose=0), atol=1e-5)
    # And training goes on from there.
    before = model.get_weights()[0]
    assert fit(model)["loss"][0] < expected[0]
    assert not np.array_equal(before, model.get_weights()[0])


def test_variables_live_on_the_first_device() -> None:
    with mw.AsyncServer(devices=CPUS[1:]).scope():
        model = make_model()
    for _ in range(2):
        devices = {d for v in model.variables for d in v.value.devices()}
        assert [d.id for d in devices] == [1]
        fit(model)


def test_validation_is_part_of_the_history_and_callbacks_can_stop() -> None:
    model, _ = make_async()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=0, mode="max")
    history = fit(model, epochs=5, validation_data=(X, Y), callbacks=[stop])
    assert history.keys() == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert len(history["loss"]) == 2


def test_a_callback_that_wants_the_model_after_a_batch_sees_whole_batches() -> None:
    model, strategy = make_async()
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.jax_state_sync()
            weight = self.model.get_weights()[0][0, 0]
            seen.append((strategy.staleness.total(), weight))

    fit(model, callbacks=[Look()])
    assert [updates for updates, _ in seen] == list(range(3, 33, 3))
    assert len({weights for _, weights in seen}) == 10


def test_a_callback_that_wants_numbers_gets_those_of_every_batch() -> None:
    model, _ = make_async()
    losses = []

    class Numbers(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    history = fit(model, callbacks=[Numbers()])
    assert len(losses) == 10
    assert losses[-1] == pytest.approx(history["loss"][0], rel=1e-5)


def test_batches_may_come_from_a_generator() -> None:
    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, 120, 12):
                yield X[start : start + 12], Y[start : start + 12]

    model, strategy = make_async()
    options = {"steps_per_epoch": 7, "epochs": 2, "shuffle": False}
    fit(model, x=batches(), y=None, batch_size=None, **options)
    assert strategy.staleness.total() == 2 * 7 * 3


def test_a_batch_of_fewer_samples_than_workers_is_an_update_for_each() -> None:
    model, strategy = make_async()
    fit(model, x=X[:14], y=Y[:14], batch_size=12)
    assert strategy.staleness.total() == 3 + 2
    assert sum(worker.samples for worker in strategy.workers) == 14


def test_it_says_how_it_goes_through_the_data() -> None:
    model, strategy = make_async()
    fit(model)
    data, steps = str(strategy.pace["fit"]).splitlines()
    assert data == (
        "Batches come from the host: workers take them when they are ready."
    )
    assert re.fullmatch(
        r"Steps are dispatched 10 at a time: one takes about .* ms\.", steps
    )


def seen_by_workers(monkeypatch: pytest.MonkeyPatch) -> list[Pulled]:
    """What workers pull from now on."""
    pulls: list[Pulled] = []
    compute = DeviceWorker.compute

    def look(self: DeviceWorker, task: Task, pulled: Pulled) -> Any:
        pulls.append(pulled)
        return compute(self, task, pulled)

    monkeypatch.setattr(DeviceWorker, "compute", look)
    return pulls


def test_every_update_has_random_numbers_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pulls = seen_by_workers(monkeypatch)
    model, _ = make_async(8, 0.05, keras.layers.Dropout(0.5))
    fit(model)
    seeds = [tuple(np.asarray(pulled.others[0]).tolist()) for pulled in pulls]
    assert len(set(seeds)) == len(seeds) == 30
    (after,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    assert np.asarray(after.value)[1] == min(seeds)[1] + 30


def test_statistics_of_batchnorm_gather_what_all_workers_saw() -> None:
    norm = keras.layers.BatchNormalization(momentum=0.97)
    model, strategy = make_async(6, 0.0, norm)
    strategy.delays = dict.fromkeys(range(3), 0.004)  # so that all compute at once
    fit(model, x=X + 4.0, epochs=5)
    assert strategy.staleness.mean > 0.5
    # Batches of four samples vary by less than all samples do.
    mean, deviation = 4.0 + X.mean(axis=0), 3 / 4 * X.var(axis=0)
    share = 1 - 0.97**150  # of the way from where they started
    np.testing.assert_allclose(norm.moving_mean, mean * share, atol=0.15)
    wanted = deviation * share + (1 - share)
    np.testing.assert_allclose(norm.moving_variance, wanted, rtol=0.25)


def test_verify_compares_updates_one_after_the_other_with_one_device() -> None:
    strategy = mw.AsyncServer(max_staleness=0, devices=CPUS)
    assert mw.verify(make_model(), X, Y, strategy, batch_size=50, steps=3).ok
    strategy = mw.AsyncServer(max_staleness=2, devices=CPUS)
    with pytest.raises(StrategyError) as raised:
        mw.verify(make_model(), X, Y, strategy)
    assert str(raised.value) == (
        "verify received AsyncServer(3 workers, max_staleness=2).\n"
        "Which weights a gradient is computed on depends on who is faster, so no "
        "training on one device gives the same.\n"
        "Use max_staleness=0, which equals one device on the batches of the workers."
    )


def test_a_strategy_trains_several_models_on_batches_of_the_same_shapes() -> None:
    strategy = mw.AsyncServer(max_staleness=0, devices=CPUS)
    plain = make_model()
    bounded = make_model(0.05, keras.layers.Activation("tanh"))
    for model in (plain, bounded):
        mw.distribute(model, strategy)
    for _ in range(2):
        ours = [fit(model)["loss"] for model in (plain, bounded)]
    alone = []
    for inner in ([], [keras.layers.Activation("tanh")]):
        model, _ = make_async(0, 0.05, *inner)
        alone.append([fit(model)["loss"] for _ in range(2)][-1])
    assert ours == alone


def test_layers_can_be_frozen_between_two_trainings() -> None:
    frozen = keras.layers.Dense(6)
    model, _ = make_async(4, 0.05, frozen)
    fit(model)
    frozen.trainable = False
    before = np.asarray(frozen.kernel.value)
    model.compile("sgd", model.loss)
    fit(model)
    np.testing.assert_array_equal(before, np.asarray(frozen.kernel.value))


def test_remat_gives_the_same_gradients() -> None:
    strategy = mw.AsyncServer(max_staleness=0, devices=CPUS, remat=True)
    assert mw.verify(make_model(), X, Y, strategy, batch_size=50, steps=3).ok


def test_asynchronous_and_synchronous_training_both_learn_digits() -> None:
    digits = load_digits()
    right = {}
    for name, strategy in {
        "mirrored": mw.Mirrored(CPUS[:2]),
        "async": mw.AsyncServer(devices=CPUS[:2]),
    }.items():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
        mw.distribute(model, strategy)
        model.fit(digits.x_train, digits.y_train, epochs=3, verbose=0)
        _, right[name] = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    assert right["mirrored"] > 0.75
    assert right["async"] > 0.75


def test_a_run_that_was_interrupted_goes_on_with_what_the_server_had(
    tmp_path: Path,
) -> None:
    def train() -> Any:
        inner = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        model, strategy = make_async(0, 0.05, *inner)
        history = fit(model, epochs=2)
        return bits_of(model), history, strategy.staleness.total()

    *expected, total = in_one_go(train, tmp_path / "a", save_every=5)
    *found, later = with_interruptions(train, tmp_path / "b", 7, save_every=5)
    assert found == expected
    assert (total, later) == (60, 45)  # it went on after the fifth of 20 steps


def test_a_run_says_that_it_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(Channel, "say", lambda self, **facts: said.append(facts))
    run = SimpleNamespace(orders=SimpleNamespace(on_nan="stop"))
    monkeypatch.setattr(asynchronous, "current_run", lambda: run)
    for most in (0, 3):
        model, _ = make_async(most)
        fit(model)
    notices = [facts["notice"] for facts in said if "notice" in facts]
    assert notices == [
        "AsyncServer with max_staleness > 0: a resumed training goes on with the "
        "weights that were saved, but not bit for bit as it would have without an "
        "interruption"
    ]


def failing_at(
    monkeypatch: pytest.MonkeyPatch, number: int, fail: Callable[[], Any]
) -> None:
    """Lets a worker meet something at its batch of this number."""
    compute = DeviceWorker.compute

    def fail_once(self: DeviceWorker, task: Task, pulled: Pulled) -> Any:
        if task.number == number:
            fail()
        return compute(self, task, pulled)

    monkeypatch.setattr(DeviceWorker, "compute", fail_once)


def test_an_error_in_a_worker_names_it_and_keeps_what_was_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError("the cable was pulled")

    model, strategy = make_async()
    start = model.get_weights()[0]
    with monkeypatch.context() as patch:
        failing_at(patch, 9, fail)
        with pytest.raises(WorkerError) as raised:
            fit(model)
    (note,) = raised.value.__notes__
    assert note.startswith("Traceback")
    assert "in fail\n" in note
    assert re.fullmatch(
        r"worker \d \(/device:CPU:\d\) failed after \d+ updates: OSError: the cable "
        r"was pulled\n"
        r"A batch that cannot be computed ends the training; what was applied before "
        r"stays\.\n"
        r"Look at the traceback of the worker, which is below\.",
        str(raised.value),
    )
    assert num_threads() == 0
    assert 0 < strategy.staleness.total() < 30
    assert not np.array_equal(start, model.get_weights()[0])
    fit(model)
    assert strategy.staleness.total() == 30


def test_ctrl_c_ends_all_workers_and_keeps_what_was_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = make_async()
    start = model.get_weights()[0]
    with monkeypatch.context() as patch:
        failing_at(patch, 9, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            fit(model, epochs=50)
    assert num_threads() == 0
    assert not np.array_equal(start, model.get_weights()[0])
    assert np.isfinite(fit(model)["loss"][0])


def with_nan() -> Any:
    x = X.copy()
    x[70, 2] = np.nan
    return x


def test_gradients_that_are_nan_are_refused_by_the_name_of_their_worker() -> None:
    model, strategy = make_async()
    strategy.check_nan = False
    with pytest.raises(NumericError) as raised:
        fit(model, x=with_nan(), shuffle=False)
    assert re.fullmatch(
        r"The loss or a gradient of worker \d \(/device:CPU:\d\) is NaN or infinite, "
        r"for batch 17 of a dispatch, on weights after \d+ updates\.\n"
        r"One such update would spoil the weights of all workers, so it was not "
        r"applied\.\n"
        r"Lower the learning rate, clip the gradients \(clipnorm\), look at the data, "
        r"or lower max_staleness\.",
        str(raised.value),
    )
    assert raised.value.exit_code == 8
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_run_that_skips_nan_leaves_out_that_update_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = SimpleNamespace(orders=SimpleNamespace(on_nan="skip"))
    monkeypatch.setattr(asynchronous, "current_run", lambda: run)
    model, strategy = make_async()
    strategy.check_nan = False
    history = fit(model, x=with_nan(), shuffle=False)
    assert strategy.staleness.total() == 29
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_step_over_the_memory_limit_is_refused() -> None:
    model, _ = make_async()
    mw.configure(memory_limit="0.1KiB")
    with pytest.raises(MemoryLimitError, match="train_step of 'small'"):
        fit(model)


@pytest.mark.parametrize("most", [-1, 1.5, True, "4"])
def test_a_bound_that_is_no_number_of_updates_is_refused(most: Any) -> None:
    with pytest.raises(PlanError) as raised:
        mw.AsyncServer(max_staleness=most, devices=CPUS)
    assert str(raised.value) == (
        f"AsyncServer received max_staleness={most!r}.\n"
        "It is a number of updates, a whole number from 0.\n"
        "Use, for example, max_staleness=8, or leave it out."
    )


def test_one_device_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        mw.AsyncServer(devices=["CPU:3"])
    assert str(raised.value) == (
        "AsyncServer received one device, /device:CPU:3.\n"
        "It needs two workers at least: one alone has nobody to be ahead of.\n"
        "Use Single, or pass more devices as devices=[...]."
    )


def test_missing_devices_are_refused() -> None:
    with pytest.raises(UnknownDeviceError, match=r"/device:CPU:99 unknown device"):
        mw.AsyncServer(devices=["CPU:0", "CPU:99"])


def test_accumulation_is_left_to_the_optimizer() -> None:
    with pytest.raises(PlanError) as raised:
        mw.AsyncServer(devices=CPUS, accumulate=4)
    assert str(raised.value) == (
        "AsyncServer received accumulate=4.\n"
        "What a worker computes is an update of its own.\n"
        "Use a smaller batch_size, or let the optimizer add up gradients: "
        "gradient_accumulation_steps=4."
    )


def test_a_run_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "process_count", lambda: 2)
    with pytest.raises(StrategyError) as raised:
        mw.AsyncServer(devices=CPUS)
    assert str(raised.value) == (
        "AsyncServer was made in a run of 2 processes.\n"
        "One process has the weights, and starts those that work for it.\n"
        "Start one process with AsyncServer(processes=2), or use Mirrored."
    )


def test_without_a_bound_a_worker_may_be_four_times_as_slow() -> None:
    assert mw.AsyncServer(devices=CPUS).max_staleness == 12


class OwnStep(keras.Sequential):
    """Trains by a step of its own."""

    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, data)


def with_own_step() -> keras.Model:
    model = OwnStep([keras.Input((6,)), keras.layers.Dense(1)], name="own")
    model.compile("sgd", "mse")
    return model


def with_scale() -> keras.Model:
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(optimizer, model.loss)
    return model


def placed_by_hand() -> keras.Model:
    with mw.device("CPU:4"):
        return make_model()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            with_own_step,
            "'own', whose class OwnStep has a train_step of its own, was to be trained "
            "asynchronously.\n"
            "Workers compute gradients and the server applies them, so a step that "
            "does both would not be called.\n"
            "Override compute_loss instead of train_step, or use Mirrored.",
        ),
        (
            with_scale,
            "'small' was to be trained asynchronously with a LossScaleOptimizer, as "
            "float16 needs it.\n"
            "Its scale changes from update to update, and gradients of an older scale "
            "would be too large or too small.\n"
            "Use precision='bfloat16', which needs no scale.",
        ),
        (
            lambda: make_model(run_eagerly=True),
            "'small' was compiled with run_eagerly=True or jit_compile=False.\n"
            "Workers run compiled programs.\n"
            "Compile the model without these, or train it without a strategy.",
        ),
        (
            placed_by_hand,
            "'small' was to be trained asynchronously, and layers of it were put on "
            "/device:CPU:4 by hand.\n"
            "Every worker computes the whole model on its own device.\n"
            "Build the model outside of mw.device, or train it without a strategy.",
        ),
    ],
)
def test_models_whose_step_cannot_be_taken_apart_are_refused(
    make: Callable[[], keras.Model], text: str
) -> None:
    model = mw.distribute(make(), mw.AsyncServer(devices=CPUS))
    with pytest.raises(StrategyError) as raised:
        fit(model)
    assert str(raised.value) == text


def test_what_needs_one_program_over_all_devices_is_refused() -> None:
    model, strategy = make_async()
    rule = "Its workers run programs of their own, each on one device."
    with pytest.raises(StrategyError) as raised:
        strategy.run(lambda: 1)
    assert str(raised.value) == (
        f"run was called on AsyncServer.\n{rule}\n"
        "Train with fit, or use Mirrored for loops of your own."
    )
    with pytest.raises(StrategyError) as raised:
        strategy.explain(model, X, Y)
    assert str(raised.value) == (
        f"explain was called on AsyncServer.\n{rule}\n"
        "Look at strategy.workers and strategy.staleness."
    )
