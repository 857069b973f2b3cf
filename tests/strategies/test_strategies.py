"""Strategies: their plans, scopes, and what they do to a model."""

from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import (
    BatchWarning,
    MemoryLimitError,
    PlanError,
    StrategyError,
    UnknownDeviceError,
)
from meshwright.strategies import strategy as strategy_module
from meshwright.strategies.attach import attached
from meshwright.train import mesh_step

import jax
import keras
import numpy as np
import pytest

from conftest import Run

CPUS = [f"CPU:{i}" for i in range(8)]
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


def make_model(compiled: bool = True) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    if compiled:
        model.compile(optimizer="adam", loss="mse")
    return model


def shards(model: keras.Model) -> list[Any]:
    return [v.value.sharding.shard_shape(tuple(v.shape)) for v in model.weights]


@pytest.mark.parametrize(
    ("strategy", "plan", "num_devices"),
    [
        (lambda: mw.Single(), {}, 1),
        (lambda: mw.Mirrored(), {"data": 8}, 8),
        (lambda: mw.Mirrored(CPUS[:3]), {"data": 3}, 3),
        (lambda: mw.FSDP(), {"fsdp": 8}, 8),
        (lambda: mw.FSDP(4), {"data": 2, "fsdp": 4}, 8),
        (lambda: mw.TensorParallel(2), {"data": 4, "tensor": 2}, 8),
        (lambda: mw.Hybrid(2, 2, 2), {"data": 2, "fsdp": 2, "tensor": 2}, 8),
    ],
)
def test_every_name_yields_its_plan(
    strategy: Any, plan: dict[str, Any], num_devices: int
) -> None:
    made = strategy()
    assert made.plan == mw.Plan(**plan)
    assert len(made.devices) == num_devices
    assert made.num_replicas == made.plan.num_replicas


def test_gpus_are_taken_before_cpus(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\nprint(*mw.Mirrored().devices)\n",
        MESHWRIGHT_VIRTUAL="GPU:3",
    )
    assert done.stdout == "/device:GPU:0 /device:GPU:1 /device:GPU:2\n"


def test_a_strategy_never_falls_back_to_other_devices() -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        mw.Mirrored(["CPU:0", "GPU:0"])
    received, rule, change = str(caught.value).split("\n")
    assert received == "/device:GPU:0 unknown device."
    assert rule == "A strategy runs on the devices it names and never falls back."
    assert change.startswith("Use some of /device:CPU:0, ")


@pytest.mark.parametrize("devices", [[], "CPU:0"])
def test_devices_are_a_list_of_at_least_one(devices: Any) -> None:
    with pytest.raises(PlanError) as caught:
        mw.Mirrored(devices)
    assert str(caught.value).split("\n") == [
        f"devices received {devices!r}.",
        "It takes a list of at least one device.",
        "Write, for example, devices=['/device:CPU:0'].",
    ]


def test_each_device_is_used_once() -> None:
    with pytest.raises(PlanError) as caught:
        mw.Mirrored(["CPU:0", "/cpu:0"])
    received, rule, change = str(caught.value).split("\n")
    assert received.endswith("which names a device twice.")
    assert rule == "Each device of a mesh is used once."
    assert change.startswith("Name each once, out of: /device:CPU:0, ")


def test_degrees_must_use_all_devices() -> None:
    with pytest.raises(PlanError) as caught:
        mw.Hybrid(data=3, tensor=2)
    received, rule, change = str(caught.value).split("\n")
    assert received.startswith(
        "Hybrid wants data=3 x tensor=2 = 6 devices and received 8: /device:CPU:0, "
    )
    assert rule == "data x fsdp x tensor x stages is the number of devices."
    assert change == "Change a degree, or pass the devices to use as devices=[...]."
    with pytest.raises(PlanError) as caught:
        mw.FSDP(3)
    assert str(caught.value).split("\n") == [
        "FSDP received degree=3 for 8 devices.",
        "Spare devices become the data axis, so the degree divides their number: "
        "8 = 3 x 2 + 2.",
        "Use a degree that divides 8, or pass devices=[...].",
    ]


def test_a_model_made_in_a_scope_is_split_at_once_and_trains_after_it() -> None:
    reference = make_model()
    reference.fit(X, Y, epochs=2, batch_size=8, verbose=0, shuffle=False)
    strategy = mw.FSDP(8)
    with strategy.scope() as entered:
        assert entered is strategy
        model = make_model()
    assert attached(model) is strategy
    assert shards(model) == [(8, 2), (2,), (2, 4), (4,)]
    model.fit(X, Y, epochs=2, batch_size=8, verbose=0, shuffle=False)
    assert shards(model) == [(8, 2), (2,), (2, 4), (4,)]
    slots = [v for v in model.optimizer.variables if tuple(v.shape) == (8, 16)]
    assert {v.value.sharding.shard_shape((8, 16)) for v in slots} == {(8, 2)}
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_scope_leaves_nothing_behind() -> None:
    with mw.FSDP(8).scope():
        pass
    model = make_model()
    assert attached(model) is None
    assert shards(model) == [(8, 16), (16,), (16, 4), (4,)]


def test_the_same_scope_nests_and_another_is_refused() -> None:
    strategy = mw.Mirrored()
    with strategy.scope(), strategy.scope():
        pass
    with pytest.raises(StrategyError) as caught, strategy.scope(), mw.FSDP(8).scope():
        pass
    assert str(caught.value).split("\n") == [
        "The scope of FSDP(fsdp=8) was entered inside the scope of another strategy.",
        "A model is trained by one strategy, so scopes do not mix.",
        "Leave the other scope first, or use mw.distribute(model, strategy).",
    ]
    with mw.FSDP(8).scope():
        pass


def test_a_model_that_fit_builds_is_split_too() -> None:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    model = mw.distribute(keras.Sequential(layers), mw.FSDP(8))
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert shards(model)[0] == (8, 2)


def test_weights_and_optimizer_state_come_along_and_training_goes_on() -> None:
    reference = make_model()
    reference.fit(X, Y, epochs=4, batch_size=8, verbose=0, shuffle=False)
    model = make_model()
    model.fit(X, Y, epochs=2, batch_size=8, verbose=0, shuffle=False)
    mw.distribute(model, mw.Hybrid(2, 2, 2))
    model.fit(X, Y, epochs=1, batch_size=8, verbose=0, shuffle=False)
    mw.distribute(model, mw.Mirrored(CPUS[:2]))
    model.fit(X, Y, epochs=1, batch_size=8, verbose=0, shuffle=False)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_distributed_model_is_saved_and_loaded_by_plain_keras(tmp_path: Path) -> None:
    model = mw.distribute(make_model(), mw.FSDP(8))
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(X), model.predict(X, verbose=0), atol=1e-6)
    model.load_weights(tmp_path / "model.keras")
    assert shards(model)[0] == (8, 2), "loading keeps the split"


def test_stock_callbacks_work_on_the_mesh() -> None:
    seen: list[float] = []
    batch_hook = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(logs["loss"]))
    )
    stop = keras.callbacks.EarlyStopping(
        monitor="loss", patience=0, min_delta=1e9, restore_best_weights=True
    )
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))
    model = mw.distribute(make_model(), mw.Mirrored())
    history = model.fit(
        X, Y, batch_size=8, epochs=9, verbose=0, callbacks=[batch_hook, stop, rate]
    )
    assert len(history.history["loss"]) == 2
    assert len(seen) == 4


def test_generators_and_several_steps_per_execution_work_on_the_mesh() -> None:
    reference = make_model()
    reference.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
    model = make_model(compiled=False)
    model.compile(optimizer="adam", loss="mse", steps_per_execution=2)
    mw.distribute(model, mw.Mirrored())
    batches = ((X[i : i + 8], Y[i : i + 8]) for i in (0, 8))
    model.fit(batches, steps_per_epoch=2, verbose=0, shuffle=False)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_layers_can_be_frozen_and_thawed_between_predictions() -> None:
    model = mw.distribute(make_model(), mw.FSDP(8))
    expected = model.predict(X, verbose=0)
    for frozen in (0, 1):
        model.layers[frozen].trainable = False
        np.testing.assert_allclose(model.predict(X, verbose=0), expected, atol=1e-6)
        model.evaluate(X, Y, verbose=0)
        model.layers[frozen].trainable = True


def test_parts_of_a_batch_without_samples_go_to_every_device() -> None:
    def batches() -> Any:
        yield X[:8], Y[:1], np.float32(0.5)

    reference, model = make_model(), mw.distribute(make_model(), mw.FSDP(8))
    for each in (reference, model):
        each.fit(batches(), steps_per_epoch=1, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_uncompiled_steps_are_refused() -> None:
    model = make_model(compiled=False)
    model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    mw.distribute(model, mw.Mirrored())
    with pytest.raises(StrategyError) as caught:
        model.fit(X, Y, verbose=0)
    assert str(caught.value).split("\n") == [
        "'net' was compiled with run_eagerly=True or jit_compile=False.",
        "A step over a mesh is one compiled program.",
        "Compile the model without these, or train it without a strategy.",
    ]


def test_a_batch_that_leaves_devices_idle_is_said_once() -> None:
    model = mw.distribute(make_model(), mw.Mirrored())
    with pytest.warns(BatchWarning) as caught:
        model.fit(X, Y, batch_size=12, epochs=2, verbose=0)
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "A global batch of 12 is split into 4 equal pieces, although the mesh could "
        "compute 8 at a time. The result is exact; a global batch of 8 or 16 would use "
        "every device."
    )
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("size", "words"),
    [(4, "is split into 4 equal pieces"), (3, "cannot be split into equal pieces")],
)
def test_a_batch_smaller_than_the_devices_are_many_is_said_too(
    size: int, words: str
) -> None:
    model = mw.distribute(make_model(), mw.Mirrored())
    with pytest.warns(BatchWarning) as caught:
        model.fit(X[:12], Y[:12], batch_size=size, verbose=0)
    assert [str(each.message) for each in caught] == [
        f"A global batch of {size} {words}, although the mesh could compute 8 at a "
        "time. The result is exact; a global batch of 8 or 16 would use every device."
    ]


def test_memory_limits_and_the_log_hold_on_the_mesh(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mw.distribute(make_model(), mw.FSDP(8))
    mw.set_placement_log(True)
    model.fit(X, Y, batch_size=8, verbose=0)
    (line,) = [m for m in caplog.messages if "kernel (8, 16) in shards (8, 2)" in m]
    assert "/device:CPU:0, /device:CPU:1" in line
    mw.set_placement_log(False)
    before = model.get_weights()
    mw.configure(memory_limit=500)
    with pytest.raises(MemoryLimitError, match=r"^train_step of 'net'"):
        model.fit(X, Y, batch_size=8, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_explain_lists_every_variable_and_counts_what_travels() -> None:
    model = make_model()
    whole = mw.Mirrored().explain(model, X[:8], Y[:8])
    assert whole.collectives.keys() == {"all-reduce"}
    assert len(whole.whole) == 4
    split = mw.FSDP(8).explain(model, X[:8], Y[:8])
    assert "all-gather" in split.collectives
    assert [v.shape for v in split.whole] == [(4,)]
    text = str(split)
    assert text.startswith("FSDP(fsdp=8)")
    assert "fsdp splits dim 1 of (8, 16) by 8" in text
    assert "1 of 4 variables are whole on every device" in text
    alone = mw.Single().explain(model, X[:8], Y[:8])
    assert alone.collectives == {}
    assert str(alone).endswith("a training step has no collectives")


def test_explain_needs_a_built_and_compiled_model() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.Mirrored().explain(make_model(compiled=False), X, Y)
    assert str(caught.value).split("\n") == [
        "explain received 'net', which is not built or not compiled.",
        "What travels is read from the compiled training step.",
        "Build the model (give it an Input) and call compile first.",
    ]


def test_distribute_takes_a_model_and_a_strategy() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.distribute(3, mw.Mirrored())
    assert str(caught.value).split("\n") == [
        "distribute received 3 (a int) as model.",
        "It takes a Keras model.",
        "Wrap layers in a model, for example keras.Sequential([...]).",
    ]
    with pytest.raises(StrategyError) as caught:
        mw.distribute(make_model(), "mirrored")
    assert str(caught.value).split("\n") == [
        "distribute received 'mirrored' (a str) as strategy.",
        "It takes a strategy, or 'auto'.",
        "Pass, for example, mw.Mirrored().",
    ]


def test_verify_agrees_prints_a_table_and_leaves_the_model_alone() -> None:
    model = make_model()
    model.fit(X, Y, batch_size=8, verbose=0)
    before = [np.asarray(v.value) for v in model.variables + model.optimizer.variables]
    found = mw.verify(model, X, Y, mw.Hybrid(2, 2, 2), batch_size=12, steps=4)
    assert found.ok
    assert len(found.differences) == 4
    text = str(found)
    assert "net/dense" in text
    assert text.endswith(
        "Hybrid(data=2 x fsdp=2 x tensor=2), 4 steps: equal to one device"
    )
    after = [np.asarray(v.value) for v in model.variables + model.optimizer.variables]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert {len(v.value.devices()) for v in model.variables} == {1}


def test_verify_names_the_variable_whose_gradient_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Doubling(mesh_step.MeshStep):
        """Computes one update twice as large, as a mean of sums would."""

        def __call__(self, state: Any, data: Any) -> Any:
            before = np.asarray(state[0][2])
            outputs, (first, *rest) = super().__call__(state, data)
            if self._mesh.size > 1:
                wrong = before + 2 * (np.asarray(first[2]) - before)
                first[2] = jax.device_put(wrong, first[2].sharding)
            return outputs, (first, *rest)

    from meshwright.strategies import attach

    monkeypatch.setattr(attach, "MeshStep", Doubling)
    keras.utils.set_random_seed(2)
    # The seed of the dropout is a huge number, beside which no error may look small.
    layers = [keras.layers.Dense(16), keras.layers.Dropout(0.1), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    found = mw.verify(model, X, Y, mw.Mirrored(), batch_size=8, steps=1)
    assert not found.ok
    (failure,) = found.failures
    assert failure.path == model.trainable_variables[2].path
    assert f"{failure.path}" in str(found)
    assert "<- differs" in str(found)
    assert "NOT equal to one device" in str(found)


def make_attention() -> Any:
    """The bias of its keys has a gradient of zero, of which Adam makes a step."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 8))
    x = inputs + keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    outputs = keras.layers.Dense(4)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    return model


def test_verify_knows_noise_that_an_optimizer_magnifies() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 4, 8)).astype("float32")
    y = random.normal(size=(32, 4)).astype("float32")
    found = mw.verify(make_attention(), x, y, mw.Mirrored(), batch_size=16, steps=5)
    assert found.ok
    allowed = {d.path: d.allowed for d in found.differences if d.allowed > 2e-5}
    assert [*allowed] == ["attention/key/bias"], "the others are held to rounding"
    assert str(found).endswith(
        "equal to one device; where it is more than 2e-05, allowed is 4 x what other "
        "roundings of the weights change on one device"
    )


def test_verify_that_fails_half_way_leaves_the_model_alone() -> None:
    model = make_model()
    before = model.get_weights()
    nonsense = mw.TensorParallel(2, rules=[("nope", (None, "tensor"))])
    with pytest.raises(mw.errors.RuleError):
        mw.verify(model, X, Y, nonsense, batch_size=8)
    assert model.weights[0]._layout is None
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_verify_needs_a_compiled_model() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.verify(make_model(compiled=False), X, Y, mw.Mirrored())
    _, rule, change = str(caught.value).split("\n")[-3:]
    assert rule == "It compares training steps, so it needs a loss and an optimizer."
    assert change == "Call model.compile first."


def test_devices_that_another_process_lacks_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    existing = {"/process:0/device:CPU:0": None, "/process:1/device:CPU:0": None}
    monkeypatch.setattr(strategy_module, "process_count", lambda: 2)
    monkeypatch.setattr(strategy_module, "jax_devices_of_all", lambda: existing)
    with pytest.raises(UnknownDeviceError) as caught:
        mw.Mirrored(["CPU:0", "CPU:1"])
    assert str(caught.value).split("\n") == [
        "/process:0/device:CPU:1, /process:1/device:CPU:1 unknown device.",
        "In a run of several processes a strategy uses devices of the same names in "
        "every process.",
        "Give every process as many devices, or name those that all have out of "
        "/process:0/device:CPU:0, /process:1/device:CPU:0.",
    ]
