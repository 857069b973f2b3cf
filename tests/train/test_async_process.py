"""Worker processes that are killed, stopped and lost, while the others go on."""

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import meshwright as mw
from meshwright.errors import PlanError, StrategyError, WorkerError, WorkerWarning
from meshwright.strategies import asynchronous
from meshwright.train.async_process import ProcessWorker, shares_of_cores
from meshwright.train.async_worker import Pulled, Task

import jax
import keras
import numpy as np
import pytest

from conftest import Run
from staged_workers import is_alive

X = np.random.default_rng(0).normal(size=(96, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


class Trained(NamedTuple):
    """A model and the processes that train it; all tests share them."""

    model: keras.Model
    strategy: mw.AsyncServer
    start: list[Any]

    def fit(self, most: int = 8, **options: Any) -> dict[str, list[float]]:
        """A training from the start."""
        self.strategy.max_staleness = most
        # The seeds of dropout too, which are no weights.
        for variable, value in zip(self.model.variables, self.start, strict=True):
            variable.assign(value)
        usual = {"batch_size": 12, "shuffle": False, "verbose": 0}
        history = self.model.fit(X, Y, **{**usual, **options}).history
        return dict(history)

    def workers(self) -> list[ProcessWorker]:
        """Those that have processes."""
        crew = self.strategy._crew
        return [worker for worker in crew if isinstance(worker, ProcessWorker)]


def make_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    inner = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    layers = [keras.Input((6,)), *inner, keras.layers.Dense(2)]
    model = keras.Sequential(layers, name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def trained() -> Trained:
    model = make_model()
    strategy = mw.AsyncServer(processes=2, devices=["CPU:0"])
    mw.distribute(model, strategy)
    start = [np.asarray(variable.value) for variable in model.variables]
    return Trained(model, strategy, start)


@pytest.fixture(autouse=True)
def usual_limits(trained: Trained) -> None:
    """Undoes what a test has set."""
    trained.strategy.restarts, trained.strategy.patience = 3, 600.0


def at_task(
    monkeypatch: pytest.MonkeyPatch,
    happens: Callable[[ProcessWorker], Any],
    *numbers: int,
) -> None:
    """Lets something happen to the worker that takes these tasks, once for each."""
    find, waiting = ProcessWorker.find, list(numbers)

    def meet(self: ProcessWorker, task: Task, pulled: Pulled) -> Any:
        if task.number in waiting and self.process is not None:
            waiting.remove(task.number)
            happens(self)
        return find(self, task, pulled)

    monkeypatch.setattr(ProcessWorker, "find", meet)


def send(number: signal.Signals) -> Callable[[ProcessWorker], None]:
    def send_it(worker: ProcessWorker) -> None:
        assert worker.process is not None
        worker.process.send_signal(number)

    return send_it


def test_a_worker_that_is_killed_comes_back_and_nothing_is_lost(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = trained.fit(most=0, epochs=2)
    weights = trained.model.get_weights()
    before = [worker.process for worker in trained.workers()]
    at_task(monkeypatch, send(signal.SIGKILL), 5, 11)
    with pytest.warns(WorkerWarning) as warned:
        disturbed = trained.fit(most=0, epochs=2)
    # One update after the other, so also the numbers can be compared.
    assert disturbed == undisturbed
    for ours, theirs in zip(trained.model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert len(warned) == 2
    for warning in warned:
        assert re.fullmatch(
            r"worker \d \(process \d\) was ended by SIGKILL after \d+ updates\. "
            r"Another one takes its batch, and it is started again, \d of 3 times\.",
            str(warning.message),
        )
    workers = trained.strategy.workers
    assert sum(worker.restarts for worker in workers) == 2
    assert sum(worker.samples for worker in workers) == 2 * 96
    assert all(worker.bytes_moved > 0 for worker in workers if worker.updates)
    assert [worker.process for worker in trained.workers()] != before


def test_processes_equal_one_device_on_the_batches_of_the_workers(
    trained: Trained,
) -> None:
    trained.strategy.max_staleness = 0
    assert mw.verify(make_model(), X, Y, trained.strategy, batch_size=12).ok


def test_a_worker_that_stops_is_taken_for_dead(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.fit()
    trained.strategy.patience = 1.0
    at_task(monkeypatch, send(signal.SIGSTOP), 4)
    with pytest.warns(WorkerWarning, match=r"process \d\) said nothing for 1 s after"):
        trained.fit()
    assert trained.strategy.staleness.total() == 16


def test_a_worker_that_dies_too_often_is_given_up_and_the_other_goes_on(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.fit()
    trained.strategy.restarts = 0
    at_task(monkeypatch, send(signal.SIGKILL), 4)
    with pytest.warns(WorkerWarning, match="takes its batch, and it is given up"):
        trained.fit()
    assert trained.strategy.staleness.total() == 16
    assert min(worker.updates for worker in trained.strategy.workers) <= 4


def test_without_any_worker_a_training_ends(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.fit()
    trained.strategy.restarts = 0
    at_task(monkeypatch, send(signal.SIGKILL), *range(16))
    with pytest.warns(WorkerWarning), pytest.raises(WorkerError) as raised:
        trained.fit()
    assert re.fullmatch(
        r"worker \d \(process \d\) was ended by SIGKILL, and no other worker is "
        r"left\.\n"
        r"A worker is started again 0 times in a fit\.\n"
        r"Look at what the workers printed, at the memory of the machine, or raise "
        r"strategy\.restarts\.",
        str(raised.value),
    )
    # In the next one, all get another chance.
    monkeypatch.undo()
    trained.fit()
    assert trained.strategy.staleness.total() == 16


def test_an_error_in_a_worker_process_names_it(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.fit()
    find = ProcessWorker.find

    def garble(self: ProcessWorker, task: Task, pulled: Pulled) -> Any:
        x, y = task.batch
        task.batch = (x[:, :5], y) if task.number == 7 else task.batch
        return find(self, task, pulled)

    monkeypatch.setattr(ProcessWorker, "find", garble)
    with pytest.raises(WorkerError) as raised:
        trained.fit()
    assert re.match(
        r"worker \d \(process \d\) failed after \d+ updates: RuntimeError: Traceback",
        str(raised.value),
    )
    assert "async_child.py" in raised.value.__notes__[0]


def test_ctrl_c_does_not_wait_for_a_worker_that_hangs(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.fit()

    def hang_and_interrupt(worker: ProcessWorker) -> None:
        send(signal.SIGSTOP)(worker)
        os.kill(os.getpid(), signal.SIGINT)

    at_task(monkeypatch, hang_and_interrupt, 6)
    with pytest.raises(KeyboardInterrupt):
        trained.fit()
    monkeypatch.undo()
    assert np.isfinite(trained.fit()["loss"][0])


def test_processes_end_with_the_one_that_started_them(run_script: Run) -> None:
    done = run_script(
        "import os, signal\n"
        "import meshwright as mw\n"
        "import keras, numpy as np\n"
        "strategy = mw.AsyncServer(processes=2, devices=['CPU:0'])\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "mw.distribute(model, strategy)\n"
        "model.fit(np.ones((8, 2)), np.ones((8, 1)), 4, verbose=0)\n"
        "print(*(worker.process.pid for worker in strategy._crew), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
        status=-signal.SIGKILL,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a worker has outlived its training"
        time.sleep(0.05)


class CallsBack(keras.layers.Layer):
    """Asks Python while it computes."""

    def call(self, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return x + jax.pure_callback(np.sin, shape, jax.lax.stop_gradient(x))


def test_a_step_that_calls_back_into_the_script_is_refused(trained: Trained) -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.add(CallsBack())
    model.compile("sgd", "mse")
    mw.distribute(model, trained.strategy)
    with pytest.raises(StrategyError) as raised:
        model.fit(X, X[:, :1], 12, verbose=0)
    assert raised.value.received.startswith(
        "A training step cannot be sent to worker processes: "
    )
    assert str(raised.value).endswith(
        "\nThey know nothing of the script, so a step must not call back into it.\n"
        "Leave processes out: then devices of this process are the workers."
    )


def test_cores_are_dealt_out_if_there_are_enough() -> None:
    here = sorted(os.sched_getaffinity(0))
    assert shares_of_cores(1) == [here]
    assert shares_of_cores(len(here) + 1) == [[] for _ in range(len(here) + 1)]
    alone = shares_of_cores(len(here))
    assert sorted(core for cores in alone for core in cores) == here


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "2"])
def test_a_number_of_processes_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(PlanError) as raised:
        mw.AsyncServer(processes=number)
    assert str(raised.value) == (
        f"AsyncServer received processes={number!r}.\n"
        "It is a number of worker processes, from 1.\n"
        "Use, for example, processes=2, or leave it out: then devices work."
    )


def test_processes_beside_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        platform = "gpu"

    gpus = {f"/device:CPU:{i}": Gpu() for i in range(8)}
    monkeypatch.setattr(asynchronous, "jax_devices", lambda: gpus)
    with pytest.raises(PlanError) as raised:
        mw.AsyncServer(processes=2, devices=["CPU:1"])
    assert str(raised.value) == (
        "AsyncServer received processes=2 on /device:CPU:1.\n"
        "Worker processes compute on CPUs.\n"
        "Leave processes out: then each of these devices is a worker. Or pass "
        "devices=['CPU:0']."
    )
