"""What reading and assigning a variable means, on two replicas that give 1 and 2."""

from collections.abc import Iterator
from typing import Any

from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics

Aggregation = tf.VariableAggregation
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def scope(strategy: tf.distribute.Strategy) -> Iterator[tf.distribute.Strategy]:
    with strategy.scope():
        yield strategy


def number() -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    assert context is not None
    return tf.cast(context.replica_id_in_sync_group + 1, tf.float32)


def copies(variable: Any) -> list[float]:
    return [float(copy.numpy()) for copy in variable.values]


@semantics("4.5.1", "same")
def test_a_mirrored_variable_without_aggregation(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(0.0)
    scope.run(lambda: v.assign(number()))
    assert copies(v) == [1.0, 2.0]
    assert v.numpy() == 1.0
    v.assign(5.0)
    assert copies(v) == [5.0, 5.0]


@semantics("4.5.2", "same")
@pytest.mark.parametrize(
    ("aggregation", "result"),
    [
        (Aggregation.SUM, 3.0),
        (Aggregation.MEAN, 1.5),
        (Aggregation.ONLY_FIRST_REPLICA, 1.0),
    ],
)
def test_a_mirrored_variable_with_aggregation(
    scope: tf.distribute.Strategy, aggregation: Aggregation, result: float
) -> None:
    v = tf.Variable(0.0, aggregation=aggregation)
    seen = scope.run(lambda: v.assign(number()).read_value())
    assert copies(v) == [result] * 2
    assert [float(s) for s in seen.values] == [result] * 2
    assert v.numpy() == result
    scope.run(lambda: v.assign_add(number()))
    assert copies(v) == [2 * result] * 2
    v.assign_sub(1.0)
    assert copies(v) == [2 * result - 1.0] * 2


@semantics("4.5.3", "same")
def test_a_plain_number_has_no_sum(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(0.0, aggregation=Aggregation.SUM)
    text = (
        "A non-DistributedValues value 1.0 cannot be reduced with the given reduce op "
    )
    with pytest.raises(ValueError, match=text + r"ReduceOp.SUM\."):
        scope.run(lambda: v.assign(1.0))


@semantics("4.5.4", "same")
def test_a_sum_on_read(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(0.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    assert type(v).__name__ == "SyncOnReadVariable"
    local = scope.run(lambda: v.assign(number()).read_value())
    assert [float(x) for x in local.values] == [1.0, 2.0]
    assert v.numpy() == 3.0
    v.assign(10.0)
    assert copies(v) == [5.0, 5.0]
    text = "SyncOnReadVariable does not support `assign_add` in cross-replica context "
    with pytest.raises(ValueError, match=text + "when aggregation is set to"):
        v.assign_add(1.0)


@semantics("4.5.5", "same")
def test_a_mean_on_read(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(0.0, synchronization=ON_READ, aggregation=Aggregation.MEAN)
    scope.run(lambda: v.assign(number()))
    assert copies(v) == [1.0, 2.0]
    assert v.numpy() == 1.5
    v.assign_add(1.0)
    assert copies(v) == [2.5, 2.5]
    v.assign(7.0)
    assert copies(v) == [7.0, 7.0]


@semantics("4.5.6", "better", "After `assign_add` all copies are equal.")
def test_the_first_replica_on_read(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(
        0.0, synchronization=ON_READ, aggregation=Aggregation.ONLY_FIRST_REPLICA
    )
    scope.run(lambda: v.assign(number()))
    assert v.numpy() == 1.0
    v.assign_add(1.0)
    assert copies(v) == [2.0, 2.0]


@semantics("4.5.7", "same")
def test_nothing_on_read(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable(0.0, synchronization=ON_READ)
    scope.run(lambda: v.assign(number()))
    assert copies(v) == [1.0, 2.0]
    with pytest.raises(
        ValueError, match=r"Could not convert from `tf.VariableAggregation`"
    ):
        v.numpy()


@semantics("4.5.8", "same")
def test_variables_on_read_are_not_scattered(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable([0.0], synchronization=ON_READ, aggregation=Aggregation.SUM)
    text = "Variables with synchronization=ON_READ doesn't support scatter_sub"
    with pytest.raises(NotImplementedError, match=text):
        v.scatter_sub(None)
    with pytest.raises(AttributeError, match="assign the whole value"):
        tf.Variable([0.0]).scatter_sub(None)


@semantics(
    "4.5.10",
    "better",
    "Moving statistics are the mean over replicas, not the first one's.",
)
def test_what_keras_keeps_is_one_value_after_a_run(
    scope: tf.distribute.Strategy,
) -> None:
    metric = keras.metrics.Sum()
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, 1))

    def step() -> None:
        own = number()
        metric.update_state(own)
        norm(tf.reshape(tf.stack([own, own]), (2, 1)), training=True)

    scope.run(step)
    assert float(metric.result()) == 3.0
    # The means of the parts are 1 and 2; half of the old mean, 0, is kept.
    np.testing.assert_allclose(norm.moving_mean.numpy(), [0.75])


def test_shapes_of_values_are_checked(scope: tf.distribute.Strategy) -> None:
    v = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError, match="Cannot assign value to variable"):
        v.assign([1.0])
    values = scope.run(number)
    with pytest.raises(TypeError, match="A value per replica cannot be"):
        v.assign(values)
    with pytest.raises(ValueError, match="`initial_value` must be a Tensor"):
        tf.Variable()


def test_weights_that_are_variables_train_in_loops_and_in_fit(
    scope: tf.distribute.Strategy,
) -> None:
    class Scale(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.w = tf.Variable(tf.ones((shape[-1], 2)))
            self.b = self.add_weight(shape=(2,), initializer="zeros")

        def call(self, x: Any) -> Any:
            return tf.nn.relu(tf.matmul(x, self.w) + self.b)

    x = np.ones((4, 3), "float32")
    model = keras.Sequential([Scale(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.1)
    loss_of = keras.losses.MeanSquaredError()

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(tf.zeros((4, 1)), model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    losses = [scope.reduce("SUM", scope.run(step), axis=None).numpy() for _ in range(3)]
    assert losses[2] < losses[0]
    assert len(model.trainable_variables) == 4
    trained = model.layers[0].w.numpy()
    assert not np.array_equal(trained, np.ones((3, 2)))
    outputs = model(tf.constant(x))
    assert outputs.shape == (4, 1)
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), rtol=1e-5)
    model.compile("sgd", "mse")
    model.fit(x, np.zeros((4, 1)), batch_size=4, verbose=0)
    assert not np.array_equal(trained, model.layers[0].w.numpy())


@semantics("4.5.9", "same")
def test_central_variables_need_an_aggregation() -> None:
    import meshwright as mw

    if not hasattr(mw, "CentralStorage"):
        pytest.skip("meshwright.CentralStorage does not exist yet")
    central = tf.distribute.experimental.CentralStorageStrategy
    strategy = central(["CPU:0", "CPU:1"], "CPU:2")
    with strategy.scope():
        v = tf.Variable(1.0)
        total = tf.Variable(1.0, aggregation=Aggregation.SUM)
    assert type(v).__name__ == "AggregatingVariable"
    text = "You must specify an aggregation method to update a AggregatingVariable in"
    with pytest.raises(ValueError, match=text):
        strategy.run(lambda: v.assign(number()))
    v.assign(4.0)
    assert v.numpy() == 4.0
    strategy.run(lambda: total.assign_add(number()))
    assert total.numpy() == 4.0
