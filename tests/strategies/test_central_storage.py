"""`mw.CentralStorage`: where its variables are, and what it refuses.

That it equals one device is in tests/test_equivalence.py, across processes in
tests/cluster/test_two_processes.py.
"""

import re
from typing import Any

import meshwright as mw
from meshwright.devices.runtime import name_of
from meshwright.errors import (
    MeshwrightError,
    PlanError,
    StrategyError,
    UnknownDeviceError,
)

import jax
import keras
import numpy as np
import pytest

from conftest import Run

L = keras.layers
CPUS = [f"CPU:{i}" for i in range(8)]
X = np.random.default_rng(0).normal(size=(11, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(11, 4)).astype("float32")


def net(optimizer: Any = "adam", **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(2)
    # No bias in front of BatchNorm: its gradient is nothing but rounding.
    layers = [
        L.Dense(16, use_bias=False),
        L.BatchNormalization(),
        L.Dropout(0.2),
        L.Dense(4),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile(optimizer, "mse", **compiled)
    return model


def central(**options: Any) -> mw.CentralStorage:
    return mw.CentralStorage("CPU:5", **{"devices": CPUS[:2], **options})


def trained(model: keras.Model, strategy: Any) -> keras.Model:
    mw.distribute(model, strategy)
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    return model


def beats(raised: pytest.ExceptionInfo[MeshwrightError]) -> list[str]:
    return str(raised.value).split("\n")


def devices_of(model: keras.Model) -> set[str]:
    variables = [*model.variables, *model.optimizer.variables]
    return {name_of(d) for v in variables for d in v.value.sharding.device_set}


def test_variables_live_on_one_device_whatever_runs() -> None:
    with central().scope():
        model = net()
    assert devices_of(model) == {"/device:CPU:5"}
    model.fit(X, Y, batch_size=4, verbose=0, validation_data=(X[:5], Y[:5]))
    assert devices_of(model) == {"/device:CPU:5"}
    model.evaluate(X, Y, batch_size=4, verbose=0)
    model.predict(X, verbose=0)
    assert devices_of(model) == {"/device:CPU:5"}
    model.optimizer.learning_rate = 0.5
    assert devices_of(model) == {"/device:CPU:5"}


def test_the_first_device_keeps_them_if_none_is_named() -> None:
    model = trained(net(), mw.CentralStorage(devices=CPUS[2:4]))
    assert devices_of(model) == {"/device:CPU:2"}
    assert mw.CentralStorage().num_replicas == 8


def test_the_host_keeps_them_for_gpus(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "print(mw.CentralStorage())\n"
        "print(mw.CentralStorage('GPU:1'))\n",
        MESHWRIGHT_VIRTUAL="GPU:2",
    )
    assert done.stdout.splitlines() == [
        "CentralStorage(data=2, variables on /device:CPU:0)",
        "CentralStorage(data=2, variables on /device:GPU:1)",
    ]


def test_verify_finds_it_equal_to_one_device() -> None:
    report = mw.verify(net(), X, Y, central(), batch_size=4)
    assert report.ok, str(report)


@pytest.mark.parametrize("levers", [{"accumulate": 2}, {"remat": True}])
def test_levers_are_those_of_every_strategy(levers: Any) -> None:
    ours = trained(net("sgd"), central(**levers))
    theirs = trained(net("sgd"), mw.Mirrored(CPUS[:2], **levers))
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_a_model_goes_on_under_another_strategy() -> None:
    def in_two_halves(first: Any, second: Any) -> list[Any]:
        model = trained(trained(net("sgd"), first), second)
        return list(model.get_weights())

    found = in_two_halves(mw.Mirrored(CPUS[:2]), central())
    back = in_two_halves(central(), mw.Mirrored(CPUS[:2]))
    expected = in_two_halves(mw.Mirrored(CPUS[:2]), mw.Mirrored(CPUS[:2]))
    for values in (found, back):
        for mine, other in zip(values, expected, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)


def test_explain_says_what_is_copied_where() -> None:
    told = str(central().explain(net(), X[:4], Y[:4])).splitlines()
    assert told[0] == "CentralStorage(data=2, variables on /device:CPU:5)"
    assert told[1].endswith("kept on /device:CPU:5")
    assert "variables are whole on /device:CPU:5 (about" in told[-2]
    assert told[-1].startswith("each step copies ")
    assert " of variables from /device:CPU:5 to 2 devices, " in told[-1]


def test_pace_says_why_steps_are_not_dispatched_together() -> None:
    strategy = central()
    trained(net(), strategy)
    assert str(strategy.pace["fit"]).splitlines()[-1] == (
        "Steps are dispatched one by one: the device that keeps the variables updates "
        "them after each."
    )


def test_devices_that_are_not_there_are_errors() -> None:
    with pytest.raises(UnknownDeviceError, match="GPU:0 unknown device"):
        mw.CentralStorage("GPU:0")
    with pytest.raises(UnknownDeviceError, match="GPU:1 unknown device"):
        mw.CentralStorage(devices=["CPU:0", "GPU:1"])


def test_one_device_has_no_gradients_to_add_up() -> None:
    with pytest.raises(PlanError) as caught:
        mw.CentralStorage(devices=["CPU:3"])
    assert beats(caught) == [
        "CentralStorage received one device, /device:CPU:3, to compute on.",
        "It adds up the gradients of several devices.",
        "Pass two or more as devices=[...], or use mw.Single().",
    ]


def test_layers_that_were_placed_by_hand_are_refused() -> None:
    with mw.device("CPU:1"):
        first = L.Dense(4)
    with mw.device("CPU:2"):
        second = L.Dense(4)
    model = keras.Sequential([keras.Input((8,)), first, second], name="placed")
    model.compile("sgd", "mse")
    with pytest.raises(StrategyError, match="were put on /device:CPU:1, /device:CPU:2"):
        trained(model, central())


def test_preflight_says_that_it_does_not_apply() -> None:
    with pytest.raises(StrategyError, match="this strategy has steps of its own"):
        mw.preflight(net(), 4, central())


def test_a_run_that_skips_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Orders:
        on_nan = "skip"

    class Skipping:
        orders = Orders

    where = "meshwright.strategies.central_storage.current_run"
    monkeypatch.setattr(where, lambda: Skipping)
    with pytest.raises(StrategyError) as caught:
        central().make_step(net(), jax.jit(net().train_step))
    assert beats(caught) == [
        "A run with --on-nan skip trains 'net' by CentralStorage(data=2, variables on "
        "/device:CPU:5).",
        "Gradients and update are programs of their own, and a step is left out by one "
        "that is whole.",
        "Use --on-nan rollback or stop.",
    ]


class OwnStep(keras.Model):
    """Takes its gradients further than central storage can follow."""

    def __init__(self, way: str) -> None:
        super().__init__(name=way)
        self.head = L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        own, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss(own: Any) -> Any:
            return self.compute_loss(x, y, self.stateless_call(own, others, x)[0])

        value, gradients = jax.value_and_grad(loss)(own)
        if self.name == "reading":
            gradients = [g + 0.0 * slots[-1].sum() for g in gradients]
        own, slots = self.optimizer.stateless_apply(slots, gradients, own)
        if self.name == "decaying":
            own = [0.9 * w for w in own]
        return {"loss": value}, (own, others, slots, metrics)


@pytest.mark.parametrize(
    ("way", "told"),
    [
        (
            "decaying",
            [
                "train_step of 'decaying' does not end with one stateless_apply of its "
                "optimizer.",
                "Central storage computes gradients on all devices and updates weights "
                "on another, so the update is the last that happens to them.",
                "Return what optimizer.stateless_apply returned, or use mw.Mirrored().",
            ],
        ),
        (
            "reading",
            [
                "train_step of 'reading' reads adam/reading_dense_bias_velocity before "
                "its optimizer does.",
                "With central storage optimizer state stays on one device; others see "
                "its numbers only.",
                "Leave it to the optimizer, or use mw.Mirrored().",
            ],
        ),
    ],
)
def test_own_steps_that_need_all_in_one_place_are_refused(
    way: str, told: list[str]
) -> None:
    model = OwnStep(way)
    model(X[:1])
    model.compile("adam", "mse")
    with pytest.raises(StrategyError) as caught:
        trained(model, central())
    numbered = re.compile(r"(adam|dense)_\d+")
    assert numbered.sub(r"\1", str(caught.value)).split("\n") == told


@pytest.mark.parametrize(
    "make", [mw.CentralStorage, lambda **levers: mw.LocalSGD(8, **levers)]
)
def test_strategies_with_updates_of_their_own_keep_the_state_at_hand(make: Any) -> None:
    with pytest.raises(PlanError) as raised:
        make(offload=True)
    found = raised.value
    assert found.received.endswith(" received offload=True.")
    assert [found.rule, found.change] == [
        "It updates weights in a way of its own, with the optimizer's state at hand.",
        "Leave offload out, or use mw.Mirrored() or mw.FSDP().",
    ]
