"""Edges at which Keras on JAX alone fails."""

from typing import Any

import meshwright as mw
from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics


def mirrored(replicas: int = 2) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def model() -> Any:
    keras.utils.set_random_seed(0)
    made = keras.Sequential(
        [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


X = np.random.default_rng(0).random((8, 4), "float32")


@semantics("4.10.3", "same")
@semantics("4.10.5", "better", "The model moves, with its weights.")
def test_batch_normalization_sees_all_samples() -> None:
    alone, together = model(), model()
    mw.distribute(together, mirrored(4).meshwright)
    for each in (alone, together):
        each.fit(X, X[:, :2], batch_size=8, epochs=2, verbose=0)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@semantics("4.10.4", "better", "It is an error that names the rule.")
def test_a_rule_that_matches_nothing_is_an_error() -> None:
    rules = [("no_such_layer", (None, "tensor"))]
    strategy = mw.TensorParallel(2, rules=rules, devices=["CPU:0", "CPU:1"])
    with pytest.raises(mw.errors.RuleError, match="no_such_layer"):
        mw.distribute(model(), strategy)


@semantics("4.10.6", "better", "Layers train where they were put.")
def test_layers_train_on_their_devices() -> None:
    inputs = keras.Input((4,))
    with tf.device("CPU:1"):
        x = keras.layers.Dense(4)(inputs)
    with tf.device("CPU:2"):
        outputs = keras.layers.Dense(2)(x)
    split = keras.Model(inputs, outputs)
    split.compile("sgd", "mse")
    split.fit(X, X[:, :2], verbose=0)
    homes = [row.devices for row in mw.placement(split) if row.variable == "kernel"]
    assert homes == [("/device:CPU:1",), ("/device:CPU:2",)]


@semantics("4.10.7", "better", "Tensors are copied to the device of the operation.")
def test_tensors_of_several_devices_are_added() -> None:
    values = mirrored().run(lambda: tf.constant(2.0)).values
    with tf.device("CPU:3"):
        far = tf.constant(3.0)
    assert [v.device[-5:] for v in values] == ["CPU:0", "CPU:1"]
    total = values[0] + values[1] * far
    assert (total.numpy(), total.device[-5:]) == (8.0, "CPU:0")
    with tf.device("CPU:5"):
        assert tf.add_n([*values, far]).device.endswith("CPU:5")


@semantics("4.10.8", "better", "A device takes its place, with a warning.")
@semantics("4.10.9", "better", "A device takes its place, with a warning.")
@pytest.mark.parametrize("missing", ["gpu:0", "cpu:77"])
def test_missing_devices_are_replaced(missing: str) -> None:
    tf.config.set_soft_device_placement(True)
    with pytest.warns(mw.errors.PlacementWarning), tf.device(missing):
        assert tf.constant(1.0).device.endswith("CPU:0")


@semantics("4.10.10", "better", "The error names the line that started the runtime.")
def test_a_late_number_of_devices_is_explained() -> None:
    kept = tf.constant(1.0)
    with pytest.raises(mw.errors.LateConfigurationError, match="started the runtime"):
        mw.configure(virtual=3)
    assert kept.numpy() == 1.0


@semantics("4.10.11", "better", "It is an error in words, as TensorFlow's.")
def test_memory_of_cpus_is_not_counted() -> None:
    with pytest.raises(ValueError, match="Allocator stats not available"):
        tf.config.experimental.get_memory_info("CPU:0")
