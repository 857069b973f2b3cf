"""Gradients on a tape."""

from typing import Any

from meshwright import tf

import jax
import keras
import numpy as np
import pytest


def test_a_tape_differentiates_layers_and_losses_as_jax_does() -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy()
    x = np.random.default_rng(0).random((5, 4), "float32")
    y = np.arange(5) % 3
    trainable = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def by_jax(weights: Any) -> Any:
        outputs, _ = model.stateless_call(weights, others, x, training=True)
        return loss(y, outputs)

    expected = jax.grad(by_jax)(trainable)
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_tape_is_used_once_unless_it_is_persistent() -> None:
    x = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        y = x * x
    assert tape.gradient(y, x).numpy() == 6.0
    with pytest.raises(RuntimeError, match="A non-persistent GradientTape can only"):
        tape.gradient(y, x)
    with tf.GradientTape(persistent=True) as kept:
        y, z = x * x, x + 1.0
    assert kept.gradient(y, x).numpy() == 6.0
    assert kept.gradient([y, z], {"x": x})["x"].numpy() == 7.0


def test_gradients_of_what_is_not_connected() -> None:
    x, other = tf.Variable(3.0), tf.constant([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(other)
        y = x * x
        with tape.stop_recording():
            hidden = x * 5.0
    assert tape.gradient(y, other) is None
    assert tape.gradient(hidden, x) is None
    zeros = tape.gradient(y, other, unconnected_gradients="zero")
    assert zeros.numpy().tolist() == [0.0, 0.0]


def test_gradients_of_gradients_and_from_behind() -> None:
    x = tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = x**3
        first = inner.gradient(y, x)
    assert first.numpy() == pytest.approx(12.0)
    assert outer.gradient(first, x).numpy() == pytest.approx(12.0)
    with tf.GradientTape() as tape:
        z = tf.stack([x, x]) * tf.constant([1.0, 10.0])
    behind = tape.gradient(z, x, output_gradients=tf.constant([1.0, 2.0]))
    assert behind.numpy() == 21.0


def test_a_tape_sees_functions_with_a_derivative_of_their_own() -> None:
    x = tf.constant([-1.0, 0.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.nn.relu(x) * 3.0)
    assert tape.gradient(y, x).numpy().tolist() == [0.0, 0.0, 3.0]


def test_a_tape_works_inside_of_compiled_functions() -> None:
    @jax.jit  # type: ignore[untyped-decorator]
    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.square(x)
        return tape.gradient(y, x)

    assert float(slope(4.0)) == 8.0


def test_a_tape_that_records_is_not_opened_again() -> None:
    tape = tf.GradientTape()
    with tape, pytest.raises(ValueError, match="Tape is already recording"):
        tape.__enter__()
    tape.reset()
