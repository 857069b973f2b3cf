"""The scaling of losses, and loops of one's own."""

from collections.abc import Callable
from typing import Any

from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@semantics("4.8.1", "same")
def test_the_average_loss_is_of_the_global_batch(
    strategy: tf.distribute.Strategy,
) -> None:
    average = tf.nn.compute_average_loss
    losses = tf.constant([1.0, 3.0])
    run: Callable[[Callable[[], Any]], Any] = strategy.run
    assert [float(v) for v in run(lambda: average(losses)).values] == [1.0, 1.0]
    sized = run(lambda: average(losses, global_batch_size=8))
    assert float(sized.values[0]) == 0.5
    weighted = run(lambda: average(losses, sample_weight=[1.0, 0.0]))
    assert float(weighted.values[0]) == 0.25
    assert float(run(lambda: average(losses, global_batch_size=0)).values[0]) == 0.0
    with pytest.raises(ValueError, match="Invalid value passed for `per_example_loss`"):
        run(lambda: average(tf.constant(1.0)))
    with pytest.raises(TypeError, match="`global_batch_size` must be an integer"):
        run(lambda: average(losses, global_batch_size=2.0))  # type: ignore[arg-type]
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be non-negative"):
        run(lambda: average(losses, global_batch_size=-1))
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match=r"You are calling `compute_average_loss` in"),
    ):
        average(losses)


@semantics("4.8.2", "same")
def test_a_regularization_loss_is_shared(strategy: tf.distribute.Strategy) -> None:
    scaled = strategy.run(lambda: tf.nn.scale_regularization_loss(tf.constant(4.0)))
    assert [float(v) for v in scaled.values] == [2.0, 2.0]


def linear() -> Any:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.0]], "float32"), np.array([0.0], "float32")])
    return model


def batches(size: int, of: int) -> tf.data.Dataset:
    x = np.arange(1.0, of + 1, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(size)


def by_one_device(size: int, of: int) -> list[Any]:
    alone = linear()
    alone.compile(keras.optimizers.SGD(0.01), "mse")
    alone.fit(batches(size, of), verbose=0)
    return list(alone.get_weights())


@semantics("4.8.3", "same")
@pytest.mark.parametrize(("size", "of"), [(4, 8), (3, 5)])
def test_a_loop_of_ones_own_equals_one_device(
    strategy: tf.distribute.Strategy, size: int, of: int
) -> None:
    with strategy.scope():
        model, optimizer = linear(), keras.optimizers.SGD(0.01)
        each = keras.losses.MeanSquaredError(reduction="none")

    @tf.function
    def step(x: Any, y: Any, count: int) -> Any:
        with tf.GradientTape() as tape:
            losses = each(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=count)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    for x, y in strategy.experimental_distribute_dataset(batches(size, of)):
        count = sum(len(part) for part in x.values)
        losses = strategy.run(step, args=(x, y, count))
        assert strategy.reduce("SUM", losses, axis=None).numpy() > 0
    for one, other in zip(by_one_device(size, of), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@semantics(
    "4.8.4", "better", "Each replica counts by its samples, so uneven ones are exact."
)
def test_loss_objects_of_keras_give_a_share(strategy: tf.distribute.Strategy) -> None:
    mse, total = keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError("sum")
    two, zero = tf.constant([[2.0]]), tf.constant([[0.0]])
    shares, sums, plain = strategy.run(
        lambda: (
            mse(zero, two),
            total(zero, two),
            keras.losses.mean_squared_error(zero, two),
        )
    )
    assert [float(v) for v in shares.values] == [2.0, 2.0]
    assert [float(v) for v in sums.values] == [4.0, 4.0]
    assert float(np.asarray(plain.values[0])[0]) == 4.0
    assert mse(zero, two).numpy() == 4.0
    (parts,) = strategy.experimental_distribute_dataset(
        [np.array([[1.0], [2.0], [3.0]])]
    )
    uneven = strategy.run(lambda x: mse(tf.zeros_like(x), x), args=(parts,))
    mean = strategy.reduce("SUM", uneven, axis=None).numpy()
    assert mean == pytest.approx(14 / 3)


@semantics("4.8.5", "better", "It applies them.")
def test_gradients_are_applied_outside_of_a_run(
    strategy: tf.distribute.Strategy,
) -> None:
    with strategy.scope():
        v = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.apply_gradients([(tf.constant(1.0), v)])
        assert v.numpy() == 0.5


@semantics(
    "4.8.6", "better", "A model from outside trains; nothing fails without words."
)
def test_models_and_compile_in_and_out_of_the_scope(
    strategy: tf.distribute.Strategy,
) -> None:
    expected = by_one_device(4, 8)
    outside = linear()
    with strategy.scope():
        outside.compile(keras.optimizers.SGD(0.01), "mse")
        inside = linear()
    inside.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=False)
    for model in (outside, inside):
        model.fit(batches(4, 8), verbose=0)
        for one, other in zip(expected, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    alone = linear()
    alone.set_weights(inside.get_weights())
    np.testing.assert_allclose(alone.get_weights()[0], inside.get_weights()[0])
