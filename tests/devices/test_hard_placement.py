"""Placement where it is easily lost: odd models, odd moments, odd values."""

import meshwright as mw
from meshwright.devices.runtime import names_of
from meshwright.errors import ConfigurationError, MemoryLimitError

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from conftest import Run

X = np.ones((8, 3), np.float32)
Y = np.ones((8, 2), np.float32)


def where(thing: jax.Array | keras.Variable) -> str:
    array = thing.value if isinstance(thing, keras.Variable) else thing
    (name,) = names_of(array.sharding)
    return name.removeprefix("/device:")


def trained(model: keras.Model) -> keras.Model:
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, Y, verbose=0)
    return model


def test_models_that_ran_before_a_limit_or_log_was_set_are_held_to_it(
    run_script: Run,
) -> None:
    done = run_script(
        "import meshwright as mw, keras, numpy as np\n"
        "m = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])\n"
        "m.compile('sgd', 'mse')\n"
        "m.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)\n"
        "mw.configure(memory_limit=100)\n"
        "try:\n"
        "    m.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)\n"
        "except mw.errors.MemoryLimitError: print('refused')\n"
        "try:\n"
        "    m.predict(np.ones((8, 3)), verbose=0)\n"
        "except mw.errors.MemoryLimitError: print('refused')\n"
    )
    assert done.stdout == "refused\nrefused\n"


def test_a_model_without_an_optimizer_keeps_the_limit_and_the_log() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    mw.set_placement_log(True)
    mw.configure(memory_limit="1MiB")
    assert model.predict(X, verbose=0).shape == (8, 2)
    mw.configure(memory_limit=64)
    with pytest.raises(MemoryLimitError):
        model.predict(X, verbose=0)


def test_layers_of_the_same_path_on_two_devices_are_told_apart() -> None:
    def tower(device: str, name: str) -> keras.Model:
        inputs = keras.Input((3,))
        with mw.device(device):
            return keras.Model(
                inputs, keras.layers.Dense(3, name="d")(inputs), name=name
            )

    inputs = keras.Input((3,))
    first, second = tower("CPU:1", "a"), tower("CPU:2", "b")
    model = keras.Model(inputs, second(first(inputs)))
    assert len(mw.placement(model)) == len(model.weights) == 4
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, X, verbose=0)
    assert [where(v) for v in model.weights] == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


def test_the_rest_of_a_model_that_is_placed_in_part_is_on_the_default_device() -> None:
    with mw.device("CPU:1"):
        first = keras.layers.Dense(4, name="first")
    model = keras.Sequential(
        [keras.Input((3,)), first, keras.layers.Dense(2, name="b")]
    )
    trained(model)
    assert [where(v) for v in model.weights] == ["CPU:1", "CPU:1", "CPU:0", "CPU:0"]


def test_layers_without_weights_that_nobody_placed_follow() -> None:
    with mw.device("CPU:1"):
        dense = keras.layers.Dense(2)
    model = trained(keras.Sequential([keras.Input((3,)), keras.layers.ReLU(), dense]))
    assert {where(v) for v in model.weights} == {"CPU:1"}


def test_a_holder_with_weights_and_operations_count_as_layers_do() -> None:
    class Holder(keras.layers.Layer):
        def __init__(self, inner: keras.layers.Layer) -> None:
            super().__init__()
            self.inner = inner

        def build(self, shape: tuple[int, ...]) -> None:
            self.scale = self.add_weight(shape=(3,), initializer="ones")

        def call(self, x: jax.Array) -> jax.Array:
            return self.inner(x * self.scale)

    with mw.device("CPU:2"):
        inner = keras.layers.Dense(2)
    with mw.device("CPU:1"):
        holder = Holder(inner)
    model = trained(keras.Sequential([keras.Input((3,)), holder]))
    assert [where(v) for v in model.weights] == ["CPU:1", "CPU:2", "CPU:2"]

    inputs = keras.Input((3,))
    with mw.device("CPU:1"):
        hidden = keras.layers.Dense(2)(inputs)
    with mw.device("CPU:2"):
        outputs = keras.ops.tanh(hidden)
    model = trained(keras.Model(inputs, outputs))
    assert {where(v) for v in model.weights} == {"CPU:1"}
    first, second = model.train_function.guarded._cut.layers
    assert second == ["compile_loss"], "after the operation"
    assert "compile_loss" not in first


def test_a_subclassed_model_of_a_scope_takes_in_layers_from_outside() -> None:
    first, second = keras.layers.Dense(4), keras.layers.Dense(2)

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def call(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    with mw.device("CPU:2"):
        model = Net()
    assert where(model(X)) == "CPU:2"
    assert {where(v) for v in trained(model).weights} == {"CPU:2"}


def test_where_an_input_was_made_does_not_matter() -> None:
    with mw.device("CPU:3"):
        inputs = keras.Input((3,))
    with mw.device("CPU:1"):
        outputs = keras.layers.Dense(2)(inputs)
    assert where(trained(keras.Model(inputs, outputs)).weights[0]) == "CPU:1"


def test_building_and_adding_weights_outside_stays_at_home() -> None:
    with mw.device("CPU:3"):
        layer = keras.layers.Dense(2)
    layer.build((None, 3))
    assert where(layer.kernel) == "CPU:3"
    layer.enable_lora(2)
    assert {where(v) for v in layer.variables} == {"CPU:3"}


def test_containers_of_inputs_keep_their_order_and_kind() -> None:
    class Join(keras.layers.Layer):
        def call(self, parts: dict[object, jax.Array]) -> jax.Array:
            return keras.ops.concatenate(list(parts.values()), -1)

    parts = {"b": np.ones((1, 1), "f"), "a": np.zeros((1, 1), "f")}
    with mw.device("CPU:1"):
        join = Join()
    np.testing.assert_array_equal(join(parts), [[1, 0]])
    there = {k: jax.device_put(v, jax.devices()[2]) for k, v in parts.items()}
    np.testing.assert_array_equal(join(there), [[1, 0]])


def test_masks_and_keyword_arguments_come_along() -> None:
    class Weighted(keras.layers.Layer):
        def call(self, x: jax.Array, weight: jax.Array) -> jax.Array:
            return x * weight

    keras.utils.set_random_seed(0)
    embedding = keras.layers.Embedding(5, 3, mask_zero=True)
    with mw.device("CPU:1"):
        recurrent = keras.layers.LSTM(2)
        weighted = Weighted()
    ids = jnp.array([[1, 2, 0, 0]])
    there = jax.device_put(ids, jax.devices()[2])
    np.testing.assert_array_equal(
        recurrent(embedding(ids)), recurrent(embedding(there))
    )
    weight = jax.device_put(X, jax.devices()[4])
    assert where(weighted(X, weight=weight)) == "CPU:1"


def test_a_variable_that_nobody_placed_stays_where_it_is() -> None:
    variable = keras.Variable([1.0])
    with mw.device("CPU:3"):
        variable.assign_add([1.0])
    assert where(variable) == "CPU:0"


def test_optimizer_slots_live_with_their_weights_from_the_start() -> None:
    with mw.device("CPU:4"):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    slots = [v for v in optimizer.variables if "momentum" in v.path]
    assert [where(slot) for slot in slots] == ["CPU:4", "CPU:4"]


def test_a_custom_train_step_names_its_arguments_as_it_likes() -> None:
    class Net(keras.Sequential):
        def train_step(self, mine: object, batch: object) -> object:
            return super().train_step(mine, batch)

    mw.configure(memory_limit=64)
    with pytest.raises(MemoryLimitError) as caught:
        trained(Net([keras.Input((3,)), keras.layers.Dense(2)]))
    assert caught.value.by_kind["parameters"] == 4 * (3 * 2 + 2)


def test_a_scope_can_be_entered_again_and_nested_in_itself() -> None:
    scope = mw.device("CPU:1")
    with scope, scope:
        assert where(jnp.ones(1)) == "CPU:1"
    with scope:
        assert where(jnp.ones(1)) == "CPU:1"
    assert where(jnp.ones(1)) == "CPU:0"


def test_configuring_inside_of_a_scope_is_refused(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "mw.configure(virtual=4)\n"
        "with mw.device('CPU:3'):\n"
        "    try: mw.configure(virtual=2)\n"
        "    except mw.errors.LateConfigurationError as error: print(error)\n"
    )
    assert done.stdout.splitlines() == [
        "configure(virtual=2) was called inside of meshwright.device('/device:CPU:3').",
        "The devices cannot change while a scope holds on to one of them.",
        "Move configure(virtual=2) out of the scope.",
    ]


def test_a_layer_whose_device_is_gone_says_so(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw, keras, numpy as np\n"
        "mw.configure(virtual=4)\n"
        "with mw.device('CPU:3'): layer = keras.layers.Dense(2)\n"
        "mw.configure(virtual=2)\n"
        "try: layer(np.ones((1, 3)))\n"
        "except mw.errors.UnknownDeviceError as error: print(error)\n"
    )
    assert done.stdout.splitlines() == [
        "/device:CPU:3 unknown device: something was made for it, and it is gone.",
        "What was made in a scope lives on that device for good.",
        "Configure the devices first; now there are /device:CPU:0, /device:CPU:1.",
    ]


@pytest.mark.parametrize("switch", [mw.set_placement_log, mw.set_soft_placement])
def test_switches_take_true_or_false(switch: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        switch("off")  # type: ignore[operator]
    name = switch.__name__  # type: ignore[attr-defined]
    assert str(caught.value).split("\n") == [
        f"{name} received 'off' (a str).",
        "It takes True or False.",
        f"Write {name}(True).",
    ]


def test_counts_of_numpy_are_counts() -> None:
    mw.configure(virtual=np.int64(8), memory_limit=np.int64(2**30))  # type: ignore[arg-type]
    assert mw.devices()[0].memory_limit == 2**30


def test_the_table_knows_jax_s_own_default_device() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.ReLU()])
    with jax.default_device("cpu"):
        assert mw.placement(model)[0].devices == ("/device:CPU:0",)


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"jit_compile": False}, {"steps_per_execution": 3}],
)
def test_every_way_to_compile_trains_at_home(options: dict[str, object]) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        model.compile(optimizer="adam", loss="mse", **options)
        return model

    reference = build()
    reference.fit(X, Y, batch_size=3, verbose=0)
    with mw.device("CPU:5"):
        model = build()
    model.fit(X, Y, batch_size=3, verbose=0)
    assert {where(v) for v in model.weights} == {"CPU:5"}
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
