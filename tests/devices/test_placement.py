"""`mw.device`: things live where they are put, compute there, and stay there."""

import threading
import warnings

import meshwright as mw
from meshwright.devices.runtime import name_of, names_of
from meshwright.errors import (
    DeviceNameError,
    PlacementWarning,
    UnknownDeviceError,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from conftest import Run

X = np.linspace(0, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.linspace(1, 0, 16, dtype=np.float32).reshape(8, 2)


def where(thing: jax.Array | keras.Variable) -> str:
    array = thing.value if isinstance(thing, keras.Variable) else thing
    (name,) = names_of(array.sharding)
    return name.removeprefix("/device:")


def test_eager_work_goes_to_the_device_of_the_scope() -> None:
    with mw.device("CPU:1") as name:
        assert name == "/device:CPU:1"
        made = jnp.ones(3)
        assert where(made) == where(made * 2) == "CPU:1"
        assert where(keras.ops.ones(3)) == "CPU:1"
    assert where(jnp.ones(3)) == "CPU:0"


def test_the_innermost_scope_counts_and_none_is_automatic() -> None:
    with mw.device("CPU:1"):
        with mw.device("CPU:2"):
            assert where(jnp.ones(1)) == "CPU:2"
            with mw.device(None):
                assert where(jnp.ones(1)) == "CPU:0"
            with mw.device(""):
                assert where(jnp.ones(1)) == "CPU:0"
        assert where(jnp.ones(1)) == "CPU:1"


def test_operations_take_their_inputs_along_as_in_tensorflow() -> None:
    with mw.device("CPU:1"):
        a = jnp.arange(3.0)
    with mw.device("CPU:2"):
        b = jnp.ones(3)
    assert where(a + b) == "CPU:0", "outside a scope, the default device"
    with mw.device("CPU:3"):
        both = a + b
    assert where(both) == "CPU:3"
    assert (where(a), where(b)) == ("CPU:1", "CPU:2"), "the inputs stay"
    np.testing.assert_array_equal(both, [1, 2, 3])


def test_a_scope_can_be_left_by_an_error_and_used_as_a_decorator() -> None:
    with pytest.raises(KeyError), mw.device("CPU:1"):
        raise KeyError

    @mw.device("CPU:2")
    def compute() -> jax.Array:
        return jnp.ones(2)

    assert where(jnp.ones(1)) == "CPU:0"
    assert where(compute()) == where(compute()) == "CPU:2"


def test_scopes_belong_to_their_thread() -> None:
    found: list[str] = []
    with mw.device("CPU:1"):
        thread = threading.Thread(target=lambda: found.append(where(jnp.ones(1))))
        thread.start()
        thread.join()
    assert found == ["CPU:0"]


@pytest.mark.parametrize(
    "name",
    ["cpu:3", "/CPU:3", "/device:CPU:3", "/job:localhost/replica:0/task:0/cpu:3"],
)
def test_every_spelling_enters(name: str) -> None:
    with mw.device(name):
        assert where(jnp.ones(1)) == "CPU:3"


def test_devices_can_be_passed_themselves() -> None:
    with mw.device(mw.devices()[2]):
        assert where(jnp.ones(1)) == "CPU:2"
    with mw.device(jax.devices()[3]):
        assert where(jnp.ones(1)) == "CPU:3"
    with mw.device("cpu"):
        assert where(jnp.ones(1)) == "CPU:0"


@pytest.mark.parametrize("name", ["foo", "/device:FOO:0", 3, print])
@pytest.mark.parametrize("soft", [True, False])
def test_what_spells_no_device_is_an_error_in_either_mode(
    name: str, soft: bool
) -> None:
    mw.set_soft_placement(soft)
    with pytest.raises(DeviceNameError, match="is not the name of a device") as caught:
        mw.device(name)
    assert "Use one of: /device:CPU:0, /device:CPU:1" in str(caught.value)


def test_a_missing_device_is_replaced_with_one_warning_that_names_both() -> None:
    def enter_three_times() -> None:
        for _ in range(3):
            with mw.device("GPU:1"):
                assert where(jnp.ones(1)) == "CPU:0"

    with pytest.warns(PlacementWarning) as caught:
        enter_three_times()
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "/device:GPU:1 is not there (there is no GPU here); /device:CPU:0 takes its "
        "place. meshwright.set_soft_placement(False) makes this an error."
    )
    assert caught[0].filename == __file__


def test_a_missing_index_is_replaced_by_a_device_of_its_kind(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "with mw.device('GPU:7') as name: print(name)\n"
        "with mw.device('TPU:0') as name: print(name)\n",
        MESHWRIGHT_VIRTUAL="GPU:2",
    )
    assert done.stdout == "/device:GPU:0\n/device:GPU:0\n"
    assert (
        "script.py:2: PlacementWarning: /device:GPU:7 is not there (there are only 2 "
        in (done.stderr)
    )


def test_without_soft_placement_a_missing_device_is_an_error() -> None:
    mw.set_soft_placement(False)
    with pytest.raises(UnknownDeviceError) as caught, mw.device("GPU:1"):
        pass
    assert isinstance(caught.value, RuntimeError)
    received, rule, change = str(caught.value).split("\n")
    assert received == "/device:GPU:1 unknown device."
    assert rule == (
        "Soft placement is off, so the device must exist: there is no GPU here."
    )
    assert change.startswith("Use one of /device:CPU:0, /device:CPU:1, ")
    assert change.endswith("or call meshwright.set_soft_placement(True).")


def test_hardware_that_jax_cannot_use_is_not_called_missing(run_script: Run) -> None:
    from pathlib import Path

    done = run_script(
        "import meshwright as mw\n"
        "mw.set_soft_placement(False)\n"
        "try:\n"
        "    with mw.device('GPU:0'): pass\n"
        "except RuntimeError as error: print(error)\n",
        PYTHONPATH=str(Path(__file__).parents[1] / "fakes"),
        CUDA_VISIBLE_DEVICES="0,1,2,3",
        JAX_PLATFORMS="cpu",
    )
    assert "the hardware is there but JAX does not use it" in done.stdout
    assert "JAX_PLATFORMS='cpu' excludes it; install meshwright[cuda13]" in done.stdout


def test_soft_placement_can_be_switched_at_any_time() -> None:
    mw.set_soft_placement(False)
    with pytest.raises(UnknownDeviceError), mw.device("GPU:0"):
        pass
    mw.set_soft_placement(True)
    with pytest.warns(PlacementWarning), mw.device("GPU:0"):
        pass


def test_variables_live_where_they_were_made_and_stay() -> None:
    with mw.device("CPU:1"):
        variable = keras.Variable(np.ones(3, np.float32))
    assert where(variable) == "CPU:1"
    variable.assign(np.zeros(3))
    assert where(variable) == "CPU:1"
    variable.assign(jax.device_put(np.ones(3, np.float32), jax.devices()[4]))
    assert where(variable) == "CPU:1", (
        "also when a committed array comes from elsewhere"
    )
    variable.assign_add([1.0, 2.0, 3.0])
    assert where(variable) == "CPU:1"
    np.testing.assert_array_equal(variable, [2, 3, 4])
    assert where(variable + 1) == "CPU:0", (
        "work on it outside runs on the default device"
    )


def test_variables_of_two_devices_can_be_added() -> None:
    with mw.device("CPU:1"):
        a = keras.Variable([1.0])
    with mw.device("CPU:2"):
        b = keras.Variable([2.0])
    assert where(a + b.value) == "CPU:0"


def split_model() -> keras.Model:
    inputs = keras.Input((3,))
    with mw.device("CPU:1"):
        hidden = keras.layers.Dense(4, activation="relu", name="first")(inputs)
    with mw.device("CPU:2"):
        outputs = keras.layers.Dense(2, name="second")(hidden)
    return keras.Model(inputs, outputs, name="split")


def test_two_layers_on_two_devices_compute_each_at_home() -> None:
    keras.utils.set_random_seed(0)
    model = split_model()
    seen: dict[str, jax.Array] = {}
    for layer in model.layers[1:]:
        original = layer.call
        layer.call = lambda x, _o=original, _n=layer.name: seen.setdefault(_n, _o(x))
    result = model(X)
    assert {name: where(value) for name, value in seen.items()} == {
        "first": "CPU:1",
        "second": "CPU:2",
    }
    assert where(result) == "CPU:2"
    first, second = model.layers[1:]
    expected = np.maximum(X @ first.kernel.numpy(), 0) @ second.kernel.numpy()
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_layer_that_is_built_later_still_lives_where_it_was_made() -> None:
    with mw.device("CPU:3"):
        layer = keras.layers.Dense(2)
        dropout = keras.layers.Dropout(0.5)
    result = layer(X)
    assert where(layer.kernel) == where(result) == "CPU:3"
    assert where(dropout(X, training=True)) == "CPU:3"


def test_a_layer_brings_committed_inputs_home() -> None:
    with mw.device("CPU:3"):
        layer = keras.layers.Dense(2)
    assert where(layer(jax.device_put(X, jax.devices()[5]))) == "CPU:3"


def test_operations_in_a_functional_model_run_where_they_were_written() -> None:
    a, b = keras.Input((3,)), keras.Input((3,))
    with mw.device("CPU:4"):
        added = keras.ops.add(a, b)
    model = keras.Model([a, b], added)
    result = model([X, X])
    assert where(result) == "CPU:4"
    np.testing.assert_array_equal(result, 2 * X)


def test_layers_write_their_configuration_as_before() -> None:
    class Scale(keras.layers.Layer):
        def __init__(self, factor: float, **kwargs: object) -> None:
            super().__init__(**kwargs)
            self.factor = factor

    with mw.device("CPU:1"):
        config = Scale(3.0, name="s").get_config()
    assert (config["factor"], config["name"]) == (3.0, "s")


def test_layers_made_inside_another_layer_follow_it() -> None:
    class Block(keras.layers.Layer):
        def build(self, shape: tuple[int, ...]) -> None:
            self.inner = keras.layers.Dense(2)
            self.inner.build(shape)

        def call(self, x: jax.Array) -> jax.Array:
            return self.inner(x)

    with mw.device("CPU:5"):
        block = Block()
    assert where(block(X)) == "CPU:5"
    assert where(block.inner.kernel) == "CPU:5"


def test_fit_trains_a_model_on_two_devices_and_moves_nothing() -> None:
    """More of it in `test_placed_equivalence.py`."""
    keras.utils.set_random_seed(0)
    model = split_model()
    model.compile(optimizer="sgd", loss="mse")
    before = model.get_weights()
    losses = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    assert not np.array_equal(before[0], model.get_weights()[0])
    assert [where(v) for v in model.weights] == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


def test_predict_and_evaluate_work_on_two_devices_without_moving_weights() -> None:
    model = split_model()
    model.compile(optimizer="sgd", loss="mse")
    predicted = model.predict(X, batch_size=3, verbose=0)
    np.testing.assert_allclose(predicted, model(X), atol=1e-6)
    loss = model.evaluate(X, Y, batch_size=3, verbose=0)
    assert loss == pytest.approx(np.mean((predicted - Y) ** 2), rel=1e-5)
    assert [where(v) for v in model.weights] == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


def test_predict_on_two_devices_computes_each_layer_at_home() -> None:
    model = split_model()
    asked: list[jax.sharding.Sharding] = []
    for layer in model.layers[1:]:

        def watched(
            x: jax.Array, training: object = None, _call: object = layer.call
        ) -> jax.Array:
            result = _call(x)  # type: ignore[operator]
            jax.debug.inspect_array_sharding(result, callback=asked.append)
            return result

        layer.call = watched
    model.predict(X, batch_size=8, verbose=0)
    (first,), (second,) = (sharding.device_set for sharding in asked)
    assert (first.id, second.id) == (1, 2)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )


@pytest.mark.parametrize("compile_inside", [True, False])
def test_a_whole_model_trains_where_it_was_made_and_stays(compile_inside: bool) -> None:
    reference = make_model()
    reference.compile(optimizer="adam", loss="mse", metrics=["mae"])
    expected = reference.fit(
        X, Y, epochs=2, batch_size=3, verbose=0, validation_split=0.25
    )

    with mw.device("CPU:6"):
        model = make_model()
        if compile_inside:
            model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    if not compile_inside:
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    history = model.fit(X, Y, epochs=2, batch_size=3, verbose=0, validation_split=0.25)

    assert {where(v) for v in model.variables} == {"CPU:6"}
    assert {where(v) for v in model.optimizer.variables[2:]} == {"CPU:6"}
    assert history.history == expected.history, (
        "to the last bit, as on any other device"
    )
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_step_of_a_placed_model_runs_on_its_device() -> None:
    with mw.device("CPU:6"):
        model = make_model()
    model.compile(optimizer="sgd", loss="mse")
    outputs: list[str] = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, jax.Array]) -> None:
            state = self.model._jax_state["trainable_variables"]
            outputs.extend(name_of(d) for v in state for d in v.devices())

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Spy()])
    assert set(outputs) == {"/device:CPU:6"}


def test_models_that_were_never_placed_are_untouched() -> None:
    with mw.device("CPU:1"):
        pass  # the hooks are in place now
    model = make_model()
    model.compile(optimizer="sgd", loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, batch_size=4, verbose=0)
    assert {where(v) for v in model.variables} == {"CPU:0"}


def test_placed_models_can_be_saved_and_loaded(tmp_path: object) -> None:
    with mw.device("CPU:2"):
        model = make_model()
    model.save(f"{tmp_path}/model.keras")
    loaded = keras.saving.load_model(f"{tmp_path}/model.keras")
    np.testing.assert_array_equal(loaded(X), model(X))
    with mw.device("CPU:3"):
        there = keras.saving.load_model(f"{tmp_path}/model.keras")
    assert {where(v) for v in there.variables} == {"CPU:3"}
    model.load_weights(f"{tmp_path}/model.keras")
    assert {where(v) for v in model.variables} == {"CPU:2"}
