"""How many steps are dispatched together is chosen for a reason that can be read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import meshwright as mw
from meshwright.data.resident import ArraysInMemory
from meshwright.train.pace import STACK_BYTES, Pace, even_length

import jax
import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def make_model(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **options)
    return model


def make_strategy() -> mw.Mirrored:
    return mw.Mirrored(["CPU:0", "CPU:1"])


def fit_reason(strategy: mw.Mirrored, x: Any = X, **options: Any) -> list[str]:
    """Why a `fit` went as it did, line by line."""
    model = mw.distribute(make_model(), strategy)
    y = None if x is not X else Y
    model.fit(x, y, verbose=0, **options)
    return str(strategy.pace["fit"]).splitlines()


def test_small_arrays_stay_on_the_devices() -> None:
    data, steps = fit_reason(make_strategy(), batch_size=8)
    assert data == "The arrays stay on the devices, 1.2 KiB on each."
    assert steps.startswith("Steps are dispatched 5 at a time: one takes about 0.0")
    assert steps.endswith(" ms.")


def test_streams_come_from_the_host() -> None:
    batches = ((X[start : start + 8], Y[start : start + 8]) for start in (0, 8))
    options = {"shuffle": False, "steps_per_epoch": 2}
    data, steps = fit_reason(make_strategy(), batches, **options)
    assert data == "Batches come from the host: the data is not arrays in memory."
    # So that one is read while the other one is computed.
    assert steps.startswith("Steps are dispatched one by one: one takes about 0.0")


def test_arrays_on_disk_come_from_the_host(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", X)
    strategy = make_strategy()
    model = mw.distribute(make_model(), strategy)
    model.fit(np.load(tmp_path / "x.npy", mmap_mode="r"), Y, verbose=0)
    assert "not arrays in memory" in str(strategy.pace["fit"])


def test_whoever_wants_it_keeps_arrays_on_the_host() -> None:
    strategy = make_strategy()
    strategy.resident = False
    data, steps = fit_reason(strategy, batch_size=4)
    assert data == "Batches come from the host: resident=False."
    assert steps.startswith("Steps are dispatched 5 at a time: one takes about 0.0")


def test_a_memory_limit_keeps_arrays_on_the_host() -> None:
    mw.configure(memory_limit="1GiB")
    assert fit_reason(make_strategy()) == [
        "Batches come from the host: a memory limit is set.",
        "Steps are dispatched one by one: a memory limit is set.",
    ]


def test_arrays_that_do_not_fit_come_from_the_host() -> None:
    strategy = make_strategy()
    huge = np.broadcast_to(np.float32(0), (2**40, 4))
    pace = Pace(make_model(), "fit", strategy.mesh, None)
    assert not pace.keeps(ArraysInMemory((huge,), 2**40, 8, False))
    assert str(pace).startswith(
        "Batches come from the host: the arrays have 16.0 TiB, and there is room for "
    )
    assert str(pace).endswith(" on each device.")


def test_executions_that_callbacks_count_are_those_of_keras() -> None:
    strategy = make_strategy()
    model = mw.distribute(make_model(steps_per_execution=2), strategy)
    nan = keras.callbacks.TerminateOnNaN()
    model.fit(X, Y, verbose=0, callbacks=[nan])
    assert str(strategy.pace["fit"]).splitlines() == [
        "Batches come from the host: TerminateOnNaN counts executions of several "
        "steps.",
        "Steps are dispatched one by one: TerminateOnNaN wants to see each of them.",
    ]


def test_state_that_comes_from_the_host_comes_for_each_step() -> None:
    strategy = mw.Mirrored(["CPU:0", "CPU:1"], offload=True)
    data, steps = fit_reason(strategy)
    assert data.startswith("The arrays stay on the devices")
    assert steps == (
        "Steps are dispatched one by one: the optimizer's state comes from the host "
        "for each of them."
    )


def test_who_wants_no_thread_gets_steps_one_by_one() -> None:
    strategy = make_strategy()
    strategy.resident, strategy.prefetch = False, 0
    _, steps = fit_reason(strategy, batch_size=4)
    assert steps == "Steps are dispatched one by one: prefetch=0."


def test_predict_takes_batches_one_by_one() -> None:
    strategy = make_strategy()
    mw.distribute(make_model(), strategy).predict(X, batch_size=4, verbose=0)
    _, steps = str(strategy.pace["predict"]).splitlines()
    assert steps == "Steps are dispatched one by one: predict returns every batch."


def test_large_batches_of_the_host_are_not_stacked() -> None:
    strategy = make_strategy()
    strategy.resident = False
    model = mw.distribute(make_model(), strategy)
    size = STACK_BYTES // 2 // X[0].nbytes + 1
    x = np.zeros((4 * size, 6), "float32")
    model.fit(x, np.zeros(len(x), "int32"), batch_size=size, verbose=0)
    assert str(strategy.pace["fit"]).endswith(
        "one by one: two batches have more than 16.0 MiB."
    )


class Growing(keras.Model):
    """Its step returns a state of other types than it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, (weights, others, *rest) = super().train_step(state, data)
        others = [others[0].astype("float32") + 1, *others[1:]]
        return logs, (weights, others, *rest)


def test_a_step_that_changes_types_is_not_put_into_a_loop() -> None:
    strategy = make_strategy()
    model = Growing()
    model.compile("sgd", "mse")
    mw.distribute(model, strategy).fit(X, Y, batch_size=8, verbose=0)
    assert str(strategy.pace["fit"]).endswith(
        "one by one: the step changes the shape or type of its state."
    )
    assert model.count == 6


@pytest.mark.parametrize(
    ("num_steps", "wanted", "length"),
    [(10, 1, 1), (1, 100, 1), (150, 100, 150), (1000, 96, 100), (1009, 100, 100)],
)
def test_stretches_are_of_equal_length_where_possible(
    num_steps: int, wanted: int, length: int
) -> None:
    assert even_length(num_steps, wanted) == length


@pytest.mark.parametrize(
    ("num_steps", "wanted", "length"),
    [(10, 1, 1), (1, 100, 1), (150, 100, 75), (10, 100, 5), (11, 100, 5), (234, 8, 9)],
)
def test_stacks_are_two_or_more_in_an_epoch(
    num_steps: int, wanted: int, length: int
) -> None:
    assert even_length(num_steps, wanted, num_stretches=2) == length


@contextmanager
def noting_compilations() -> Iterator[list[str]]:
    """Collects the names of the threads in which steps are compiled."""
    threads: list[str] = []

    def note(name: str, seconds: float, **info: Any) -> None:
        is_step = info.get("fun_name") == "jit(run)"
        if is_step and name.endswith("backend_compile_duration"):
            threads.append(threading.current_thread().name.split("_")[0])

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield threads
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize(
    "options",
    [
        {"validation_data": (X[:20], Y[:20])},
        {"validation_split": 0.5, "validation_batch_size": 8},
    ],
)
def test_what_is_needed_later_is_compiled_meanwhile(options: dict[str, Any]) -> None:
    strategy = make_strategy()
    model = mw.distribute(make_model(), strategy)
    with noting_compilations() as threads:
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, **options)
    # Whole batches and the last one, in training and in validation.
    assert sorted(threads) == ["MainThread", *["meshwright-compile"] * 3]


def test_the_last_batch_is_not_compiled_for_if_it_is_not_reached() -> None:
    strategy = make_strategy()
    model = mw.distribute(make_model(), strategy)
    with noting_compilations() as threads:
        model.fit(X, Y, batch_size=8, steps_per_epoch=5, verbose=0)
    assert threads == ["MainThread"]


def test_no_program_is_compiled_twice() -> None:
    strategy = make_strategy()
    model = mw.distribute(make_model(), strategy)
    data = {"batch_size": 8, "verbose": 0}
    model.fit(X, Y, validation_data=(X, Y), **data)
    with noting_compilations() as threads:
        model.fit(X, Y, epochs=2, validation_data=(X, Y), **data)
        model.evaluate(X, Y, **data)
    assert not threads
