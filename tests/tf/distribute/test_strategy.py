"""Strategies, their scope, and functions on every replica."""

from collections.abc import Iterator

import meshwright as mw
from meshwright import tf

import numpy as np
import pytest

from conformance import semantics

Strategy = tf.distribute.Strategy
replica_context = tf.distribute.get_replica_context


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def scope(strategy: Strategy) -> Iterator[Strategy]:
    with strategy.scope():
        yield strategy


def number() -> tf.Tensor:
    """1.0 in the first replica, 2.0 in the second."""
    context = replica_context()
    assert context is not None
    return tf.cast(context.replica_id_in_sync_group + 1, tf.float32)


def uneven(strategy: Strategy) -> tf.distribute.DistributedValues:
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 30.0]).batch(3)
    (values,) = strategy.experimental_distribute_dataset(dataset)
    return values


@semantics("4.4.1", "better", "An empty list, a text, and a missing device are errors.")
def test_the_devices_of_a_mirrored_strategy() -> None:
    assert tf.distribute.MirroredStrategy().num_replicas_in_sync == 8
    ops = tf.distribute.HierarchicalCopyAllReduce()
    named = tf.distribute.MirroredStrategy(["/CPU:1"], cross_device_ops=ops)
    assert named.extended.worker_devices == (
        "/job:localhost/replica:0/task:0/device:CPU:1",
    )
    with pytest.raises(AssertionError, match=r"No duplicates allowed in `devices`"):
        tf.distribute.MirroredStrategy(["CPU:0", "CPU:0"])
    with pytest.raises(ValueError, match="at least one device"):
        tf.distribute.MirroredStrategy([])
    with pytest.raises(ValueError, match=r"Write devices=\['CPU:0'\]"):
        tf.distribute.MirroredStrategy("CPU:0")
    with pytest.raises(RuntimeError, match="CPU:99 unknown device"):
        tf.distribute.MirroredStrategy(["CPU:99"])


@semantics("4.4.2", "same")
def test_strategies_do_not_mix(strategy: Strategy) -> None:
    other = tf.distribute.MirroredStrategy(["CPU:2", "CPU:3"])
    with other.scope():
        theirs = tf.Variable(1.0)
    mixing = "^Mixing different tf.distribute.Strategy objects: <.*> is not <.*>$"
    with strategy.scope(), strategy.scope():
        with pytest.raises(RuntimeError, match=mixing), other.scope():
            pass
        with pytest.raises(RuntimeError, match=mixing):
            other.run(lambda: None)
        with pytest.raises(RuntimeError, match=mixing):
            theirs.assign(2.0)
    with pytest.raises(RuntimeError, match=mixing):
        strategy.run(lambda: theirs.assign(2.0))


@semantics("4.4.3", "same")
def test_the_context_says_where_code_runs(strategy: Strategy) -> None:
    assert not tf.distribute.has_strategy()
    assert not tf.distribute.in_cross_replica_context()
    default = replica_context()
    assert default is not None
    assert default.num_replicas_in_sync == 1
    assert tf.distribute.get_strategy().num_replicas_in_sync == 1
    with strategy.scope():
        assert replica_context() is None
        assert tf.distribute.in_cross_replica_context()
        assert tf.distribute.get_strategy() is strategy

    def inside() -> bool:
        assert tf.distribute.get_strategy() is strategy
        return tf.distribute.in_cross_replica_context()

    assert strategy.run(inside) is False


@semantics("4.4.4", "same")
def test_variables_of_a_scope_have_a_copy_on_each_device(scope: Strategy) -> None:
    v = tf.Variable(1.0, name="v")
    assert type(v).__name__ == "MirroredVariable"
    assert [copy.name for copy in v.values] == ["v:0", "v/replica_1:0"]
    assert [copy.device[-5:] for copy in v.values] == ["CPU:0", "CPU:1"]
    assert repr(v).startswith("MirroredVariable:{\n  0: <tf.Variable 'v:0' shape=() ")
    made = []
    scope.run(lambda: made.append(tf.Variable(2.0)))
    assert made[0] is made[1]
    assert type(made[0]).__name__ == "MirroredVariable"

    @tf.function
    def make() -> tf.Variable:
        return tf.Variable(1.0)

    make()
    with pytest.raises(ValueError, match=r"tf.function only supports singleton tf.Var"):
        make()


@semantics("4.4.5", "same")
def test_a_variable_from_outside_takes_every_replica_in_turn(
    strategy: Strategy,
) -> None:
    outside = tf.Variable(0.0)
    with strategy.scope():
        inside = tf.Variable(0.0)
    assert not strategy.extended.variable_created_in_scope(outside)
    assert strategy.extended.variable_created_in_scope(inside)
    strategy.run(lambda: outside.assign_add(1.0))
    assert outside.numpy() == 2.0


@semantics("4.4.6", "same")
def test_synchronization_of_variables(scope: Strategy) -> None:
    with pytest.raises(ValueError, match="`NONE` variable synchronization mode is not"):
        tf.Variable(1.0, synchronization=tf.VariableSynchronization.NONE)
    v = tf.Variable(
        1.0, trainable=True, synchronization=tf.VariableSynchronization.ON_READ
    )
    assert v.trainable


@semantics("4.7.1", "same")
def test_a_function_runs_on_every_replica(
    strategy: Strategy,
) -> None:
    with pytest.raises(
        ValueError, match="positional args must be a list or tuple, got"
    ):
        strategy.run(lambda x: x, args=tf.constant(1.0))  # type: ignore[arg-type]
    same, both = strategy.run(lambda x, y: ({"a": "text"}, x + y), (1.0,), {"y": 2})
    assert same == {"a": "text"}
    assert both == 3.0
    values = strategy.run(number)
    assert str(values) == (
        "PerReplica:{\n  0: tf.Tensor(1.0, shape=(), dtype=float32),\n"
        "  1: tf.Tensor(2.0, shape=(), dtype=float32)\n}"
    )
    assert [v.device[-5:] for v in values.values] == ["CPU:0", "CPU:1"]
    assert "0: <tf.Tensor: shape=(), dtype=float32, numpy=1.0>" in repr(values)

    def fail() -> None:
        if number() > 1:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fail)
    with pytest.raises(RuntimeError, match=r"strategy.run was called inside"):
        strategy.run(lambda: strategy.run(number))


@semantics("4.7.2", "same")
def test_local_results_are_a_tuple(strategy: Strategy) -> None:
    values = strategy.run(number)
    assert [float(v) for v in strategy.experimental_local_results(values)] == [1.0, 2.0]
    assert strategy.experimental_local_results(5) == (5,)
    with pytest.raises(TypeError):
        float(values)


@semantics("4.7.3", "same")
def test_values_are_reduced(strategy: Strategy) -> None:
    values = strategy.run(number)
    for op in ("SUM", "sum", tf.distribute.ReduceOp.SUM):
        assert strategy.reduce(op, values, axis=None).numpy() == 3.0
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        strategy.reduce("MAX", values, axis=None)
    with pytest.raises(TypeError):
        strategy.reduce("SUM", values)  # type: ignore[call-arg]
    parts = uneven(strategy)
    assert strategy.reduce("MEAN", parts, axis=0).numpy() == 11.0
    assert strategy.reduce("SUM", parts, axis=0).numpy() == 33.0
    with pytest.raises(tf.errors.InvalidArgumentError, match="unequal shapes"):
        strategy.reduce("SUM", parts, axis=None)
    assert strategy.reduce("MEAN", tf.constant(4.0), axis=None).numpy() == 4.0
    text = (
        r"A non-DistributedValues value .* cannot be reduced with the given reduce op"
    )
    with pytest.raises(ValueError, match=text):
        strategy.reduce("SUM", tf.constant(4.0), axis=None)
    text = "Method requires being in cross-replica context, use get_replica_context"
    with pytest.raises(RuntimeError, match=text):
        strategy.run(lambda: strategy.reduce("SUM", number(), axis=None))


@semantics(
    "4.7.4", "better", "Scalars are refused in words; no error outlives its call."
)
def test_values_are_gathered(strategy: Strategy) -> None:
    parts = uneven(strategy)
    assert strategy.gather(parts, axis=0).numpy().tolist() == [1.0, 2.0, 30.0]

    def wide() -> tf.Tensor:
        return tf.ones((2, 3 + int(number() > 1)))

    assert strategy.gather(strategy.run(wide), axis=1).shape == (2, 7)
    with pytest.raises(tf.errors.InvalidArgumentError, match="gather received scalars"):
        strategy.gather(strategy.run(number), axis=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="do not fit along axis=0"):
        strategy.gather(strategy.run(wide), axis=0)
    assert strategy.gather(parts, axis=0).shape == (3,)
    text = "tf.distribute.Strategy.gather method requires cross-replica context, use"
    with pytest.raises(RuntimeError, match=text):
        strategy.run(lambda: strategy.gather(number(), axis=0))


@semantics("4.7.5", "same")
def test_replicas_talk_to_each_other(strategy: Strategy) -> None:
    def talk() -> tuple[tf.Tensor, ...]:
        context = replica_context()
        assert context is not None
        own = number()
        merged = context.merge_call(
            lambda strategy, x, factor: strategy.reduce("SUM", x, axis=None) * factor,
            args=(own,),
            kwargs={"factor": 10},
        )
        return (
            context.all_reduce("SUM", own),
            context.all_reduce(tf.distribute.ReduceOp.MEAN, own),
            context.all_gather(tf.reshape(own, (1,)), axis=0),
            merged,
        )

    total, mean, both, merged = strategy.run(talk)
    assert [float(v) for v in total.values] == [3.0, 3.0]
    assert [float(v) for v in mean.values] == [1.5, 1.5]
    assert [v.numpy().tolist() for v in both.values] == [[1.0, 2.0]] * 2
    assert [float(v) for v in merged.values] == [30.0, 30.0]
    assert [v.device[-5:] for v in merged.values] == ["CPU:0", "CPU:1"]


def test_replicas_that_do_not_meet_are_an_error(strategy: Strategy) -> None:
    def talk_alone() -> None:
        context = replica_context()
        assert context is not None
        if number() > 1:
            context.all_reduce("SUM", number())

    with pytest.raises(RuntimeError, match="Replica 1 waits for the others"):
        strategy.run(talk_alone)


def test_one_replica_computes_alone() -> None:
    alone = tf.distribute.OneDeviceStrategy("CPU:3")
    with alone.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    result = alone.run(lambda: v.assign_add(number()).read_value() * 2)
    assert (result.numpy(), v.numpy()) == (4.0, 2.0)
    assert result.device.endswith("CPU:3")
    assert alone.reduce("SUM", result, axis=None).numpy() == 4.0
    default = tf.distribute.get_strategy()
    assert default.run(lambda x: x + 1, args=(1,)) == 2


def test_what_is_not_there_names_the_way_of_meshwright(strategy: Strategy) -> None:
    for owner, name, way in [
        (tf, "Session", "call functions directly"),
        (tf.distribute, "TPUStrategy", "mw.Mirrored"),
        (strategy, "cluster_resolver", "meshwright train"),
        (strategy.extended, "nothing_like_it", "docs/tf.md"),
        (tf.data.Dataset.range(1), "interleave", "PyDataset"),
        (tf.config, "optimizer", "XLA"),
        (tf.config.experimental, "whatever", "docs/tf.md"),
        (tf.random, "Generator", "SeedGenerator"),
        (tf.nn, "conv2d", "keras.ops.conv"),
    ]:
        with pytest.raises(AttributeError, match=r"is not covered") as caught:
            getattr(owner, name)
        assert way in str(caught.value)
    pipeline = tf.distribute.PipelineStrategy(2, devices=["CPU:0", "CPU:1"])
    with pytest.raises(AttributeError, match="cannot be cut into stages"):
        pipeline.run(number)


def test_values_from_a_function(strategy: Strategy) -> None:
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )
    assert [v.numpy() for v in values.values] == [0.0, 1.0]
    assert strategy.reduce("SUM", values, axis=None).numpy() == 1.0
    assert isinstance(strategy.meshwright, mw.Mirrored)
    assert isinstance(values.values[0].numpy(), np.float32)
