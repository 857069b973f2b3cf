"""`mw.LocalSGD`: what it refuses, what others see of its workers, and what travels.

That its weights are right is in tests/test_equivalence.py, across processes in
tests/cluster/test_two_processes.py, and after interruptions in tests/train.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import (
    MeshwrightError,
    PlanError,
    StrategyError,
    UnknownDeviceError,
)
from meshwright.parallel.collectives import traffic
from meshwright.parallel.local_sgd import Shares
from meshwright.train.local_step import LocalStep
from meshwright.train.mesh_step import training_state

import jax
import keras
import numpy as np
import pytest

L = keras.layers
CPUS = [f"CPU:{i}" for i in range(8)]
X = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")


def net(optimizer: Any = None, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [L.Dense(16, activation="tanh"), L.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **compiled)
    return model


def local(sync_every: int = 3, outer: Any = None, **options: Any) -> mw.LocalSGD:
    return mw.LocalSGD(sync_every, outer, **{"devices": CPUS[:2], **options})


def trained(model: keras.Model, strategy: mw.LocalSGD, **options: Any) -> keras.Model:
    mw.distribute(model, strategy)
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False, **options)
    return model


def beats(raised: pytest.ExceptionInfo[MeshwrightError]) -> list[str]:
    return str(raised.value).split("\n")


@pytest.mark.parametrize("sync_every", [0, -1, 2.0, True, "4", None])
def test_a_round_is_a_number_of_steps(sync_every: Any) -> None:
    with pytest.raises(PlanError) as caught:
        mw.LocalSGD(sync_every)
    assert beats(caught) == [
        f"LocalSGD received sync_every={sync_every!r}.",
        "It is a number of steps: a whole number from 1.",
        "Use, for example, sync_every=8; 1 averages after each step.",
    ]


def test_one_device_has_nobody_to_agree_with() -> None:
    with pytest.raises(PlanError) as caught:
        mw.LocalSGD(4, devices=["CPU:1"])
    assert beats(caught) == [
        "LocalSGD received one device, /device:CPU:1.",
        "Its workers are devices, and one has nobody to agree with.",
        "Pass two or more as devices=[...], or use mw.Single().",
    ]


@pytest.mark.parametrize("outer", ["averages", 0.7, keras.optimizers.SGD, [1]])
def test_the_outer_optimizer_is_one_of_keras(outer: Any) -> None:
    with pytest.raises(PlanError) as caught:
        local(outer=outer)
    received, rule, change = beats(caught)
    assert received == f"LocalSGD received outer={outer!r} (a {type(outer).__name__})."
    assert rule == (
        "It takes None or 'average', or a Keras optimizer, which moves what the "
        "workers agree on."
    )
    assert change.startswith("Use, for example, outer=keras.optimizers.SGD(0.7, ")


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UnknownDeviceError, match="GPU:7 unknown device"):
        mw.LocalSGD(4, devices=["CPU:0", "GPU:7"])


def test_levers_of_a_plan_are_checked_as_everywhere() -> None:
    with pytest.raises(PlanError, match="accumulate=0"):
        local(accumulate=0)


def test_a_model_whose_layers_were_placed_by_hand_is_refused() -> None:
    with mw.device("CPU:1"):
        first = L.Dense(4)
    with mw.device("CPU:2"):
        second = L.Dense(4)
    model = keras.Sequential([keras.Input((8,)), first, second], name="placed")
    model.compile("sgd", "mse")
    with pytest.raises(StrategyError) as caught:
        trained(model, local())
    assert beats(caught) == [
        "LocalSGD(data=2, sync_every=3) received 'placed', whose layers were put on "
        "/device:CPU:1, /device:CPU:2 by hand.",
        "This strategy decides itself where variables live and who computes.",
        "Build the model without mw.device, or train it without a strategy.",
    ]


def test_an_eager_model_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        trained(net(run_eagerly=True), local())
    assert beats(caught) == [
        "'net' was compiled with run_eagerly=True or jit_compile=False.",
        "A step of many workers is one compiled program.",
        "Compile the model without these, or train it without a strategy.",
    ]


class Largest(keras.metrics.Metric):
    """The largest output: two of them cannot be added up."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", aggregation="none", name="seen")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return 1.0 * self.seen


def test_a_metric_that_cannot_be_added_up_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        trained(net(metrics=[Largest()]), local())
    assert beats(caught) == [
        "largest/seen, a variable of a metric of 'net', has aggregation='none'.",
        "The metrics of workers are added up, as those of Keras can be.",
        "Write the metric with sums (aggregation='sum'), or train without it and "
        "evaluate afterwards.",
    ]


class Drifting(keras.Model):
    """Its own step gives a variable another type."""

    def __init__(self) -> None:
        super().__init__(name="drifting")
        self.head = L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        weights, *rest = state
        return {"loss": 0.0}, ([w.astype("float16") for w in weights], *rest)


def test_a_state_that_changes_its_type_is_refused() -> None:
    model = Drifting()
    model(X[:1])
    model.compile("sgd", "mse")
    with pytest.raises(StrategyError) as caught:
        trained(model, local())
    assert beats(caught) == [
        "A training step of 'drifting' changes the shape or type of its state.",
        "The variables of a worker of LocalSGD stay as they are from step to step.",
        "Give metrics and variables the dtype that they are assigned.",
    ]


def test_verify_and_preflight_say_that_they_do_not_apply() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.verify(net(), X, Y, local())
    assert beats(caught) == [
        "verify received LocalSGD(data=2, sync_every=3).",
        "It compares with one device, and this strategy leads to other weights by its "
        "nature.",
        "docs/strategies/ says which run it does equal; verify mw.Mirrored() instead.",
    ]
    with pytest.raises(StrategyError) as caught:
        mw.preflight(net(), 4, local(outer=keras.optimizers.SGD(0.5)))
    assert beats(caught) == [
        "preflight received LocalSGD(data=2, sync_every=3, outer=SGD).",
        "It weighs the step of a plan, and this strategy has steps of its own.",
        "Ask about mw.Mirrored() on the same devices; docs/strategies/ says what this "
        "one needs beside it.",
    ]


@pytest.mark.parametrize(
    ("size", "num_workers", "sizes"),
    [(8, 2, (4, 4)), (7, 3, (3, 2, 2)), (2, 4, (1, 1, 0, 0)), (1, 1, (1,))],
)
def test_shares_differ_by_at_most_one(
    size: int, num_workers: int, sizes: tuple[int, ...]
) -> None:
    shares = Shares(size, num_workers)
    assert shares.sizes == sizes
    rows = [row[:n].tolist() for row, n in zip(shares.rows, sizes, strict=True)]
    assert [row for mine in rows for row in mine] == list(range(size))
    assert shares.rows.min() >= 0
    assert shares.rows.max() < size


def weights(model: keras.Model) -> list[Any]:
    return [np.asarray(w) for w in model.get_weights()]


def assert_close(ours: keras.Model, theirs: keras.Model, atol: float = 1e-6) -> None:
    for mine, other in zip(weights(ours), weights(theirs), strict=True):
        np.testing.assert_allclose(mine, other, atol=atol)


def test_looking_at_the_model_between_rounds_changes_nothing() -> None:
    """What is seen is the average of now; the workers go on as they were."""

    class Looking(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.evaluate(X[:5], Y[:5], verbose=0)
            self.seen.append(weights(self.model)[0])

    adam = keras.optimizers.Adam
    looking = Looking()
    undisturbed = trained(net(adam(0.01)), local(4))
    looked_at = trained(net(adam(0.01)), local(4), callbacks=[looking])
    assert_close(looked_at, undisturbed)
    steps = np.diff([seen[0, 0] for seen in looking.seen])
    assert (steps != 0).all()
    np.testing.assert_array_equal(looking.seen[-1], weights(looked_at)[0])


def test_what_a_callback_assigns_reaches_every_worker() -> None:
    """A learning rate of zero stops all of them; weights of zero are those of all."""

    def stop(epoch: int, rate: float) -> float:
        return rate if epoch == 0 else 0.0

    once = trained(net(), local(4), epochs=1)
    stopped = trained(
        net(),
        local(4),
        epochs=3,
        callbacks=[keras.callbacks.LearningRateScheduler(stop)],
    )
    # The last two steps of the first epoch are averaged a little later.
    assert_close(stopped, once)

    def clear(epoch: int, logs: Any) -> None:
        model.set_weights([np.zeros_like(w) for w in weights(model)])

    model = net(keras.optimizers.SGD(0.0))
    trained(model, local(4), callbacks=[keras.callbacks.LambdaCallback(clear)])
    assert not any(w.any() for w in weights(model))


@pytest.mark.parametrize("levers", [{"accumulate": 2}, {"remat": True}])
def test_levers_change_nothing_where_samples_do_not_meet(levers: Any) -> None:
    assert_close(trained(net(), local(**levers)), trained(net(), local()))


def test_layers_compute_in_the_precision_of_the_strategy() -> None:
    model = trained(net(), local(precision="bfloat16"))
    assert model.layers[0].compute_dtype == "bfloat16"
    assert np.isfinite(weights(model)[0]).all()
    assert not np.allclose(weights(model)[0], weights(trained(net(), local()))[0], 0, 0)


class OwnStep(keras.Model):
    """Returns a number of its own, and no metrics."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.head = L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        own, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(own: Any) -> Any:
            return self.compute_loss(x, y, self.stateless_call(own, others, x)[0])

        value, gradients = jax.value_and_grad(loss)(own)
        own, slots = self.optimizer.stateless_apply(slots, gradients, own)
        return {"loss": value, "samples": 1.0 * x.shape[0]}, (
            *(own, others, slots, metrics),
        )


def test_numbers_of_a_step_of_its_own_are_averaged_by_samples() -> None:
    model = OwnStep()
    model(X[:1])
    model.compile("sgd", "mse")
    mw.distribute(model, local(devices=CPUS[:3]))
    logs = model.fit(X[:5], Y[:5], batch_size=5, verbose=0).history
    assert logs["samples"] == pytest.approx([(2 * 2 + 2 * 2 + 1 * 1) / 5])


def test_a_worker_without_samples_sits_a_step_out() -> None:
    """Two samples on three workers: the third neither moves nor counts."""
    two = trained(net(), local(1, devices=CPUS[:2]), steps_per_epoch=1)
    model = mw.distribute(net(), local(1, devices=CPUS[:3]))
    model.train_on_batch(X[:2], Y[:2])
    other = mw.distribute(net(), local(1, devices=CPUS[:2]))
    other.train_on_batch(X[:2], Y[:2])
    assert_close(model, other)
    assert not np.allclose(weights(two)[0], weights(net())[0])


def test_a_round_ends_with_fit_and_a_model_is_all_there_is_then(tmp_path: Any) -> None:
    """A model that was saved and loaded goes on as the one in memory."""
    adam = keras.optimizers.Adam(0.01)
    model = trained(net(adam), local(4))
    model.save(tmp_path / "net.keras")
    loaded = trained(keras.models.load_model(tmp_path / "net.keras"), local(4))
    assert_close(loaded, trained(model, local(4)))


def test_each_model_has_an_outer_optimizer_of_its_own() -> None:
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy = local(2, outer)
    first = trained(net(), strategy)
    assert_close(trained(net(), strategy), first)
    assert not outer.built


def test_a_failing_fit_gives_one_model_back() -> None:
    def fail(batch: int, logs: Any) -> None:
        if batch == 1:
            raise RuntimeError("enough")

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    model = net()
    with pytest.raises(RuntimeError, match="enough"):
        trained(model, local(), callbacks=[failing])
    model.jax_state_sync()
    assert [w.shape for w in weights(model)] == [(8, 16), (16,), (16, 4), (4,)]


@pytest.mark.parametrize("sync_every", [2, 8])
def test_what_travels_is_a_part_of_what_mirrored_sends(sync_every: int) -> None:
    model = net(metrics=["mae"])
    wide = keras.Sequential([keras.Input((8,)), L.Dense(64), L.Dense(4)])
    wide.compile("adam", "mse", metrics=["mae"])
    strategy = local(sync_every, devices=CPUS[:4])
    batch = X[:8], Y[:8]
    state = training_state(wide, batch)

    def bytes_of(strategy: mw.Mirrored | mw.LocalSGD) -> Any:
        step = strategy.make_step(wide, jax.jit(wide.train_step))
        return traffic(step.lower(state, batch).compile().as_text())

    ours = bytes_of(strategy).per_run(sync_every)
    mirrored = bytes_of(mw.Mirrored(CPUS[:4])).per_run(1)
    assert ours / mirrored <= 1 / sync_every + 0.05
    assert ours >= 4 * wide.count_params() / sync_every
    told = str(strategy.explain(model, *batch)).splitlines()[-1]
    assert f", each {sync_every}th " in told
    assert told.endswith(" of Mirrored")


@pytest.mark.soak
@pytest.mark.processes
def test_two_processes_really_send_a_part_of_what_mirrored_sends() -> None:
    """As the loopback device of a network namespace counts it."""
    namespace = ["unshare", "-rn", "true"]
    if shutil.which("unshare") is None or subprocess.run(namespace).returncode:
        pytest.skip("network namespaces are not permitted here")
    script = Path(__file__).parents[2] / "benchmarks/local_sgd.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| LocalSGD(16) |" in done.stdout


def test_a_run_that_skips_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skipping:
        class orders:
            on_nan = "skip"

    monkeypatch.setattr("meshwright.strategies.local_sgd.current_run", lambda: Skipping)
    with pytest.raises(StrategyError) as caught:
        local().make_step(net(), named("train_step"))
    assert beats(caught) == [
        "A run with --on-nan skip trains 'net' by LocalSGD(data=2, sync_every=3).",
        "Each worker would leave out steps of its own, and nobody would know how many.",
        "Use --on-nan rollback or stop.",
    ]


def named(name: str) -> Callable[[], None]:
    def step() -> None: ...

    step.__name__ = name
    return step


def test_only_training_is_done_by_workers() -> None:
    model = trained(net(), local(), validation_data=(X[:5], Y[:5]))
    assert isinstance(model.train_function.guarded, LocalStep)
    assert not isinstance(model.test_function.guarded, LocalStep)
