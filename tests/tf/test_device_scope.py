"""`tf.device`, soft placement and the log."""

import os
import subprocess
import sys
import warnings

import meshwright as mw
from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics

HOME = "/job:localhost/replica:0/task:0"


@semantics("4.3.1", "same")
@pytest.mark.parametrize(
    ("spelling", "index"),
    [
        *(("/CPU:0", 0), ("CPU:1", 1), ("cpu:1", 1), ("/device:CPU:1", 1)),
        *((f"{HOME}/device:CPU:1", 1), ("cpu", 0), ("", 0), (None, 0)),
    ],
)
def test_all_spellings_of_a_device(spelling: str | None, index: int) -> None:
    with tf.device(spelling):
        assert tf.constant(1.0).device == f"{HOME}/device:CPU:{index}"


def test_a_logical_device_is_taken_as_it_is() -> None:
    device = tf.config.list_logical_devices()[3]
    with tf.device(device):
        assert tf.constant(1.0).device.endswith("CPU:3")


@semantics("4.3.2", "better", "A warning names both devices.")
@pytest.mark.parametrize(
    "missing", ["/CPU:9", "/GPU:0", "GPU:3", "/TPU:0", "/device:FOO:0"]
)
def test_an_existing_device_takes_the_place_of_a_missing_one(missing: str) -> None:
    tf.config.set_soft_device_placement(True)
    scope = tf.device(missing)
    with pytest.warns(mw.errors.PlacementWarning, match=r"CPU:0 takes its place"):
        scope.__enter__()
    v = tf.Variable(1.0)
    assert v.device == f"{HOME}/device:CPU:0"
    assert tf.function(lambda: tf.constant(1.0))().device == v.device
    scope.__exit__(None, None, None)


@semantics("4.3.3", "better", "The error is a RuntimeError too, as the guide says.")
@pytest.mark.parametrize("missing", ["/GPU:0", "/device:GPU:0", "gpu:0"])
def test_a_missing_device_is_an_error(missing: str) -> None:
    tf.config.set_soft_device_placement(False)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught, tf.device(missing):
        pass
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.message.startswith(f"{HOME}/device:GPU:0 unknown device. ")
    assert (
        f"Could not satisfy device specification '{HOME}/device:GPU:0'. "
        "enable_soft_placement=0. Supported device types [CPU]. "
        f"All available devices [{HOME}/device:CPU:0, {HOME}/device:CPU:1, "
    ) in error.message
    with pytest.raises(tf.errors.InvalidArgumentError, match="FOO:0 unknown device"):
        tf.device("/device:FOO:0").__enter__()


@semantics("4.3.4", "same")
@pytest.mark.parametrize("soft", [True, False])
def test_what_is_no_device(soft: bool) -> None:
    tf.config.set_soft_device_placement(soft)
    text = (
        "Unknown attribute 'foo' is encountered while parsing the device spec: 'foo'."
    )
    with pytest.raises(ValueError, match=text):
        tf.device("foo").__enter__()
    with pytest.raises(
        ValueError, match=r"Expecting a string device name. Got .*int.*3"
    ):
        tf.device(3)
    job = "/job:worker/replica:0/task:7/device:CPU:0"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{job} unknown device."):
        tf.device(job).__enter__()
    with pytest.raises(RuntimeError, match=r"tf.device does not support functions."):
        tf.device(lambda op: "CPU:0")


@semantics("4.3.5", "same")
def test_the_innermost_scope_counts_and_variables_stay() -> None:
    with tf.device("CPU:1"):
        v = tf.Variable([1.0, 2.0])
        with tf.device("CPU:2"):
            assert tf.constant(1.0).device.endswith("CPU:2")
            with tf.device(None):
                assert tf.constant(1.0).device.endswith("CPU:0")
    v.assign_add([1.0, 1.0])
    assert v.device.endswith("CPU:1")
    assert tf.multiply(v, 2.0).device.endswith("CPU:0")


@semantics(
    "4.3.6",
    "same",
)
def test_operations_are_logged_as_tensorflow_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> list[str]:
        tf.debugging.set_log_device_placement(True)
        with tf.device("CPU:1"):
            _ = tf.constant([1.0]) + tf.constant([2.0])
        tf.debugging.set_log_device_placement(False)
        return capsys.readouterr().err.splitlines()

    assert lines() == [
        f"Executing op {op} in device {HOME}/device:CPU:1"
        for op in ("_EagerConst", "_EagerConst", "AddV2")
    ]
    monkeypatch.setattr("meshwright.tf.debugging.LOG_LEVEL_ASKED_FOR", "1")
    assert lines() == []


@semantics("4.3.7", "better", "Layers compute where they were made.")
def test_layers_compute_where_they_were_made() -> None:
    with tf.device("CPU:3"):
        layer = keras.layers.Dense(2)
        layer.build((None, 4))
    assert layer(np.ones((1, 4), "float32")).device.endswith("CPU:3")


def test_existing_placement_is_left_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tf.device("CPU:7"):
            assert tf.zeros((2,)).device.endswith("CPU:7")


def test_what_jax_sets_is_not_inherited() -> None:
    # Else, launched workers would take it for a wish of the user's to log nothing.
    script = (
        "import os\n"
        "from meshwright.devices import LOG_LEVEL_ASKED_FOR, environment_to_inherit\n"
        "name = 'TF_CPP_MIN_LOG_LEVEL'\n"
        "kept = environment_to_inherit()\n"
        "print(os.environ[name], kept.get(name), LOG_LEVEL_ASKED_FOR)\n"
    )
    for given, said in ({}, "1 None 0\n"), ({"TF_CPP_MIN_LOG_LEVEL": "2"}, "2 2 2\n"):
        base = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**base, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == said
