"""Data of strategies."""

from collections.abc import Callable
from typing import Any

import meshwright as mw
from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics

Dataset = tf.data.Dataset


def mirrored(replicas: int) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def parts(dataset: tf.data.Dataset, replicas: int) -> list[list[list[int]]]:
    batches = mirrored(replicas).experimental_distribute_dataset(dataset)
    return [[v.numpy().tolist() for v in batch.values] for batch in batches]


@semantics("4.6.1", "same")
@semantics("4.6.2", "same")
@semantics("4.6.3", "same")
@semantics("4.6.4", "same")
@semantics("4.6.5", "same")
@semantics("4.6.6", "same")
@semantics("4.6.7", "same")
@semantics("4.6.8", "same")
def test_batches_are_split_in_order() -> None:
    assert parts(Dataset.range(10).batch(4), 2)[-1] == [[8], [9]]
    assert parts(Dataset.range(11).batch(4), 2)[-1] == [[8, 9], [10]]
    assert parts(Dataset.range(9).batch(4), 2)[-1] == [[8], []]
    assert parts(Dataset.range(5).batch(5), 2) == [[[0, 1, 2], [3, 4]]]
    assert parts(Dataset.range(2).batch(1), 2) == [[[0], []], [[1], []]]
    assert parts(Dataset.range(8).batch(4), 3) == [
        [[0, 1], [2, 3], []],
        [[4, 5], [6, 7], []],
    ]
    assert parts(Dataset.range(10).batch(6), 3)[-1] == [[6, 7], [8, 9], []]


@semantics("4.6.9", "same")
def test_shapes_are_known_if_the_tail_is_dropped() -> None:
    distribute = mirrored(2).experimental_distribute_dataset
    whole = distribute(Dataset.range(9).batch(4, drop_remainder=True))
    assert len(list(whole)) == 2
    assert [s.shape for s in whole.element_spec.specs] == [(2,), (2,)]
    with_tail = distribute(Dataset.range(9).batch(4)).element_spec
    assert [s.shape for s in with_tail.specs] == [(None,), (None,)]
    assert repr(with_tail).startswith("PerReplicaSpec(TensorSpec(shape=(None,), dtype=")


@semantics("4.6.10", "better", "What is no dataset of batches is refused in words.")
def test_what_is_no_dataset_of_batches() -> None:
    distribute = mirrored(2).experimental_distribute_dataset
    with pytest.raises(mw.errors.PerReplicaError, match="samples in the first dim"):
        list(distribute(Dataset.range(4)))
    batches = distribute([np.arange(4), np.arange(2)])
    assert [b.values[1].numpy().tolist() for b in batches] == [[2, 3], [1]]
    again = distribute(distribute(Dataset.range(4).batch(2)))
    assert [b.values[0].numpy().tolist() for b in again] == [[0], [2]]
    with pytest.raises(TypeError):
        len(batches)


@semantics("4.6.11", "same")
def test_the_end_of_the_data() -> None:
    distributed = mirrored(2).experimental_distribute_dataset(Dataset.range(2).batch(2))
    for_next, for_get, for_optional = (iter(distributed) for _ in range(3))
    next(for_next)
    with pytest.raises(StopIteration):
        next(for_next)
    for_get.get_next()
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        for_get.get_next()
    first = for_optional.get_next_as_optional()
    assert first.has_value()
    assert first.get_value().values[1].numpy().tolist() == [1]
    last = for_optional.get_next_as_optional()
    assert not last.has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        last.get_value()
    assert repr(for_get.element_spec) == repr(distributed.element_spec)


@semantics("4.6.12", "same")
def test_a_function_makes_the_batches_of_each_replica() -> None:
    seen: list[tf.distribute.InputContext] = []

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        seen.append(context)
        return Dataset.range(6).batch(context.get_per_replica_batch_size(4))

    batches = mirrored(2).distribute_datasets_from_function(make)
    values = [[v.numpy().tolist() for v in batch.values] for batch in batches]
    assert values == [[[0, 1], [2, 3]], [[4, 5], []]]
    (context,) = seen
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.num_replicas_in_sync == 2
    text = "The `global_batch_size` 5 is not divisible by `num_replicas_in_sync` 2 $"
    with pytest.raises(ValueError, match=text):
        context.get_per_replica_batch_size(5)
    alone = mirrored(1).distribute_datasets_from_function(make)
    assert [b.numpy().tolist() for b in alone] == [[0, 1, 2, 3], [4, 5]]


@semantics("4.6.13", "same")
def test_options_of_input() -> None:
    options = tf.distribute.InputOptions()
    assert options.experimental_fetch_to_device
    assert options.experimental_per_replica_buffer_size == 1
    per_replica = tf.distribute.InputOptions(
        experimental_replication_mode="PER_REPLICA"
    )
    with pytest.raises(NotImplementedError, match=r"PER_REPLICA is only supported in"):
        mirrored(2).experimental_distribute_dataset(Dataset.range(2), per_replica)


def model() -> Any:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(1e-3), "mse")
    made.set_weights([np.array([[2.0]], "float32"), np.array([0.0], "float32")])
    return made


def data(batch: int) -> tf.data.Dataset:
    x = np.arange(1.0, 10.0, dtype="float32")[:, None]
    return Dataset.from_tensor_slices((x, 0 * x)).batch(batch)


@semantics("4.6.17", "better", "It trains, with the weights of one device.")
@semantics("4.6.18", "better", "`fit` is exact too.")
@semantics("4.10.1", "better", "It trains, with the weights of one device.")
@semantics("4.10.2", "better", "It trains, with the weights of one device.")
@pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")
@pytest.mark.parametrize(("batch", "replicas"), [(3, 2), (4, 2), (4, 4), (6, 4)])
def test_training_on_uneven_batches_is_that_of_one_device(
    batch: int, replicas: int
) -> None:
    alone = model()
    alone.fit(data(batch), verbose=0)
    with mirrored(replicas).scope():
        together = model()
    together.fit(data(batch), verbose=0)
    for one, other in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    loss = alone.evaluate(data(batch), verbose=0)
    assert together.evaluate(data(batch), verbose=0) == pytest.approx(loss, rel=1e-5)
    assert together.predict(data(batch), verbose=0).shape == (9, 1)


@semantics("4.10.12", "better", "A thread puts batches onto the devices ahead of use.")
def test_batches_are_prepared_ahead_of_their_use() -> None:
    import threading

    read: list[str] = []

    def batches() -> Any:
        for _ in range(4):
            read.append(threading.current_thread().name)
            yield np.zeros(2)

    class Source:
        def __iter__(self) -> Any:
            return batches()

    make: Callable[[Any], Any] = mirrored(2).experimental_distribute_dataset
    list(make(Source()))
    assert len(read) == 4
    assert "MainThread" not in read
