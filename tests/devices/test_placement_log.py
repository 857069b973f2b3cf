"""The placement log and the placement table."""

import logging
import threading

import meshwright as mw
from meshwright.errors import PlacementError, UnsupportedVersionError

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax._src import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conftest import Run

X = np.ones((4, 3), np.float32)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "meshwright.placement")
    return caplog


def test_every_eager_operation_gives_a_line_with_tensorflow_s_name(
    log: pytest.LogCaptureFixture,
) -> None:
    a = jnp.ones((2, 2))
    image, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((2, 2, 1, 1))
    mw.set_placement_log(True)
    with mw.device("CPU:1"):
        a @ a
        a + a
        a + a
        keras.ops.conv(image, kernel)
    jnp.sinc(a)
    mw.set_placement_log(False)
    a + a
    assert [r.getMessage() for r in log.records] == [
        "Executing op MatMul in device /device:CPU:1",
        "Executing op AddV2 in device /device:CPU:1",
        "Executing op AddV2 in device /device:CPU:1",
        "Executing op Conv2D in device /device:CPU:1",
        "Executing op sinc in device /device:CPU:0",
    ]
    assert {r.name for r in log.records} == {"meshwright.placement"}


def test_operations_inside_functions_with_their_own_derivative_are_seen(
    log: pytest.LogCaptureFixture,
) -> None:
    a = jnp.ones(3)
    mw.set_placement_log(True)
    jax.nn.relu(a)
    jax.grad(lambda x: jax.nn.silu(x).sum())(a)
    assert "Executing op Relu in device /device:CPU:0" in log.messages


def test_a_compiled_function_is_one_operation(log: pytest.LogCaptureFixture) -> None:
    def twice(x: jax.Array) -> jax.Array:
        return x * 2

    compiled = jax.jit(twice)
    compiled(jnp.ones(2))
    mw.set_placement_log(True)
    compiled(jnp.ones(2))
    assert log.messages[-1] == "Executing op twice in device /device:CPU:0"


def test_threads_that_start_later_are_seen_and_stop_with_the_log(
    log: pytest.LogCaptureFixture,
) -> None:
    a = jnp.ones(2)
    go_on, switched_off = threading.Event(), threading.Event()

    def work() -> None:
        a + a
        go_on.set()
        switched_off.wait(10)
        a * a

    mw.set_placement_log(True)
    thread = threading.Thread(target=work)
    thread.start()
    go_on.wait(10)
    mw.set_placement_log(False)
    switched_off.set()
    thread.join()
    assert log.messages == ["Executing op AddV2 in device /device:CPU:0"]


def test_the_log_leaves_jax_as_it_was() -> None:
    mw.set_placement_log(True)
    jnp.ones(3) + 1
    mw.set_placement_log(False)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    with jax.set_mesh(mesh):  # refuses inside of transformations
        pass


def test_a_jax_without_the_needed_parts_is_refused_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(core, "eval_context")
    with pytest.raises(UnsupportedVersionError) as caught:
        mw.set_placement_log(True)
    assert str(caught.value).split("\n") == [
        f"JAX {jax.__version__} has no eval_context in jax._src.core.",
        "The log and the tape of eager operations stand on JAX's own interpreter.",
        "Use a JAX from 0.10 to 0.12, or leave the log and tf.GradientTape off.",
    ]


def test_a_compiled_step_gives_a_line_per_layer(log: pytest.LogCaptureFixture) -> None:
    with mw.device("CPU:3"):
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(2, name="d"),
                keras.layers.ReLU(name="re_lu"),
            ],
            name="m",
        )
    model.compile(optimizer="sgd", loss="mse")
    mw.set_placement_log(True)
    model.fit(X, np.zeros((4, 2)), batch_size=2, epochs=2, verbose=0)
    lines = [m for m in log.messages if m.startswith("Running")]
    assert lines == [
        "Running train_step: layer m/d (Dense) in device /device:CPU:3: "
        "kernel (3, 2) in shards (3, 2), bias (2,) in shards (2,)",
        "Running train_step: layer re_lu (ReLU) in device /device:CPU:3",
    ]
    model.evaluate(X, np.zeros((4, 2)), verbose=0)
    model.predict(X, verbose=0)
    steps = [m.split()[1] for m in log.messages if m.startswith("Running")]
    assert steps[2:] == ["test_step:"] * 2 + ["predict_step:"] * 2


def test_switching_it_on_between_two_fits_logs_the_second(
    log: pytest.LogCaptureFixture,
) -> None:
    mw.set_placement_log(True)
    mw.set_placement_log(False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    model.fit(X, np.zeros((4, 2)), verbose=0)
    assert not log.messages
    mw.set_placement_log(True)
    model.fit(X, np.zeros((4, 2)), verbose=0)
    assert sum(m.startswith("Running") for m in log.messages) == 1


def test_it_can_be_switched_on_again_for_the_same_step(
    log: pytest.LogCaptureFixture,
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    for _ in range(2):
        mw.set_placement_log(True)
        model.fit(X, np.zeros((4, 2)), verbose=0)
        mw.set_placement_log(False)
    assert sum(m.startswith("Running") for m in log.messages) == 2
    assert {r.levelname for r in log.records} == {"INFO"}


def test_a_step_inside_of_a_scope_is_logged_where_it_runs(
    log: pytest.LogCaptureFixture,
) -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(optimizer="sgd", loss="mse")
    mw.set_placement_log(True)
    with mw.device("CPU:3"):
        model.fit(X, np.zeros((4, 2)), verbose=0)
    (line,) = [m for m in log.messages if m.startswith("Running")]
    assert "in device /device:CPU:3" in line
    assert "Executing op train_step in device /device:CPU:3" in log.messages


@pytest.mark.parametrize("how", ["by hand", "pipeline", "mirrored"])
def test_the_programs_of_a_split_step_are_not_told_one_by_one(
    log: pytest.LogCaptureFixture, how: str
) -> None:
    inputs = keras.Input((3,))
    with mw.device("CPU:0"):
        one = keras.layers.Dense(2, name="one")(inputs)
    with mw.device("CPU:1" if how == "by hand" else "CPU:0"):
        model = keras.Model(inputs, keras.layers.Dense(2, name="two")(one))
    model.compile("sgd", "mse")
    strategies = {"pipeline": mw.Pipeline(2, 2), "mirrored": mw.Mirrored(["CPU:0"])}
    if how in strategies:
        mw.distribute(model, strategies[how])
    mw.set_placement_log(True)
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=2, verbose=0)
    lines = [record.getMessage() for record in log.records]
    assert sum(line.startswith("Running train_step: layer one ") for line in lines) == 1
    operations = {line.split()[2] for line in lines if line.startswith("Executing")}
    assert not {each for each in operations if each[0].islower() or each[0] == "_"}


def test_without_logging_set_up_the_lines_go_to_standard_error(run_script: Run) -> None:
    script = (
        "import meshwright as mw\n"
        "import jax.numpy as jnp\n"
        "a = jnp.ones((2, 2))\n"
        "mw.set_placement_log(True)\n"
        "a @ a\n"
    )
    done = run_script(script, JAX_PLATFORMS="cpu")
    assert done.stderr == "Executing op MatMul in device /device:CPU:0\n"
    set_up = "import logging; logging.basicConfig(format='mine: %(message)s')\n"
    done = run_script(set_up + script, JAX_PLATFORMS="cpu")
    assert done.stderr == "mine: Executing op MatMul in device /device:CPU:0\n"


def test_stand_in_gpus_are_gpus_in_the_log_and_in_the_table(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw, keras\n"
        "with mw.device('GPU:1'):\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "print(mw.placement(model))\n"
        "mw.set_placement_log(True)\n"
        "with mw.device('GPU:1'): keras.ops.add(model.weights[0], 1)\n",
        MESHWRIGHT_VIRTUAL="GPU:2",
    )
    assert done.stderr.splitlines()[-1] == "Executing op AddV2 in device /device:GPU:1"
    assert "per device: /device:GPU:1 40 B" in done.stdout


def test_the_table_lists_layers_and_variables_with_devices_shards_and_bytes() -> None:
    with mw.device("CPU:1"):
        first = keras.layers.Dense(4, name="first")
    with mw.device("CPU:2"):
        last = keras.layers.Activation("relu", name="last")
    model = keras.Sequential([keras.Input((3,)), first, last], name="net")
    rows = {(row.layer, row.variable): row for row in mw.placement(model)}
    kernel = rows["net/first", "kernel"]
    assert (kernel.shape, kernel.shard_shape, kernel.dtype) == (
        (3, 4),
        (3, 4),
        "float32",
    )
    assert (kernel.devices, kernel.bytes) == (("/device:CPU:1",), 48)
    assert rows["last", None].devices == ("/device:CPU:2",)
    assert len(rows) == 3


def test_the_table_shows_shards_of_arrays_that_are_split() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False)])
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    kernel = model.weights[0]
    kernel._value = jax.device_put(kernel.value, split)
    (row,) = mw.placement(model)
    assert (row.shape, row.shard_shape, row.bytes) == ((4, 2), (1, 2), 8)
    assert row.devices == tuple(f"/device:CPU:{i}" for i in range(4))
    assert "per device: /device:CPU:0 8 B, /device:CPU:1 8 B" in str(
        mw.placement(model)
    )


def test_the_table_of_a_model_that_is_not_built_says_nothing_untrue() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    assert [row.variable for row in mw.placement(model)] == [None]


def test_the_table_of_something_else_is_an_error() -> None:
    with pytest.raises(PlacementError) as caught:
        mw.placement(3)
    assert str(caught.value).split("\n") == [
        "placement received 3 (a int).",
        "It lists the layers of a Keras model or layer.",
        "Pass the model itself.",
    ]
