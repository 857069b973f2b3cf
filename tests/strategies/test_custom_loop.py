"""Custom loops: values per replica, and what runs on, reduces and gathers them."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import meshwright as mw
from meshwright.errors import PerReplicaError, StrategyError
from meshwright.parallel.per_replica import PerReplica, split_batch
from meshwright.strategies.strategy import Strategy

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from conftest import Run

CPUS = [f"CPU:{i}" for i in range(8)]
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one device": lambda: mw.Single(),
    "two": lambda: mw.Mirrored(CPUS[:2]),
    "three": lambda: mw.Mirrored(CPUS[:3]),
    "eight": lambda: mw.Mirrored(),
    "fsdp": lambda: mw.FSDP(8),
    "data x fsdp": lambda: mw.FSDP(4),
    "all axes": lambda: mw.Hybrid(data=2, fsdp=2, tensor=2),
    "tensor": lambda: mw.TensorParallel(8),
}
on_every_mesh = pytest.mark.parametrize("name", STRATEGIES)


def split(strategy: Strategy, batch: Any) -> Any:
    (found,) = strategy.distribute_dataset([batch])
    return found


def lists(value: PerReplica) -> list[Any]:
    return [np.asarray(one).tolist() for one in value.values]


def three_beats(caught: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return str(caught.value).split("\n")


def uneven_pair() -> tuple[Strategy, PerReplica]:
    """TensorFlow's example: [1, 2] on one replica and [30] on the other."""
    strategy = mw.Mirrored(CPUS[:2])
    return strategy, split(strategy, np.array([1.0, 2.0, 30.0], np.float32))


# Splitting.


@pytest.mark.parametrize(
    ("size", "batch", "replicas", "step", "expected"),
    [
        (10, 4, 2, -1, [[8], [9]]),
        (11, 4, 2, -1, [[8, 9], [10]]),
        (9, 4, 2, -1, [[8], []]),
        (5, 5, 2, 0, [[0, 1, 2], [3, 4]]),
        (3, 1, 2, 0, [[0], []]),
        (3, 1, 2, 2, [[2], []]),
        (8, 4, 3, 0, [[0, 1], [2, 3], []]),
        (8, 4, 3, 1, [[4, 5], [6, 7], []]),
        (10, 6, 3, -1, [[6, 7], [8, 9], []]),
    ],
)
def test_batches_are_split_as_tensorflow_splits_them(
    size: int, batch: int, replicas: int, step: int, expected: list[list[int]]
) -> None:
    numbers = np.arange(size)
    batches = [numbers[i : i + batch] for i in range(0, size, batch)]
    distributed = mw.Mirrored(CPUS[:replicas]).distribute_dataset(batches)
    assert lists(list(distributed)[step]) == expected


@on_every_mesh
def test_a_split_batch_is_the_batch_in_order_and_every_value_is_at_home(
    name: str,
) -> None:
    strategy = STRATEGIES[name]()
    homes = strategy.mesh.devices.reshape(strategy.num_replicas, -1)
    for size in (0, 1, 7, 8, 9, 24):
        x = np.arange(size * 3, dtype=np.float32).reshape(size, 3)
        values = split(strategy, {"x": x, "none": None})["x"].values
        assert len(values) == strategy.num_replicas
        np.testing.assert_array_equal(np.concatenate(values), x)
        most = -(-size // strategy.num_replicas)
        assert all(len(v) == most for v in values[: size // max(most, 1)])
        assert [v.devices() for v in values] == [{row[0]} for row in homes]


def test_a_split_batch_keeps_its_structure_and_dtypes() -> None:
    strategy = mw.Mirrored(CPUS[:2])
    batch = {"a": np.arange(4, dtype=np.uint8), "b": (np.ones((4, 2), np.float16),)}
    found = split(strategy, batch)
    assert found["a"].stacks[0].dtype == np.uint8
    assert found["b"][0].shapes == ((2, 2), (2, 2))
    assert found["b"][0].stacks[0].dtype == np.float16


@pytest.mark.parametrize(
    ("batch", "received"),
    [
        (np.float32(3), "batch has dtype float32 and shape ()."),
        ({"x": [1, 2]}, "batch['x'][0] has dtype int64 and shape ()."),
        ((np.ones(2), np.array(["a", "b"])), "batch[1] has dtype <U1 and shape (2,)."),
    ],
)
def test_a_batch_without_samples_or_numbers_is_refused(
    batch: Any, received: str
) -> None:
    with pytest.raises(PerReplicaError) as caught:
        split_batch(batch, mw.Mirrored().mesh)
    assert three_beats(caught) == [
        received,
        "A batch is a tree of arrays of numbers with samples in the first dim.",
        "Batch the data first, and pass what has no samples to run by itself.",
    ]


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ((np.ones(4), np.ones(3)), "batch[0] has 4, batch[1] has 3"),
        ((), "it has no arrays"),
    ],
)
def test_arrays_of_a_batch_have_one_number_of_samples(batch: Any, found: str) -> None:
    with pytest.raises(PerReplicaError) as caught:
        split_batch(batch, mw.Mirrored().mesh)
    assert three_beats(caught) == [
        f"A batch has no one number of samples: {found}.",
        "All arrays of a batch have the same number of samples.",
        "Pass arrays whose first dims are equal.",
    ]


def test_a_batch_is_split_once() -> None:
    strategy, values = uneven_pair()
    with pytest.raises(PerReplicaError, match="2 replicas were used as one array"):
        split(strategy, values)


# The values.


def test_values_per_replica_print_as_such() -> None:
    _, values = uneven_pair()
    assert repr(values) == (
        "PerReplica:{0: Array([1., 2.], dtype=float32), 1: Array([30.], dtype=float32)}"
    )
    seen = []
    jax.jit(lambda v: seen.append(repr(v)))(values)
    assert seen == ["PerReplica:{0: float32[2], 1: float32[1]}"]


def test_values_per_replica_are_no_array_and_no_number() -> None:
    _, values = uneven_pair()
    with pytest.raises(TypeError):
        float(values)  # type: ignore[arg-type]
    with pytest.raises(PerReplicaError) as caught:
        np.asarray(values)
    assert three_beats(caught) == [
        "The values of 2 replicas were used as one array.",
        "A PerReplica is one value per replica.",
        "Use strategy.reduce, strategy.gather or strategy.local_results first.",
    ]


def test_values_of_any_split_go_through_jit() -> None:
    for size in (1, 8, 9, 15):
        values = split(mw.Mirrored(), np.arange(size))
        assert lists(jax.jit(lambda v: v)(values)) == lists(values)


# run.


@on_every_mesh
@pytest.mark.parametrize("size", [1, 8, 9, 13, 16])
def test_every_replica_computes_its_part_of_the_gradient(name: str, size: int) -> None:
    strategy = STRATEGIES[name]()
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 4)).astype(np.float32)
    w = rng.normal(size=(4, 8)).astype(np.float32)

    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    parts = split(strategy, x)
    found = strategy.run(gradient, args=(w, parts))
    assert len(found.values) == strategy.num_replicas
    for own, part in zip(found.values, parts.values, strict=True):
        part = np.asarray(part)
        np.testing.assert_allclose(own, 2 * part.T @ part @ w, rtol=1e-4, atol=1e-5)
    total = strategy.reduce("SUM", found)
    np.testing.assert_allclose(total, 2 * x.T @ x @ w, rtol=1e-4, atol=1e-5)
    assert total.sharding.is_fully_replicated
    assert total.devices() == set(strategy.mesh.devices.flat)


@on_every_mesh
def test_collectives_and_numbers_of_replicas_work_inside(name: str) -> None:
    strategy = STRATEGIES[name]()
    count = strategy.num_replicas
    x = np.arange(2 * count, dtype=np.float32)

    def fn(x: Any) -> Any:
        total = jax.lax.psum(x.sum(), strategy.replica_axes)
        return total, strategy.replica_id(), jax.lax.axis_index(strategy.replica_axes)

    total, number, index = strategy.run(fn, args=(split(strategy, x),))
    assert lists(total) == [x.sum()] * count
    assert lists(number) == lists(index) == list(range(count))


def test_a_replica_knows_its_number_whatever_the_shapes() -> None:
    strategy = mw.Mirrored()
    parts = split(strategy, np.arange(9))
    found = strategy.run(lambda x: x.sum() * 0 + strategy.replica_id(), args=(parts,))
    assert lists(found) == list(range(8))


def test_collectives_over_unequal_parts_are_refused_not_wrong() -> None:
    strategy = mw.Mirrored()
    parts = split(strategy, np.arange(9))
    for axes in (strategy.replica_axes, "data"):
        with pytest.raises(PerReplicaError) as caught:
            strategy.run(lambda x, axes=axes: jax.lax.psum(x.sum(), axes), (parts,))
        assert three_beats(caught) == [
            "fn talks to other replicas, in a run over parts of 3 shapes.",
            "Collectives need equal shapes on all replicas, and a batch that does not "
            "divide by their number gives unequal ones.",
            "Return the value and use strategy.reduce, or make batches that divide. A "
            "replica's number is strategy.replica_id().",
        ]


def test_replica_id_outside_of_run_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.Mirrored().replica_id()
    assert three_beats(caught) == [
        "replica_id was called outside of a function that strategy.run runs.",
        "Only there a replica has a number.",
        "Call it inside of fn.",
    ]


@pytest.mark.parametrize("name", ["run", "reduce", "gather"])
def test_what_is_for_all_replicas_is_refused_inside_of_one(name: str) -> None:
    strategy, values = uneven_pair()
    calls: dict[str, Callable[[Any], Any]] = {
        "run": lambda x: strategy.run(abs, args=(x,)),
        "reduce": lambda x: strategy.reduce("SUM", x),
        "gather": lambda x: strategy.gather(x),
    }
    with pytest.raises(StrategyError) as caught:
        strategy.run(calls[name], args=(values,))
    assert three_beats(caught) == [
        f"{name} was called inside of a function that strategy.run runs.",
        "There is only one replica's part there; this is for the values of all.",
        "Return the value and use it after run, or, for a sum inside of fn, use "
        "jax.lax.psum(x, strategy.replica_axes).",
    ]
    assert lists(strategy.run(abs, args=(values,))) == [[1.0, 2.0], [30.0]]


def test_structure_is_kept_and_plain_objects_are_returned_as_they_are() -> None:
    strategy, values = uneven_pair()
    thing = object()
    found = strategy.run(
        lambda x, *, flag: {"x": (x, None), "plain": [5, "text", thing, flag, {1}]},
        args=[values],
        kwargs={"flag": True},
    )
    assert found["plain"] == [5, "text", thing, True, {1}]
    assert found["x"][1] is None
    assert lists(found["x"][0]) == [[1.0, 2.0], [30.0]]
    assert strategy.run(lambda: 5) == 5
    ones = strategy.run(lambda: np.ones(1))
    assert lists(ones) == [[1.0], [1.0]]


def test_numbers_that_differ_between_replicas_are_values_per_replica() -> None:
    strategy, values = uneven_pair()
    counts = strategy.run(lambda x: x.shape[0], args=(values,))
    assert lists(counts) == [2, 1]
    assert int(strategy.reduce("SUM", counts)) == 3


def test_other_objects_and_structures_do_not_differ_between_replicas() -> None:
    strategy, values = uneven_pair()
    with pytest.raises(PerReplicaError) as caught:
        strategy.run(lambda x: "two" if len(x) == 2 else "one", args=(values,))
    assert three_beats(caught) == [
        "fn returned 'two' on some replicas and not on others.",
        "What is neither an array nor a number is the same on all replicas.",
        "Return an array, or the same object on all replicas.",
    ]
    with pytest.raises(PerReplicaError) as caught:
        strategy.run(lambda x: (x,) if len(x) == 2 else x, args=(values,))
    assert three_beats(caught) == [
        "fn returned PyTreeDef((*,)) on some replicas and PyTreeDef(*) on others.",
        "All replicas return the same structure.",
        "Let the structure of the result not depend on the number of samples.",
    ]


def test_other_arguments_go_to_every_replica_whole() -> None:
    strategy = mw.Mirrored()
    seen: list[Any] = []

    def fn(x: Any, table: Any, weight: Any, number: Any, flag: Any, word: Any) -> Any:
        seen.append((flag, word))
        return x * number + table.sum() + weight.sum() if flag else x

    elsewhere = jax.device_put(np.ones(3, np.float32), jax.devices()[5])
    variable = keras.Variable(np.ones((8, 2), np.float32))
    sharded = mw.FSDP(8)  # another mesh of the same devices
    for weight in (variable, elsewhere, split(sharded, np.ones(8)).stacks[0]):
        parts = split(strategy, np.arange(8, dtype=np.float32))
        call = (parts, np.ones(4), weight, 2, True, "word")
        found = strategy.run(fn, args=call)
        expected = np.arange(8) * 2 + 4 + np.size(weight)
        np.testing.assert_allclose(strategy.gather(found), expected)
    assert set(seen) == {(True, "word")}


def test_numbers_do_not_widen_small_floats() -> None:
    strategy = mw.Mirrored(CPUS[:2])
    parts = split(strategy, np.ones(4, jnp.bfloat16))
    found = strategy.run(lambda x, rate: x * rate, args=(parts, 0.5))
    assert found.stacks[0].dtype == jnp.bfloat16


def test_values_of_other_splits_meet_in_one_run() -> None:
    strategy = mw.Mirrored()
    uneven = split(strategy, np.arange(11.0, dtype=np.float32))
    even = split(strategy, np.arange(8.0, dtype=np.float32))
    found = strategy.run(lambda a, b: a.sum() + 100 * b[0], args=(uneven, even))
    parts = [np.arange(11.0)[i : i + 2].sum() for i in range(0, 16, 2)]
    expected = np.array(parts) + 100 * np.arange(8)
    np.testing.assert_allclose(lists(found), expected)


def test_a_function_is_compiled_once_per_shape() -> None:
    strategy = mw.Mirrored(CPUS[:2])
    traces = []

    def fn(x: Any) -> Any:
        traces.append(x.shape)
        return x * 2

    for size in (4, 4, 6, 4, 5, 5, 6):
        strategy.run(fn, args=(split(strategy, np.ones(size)),))
    assert traces == [(2,), (3,), (3,), (2,)]


def test_methods_partials_and_objects_without_a_hash_can_be_run() -> None:
    class Scale:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return x * 2

        def method(self, x: Any) -> Any:
            return x * 3

    strategy, values = uneven_pair()
    thing = Scale()
    for fn, factor in ((thing, 2), (thing.method, 3), (jax.jit(lambda x: x * 4), 4)):
        for _ in range(2):
            found = strategy.run(fn, args=(values,))
            assert lists(found) == [[factor, 2 * factor], [30 * factor]]


def test_exceptions_of_the_function_pass_unchanged_and_later_runs_work() -> None:
    strategy, values = uneven_pair()
    mine = KeyError("mine")

    calls = []

    def fails(x: Any) -> Any:
        calls.append(x.shape)
        raise mine

    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            strategy.run(fails, args=(values,))
        assert caught.value is mine
    with pytest.raises(NameError, match="name 'missing' is not defined"):
        strategy.run(lambda x: missing, args=(values,))  # type: ignore[name-defined] # noqa: F821
    assert lists(strategy.run(lambda x: x, args=(values,))) == [[1.0, 2.0], [30.0]]


@pytest.mark.parametrize(
    ("call", "beats"),
    [
        (
            lambda s, v: s.run(abs, args=v),
            [
                "run received args of type PerReplica.",
                "Positional arguments are a tuple or a list.",
                "Write args=(value,) for one argument.",
            ],
        ),
        (
            lambda s, v: s.run(abs, args=(v,), kwargs=[1]),
            [
                "run received kwargs of type list.",
                "Keyword arguments are a dict.",
                "Write kwargs={'name': value}.",
            ],
        ),
        (
            lambda s, v: s.run(3, args=(v,)),
            [
                "run received 3 (a int) as fn.",
                "It takes a function.",
                "Pass the function itself, and its arguments in args.",
            ],
        ),
        (
            lambda s, v: s.run(lambda a, b: a, args=(v, {1})),
            [
                "run received {1} (a set) as an argument.",
                "What is no array is part of the compiled function, so it has a hash.",
                "Pass a tuple or an array instead, or let fn refer to it by name.",
            ],
        ),
    ],
    ids=["args", "kwargs", "fn", "unhashable"],
)
def test_a_call_that_cannot_be_run_is_explained(
    call: Callable[[Strategy, PerReplica], Any], beats: list[str]
) -> None:
    strategy, values = uneven_pair()
    with pytest.raises(PerReplicaError) as caught:
        call(strategy, values)
    assert three_beats(caught) == beats


@pytest.mark.parametrize("name", ["run", "reduce", "gather"])
def test_values_of_another_strategy_are_refused(name: str) -> None:
    _, values = uneven_pair()
    strategy = mw.Mirrored(CPUS[:3])
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: strategy.run(abs, args=(values,)),
        "reduce": lambda: strategy.reduce("SUM", {"a": values}),
        "gather": lambda: strategy.gather([values]),
    }
    with pytest.raises(PerReplicaError) as caught:
        calls[name]()
    two, three = (", ".join(f"/device:CPU:{i}" for i in range(n)) for n in (2, 3))
    assert three_beats(caught) == [
        f"{name} received values of 2 replicas on data=2 x fsdp=1 x tensor=1 ({two}).",
        f"This strategy has 3 replicas on data=3 x fsdp=1 x tensor=1 ({three}), and "
        "the values of strategies do not mix.",
        "Use the strategy that the values come from.",
    ]


# What a compiled function cannot see.

RATE = 1.0


def scaled(x: Any) -> Any:
    return x * RATE


def test_variables_of_keras_are_refused_inside_because_they_would_be_stale() -> None:
    strategy, _ = uneven_pair()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="only")])
    kernel = model.weights[0]
    values = split(strategy, np.ones((3, 1), np.float32))

    def assigns(x: Any) -> Any:
        kernel.assign(x[:1])
        return x

    for fn in (model, lambda x: x @ kernel.value, lambda x: x @ jnp.asarray(kernel)):
        with pytest.raises(StrategyError) as caught:
            strategy.run(fn, args=(values,))
        assert three_beats(caught) == [
            f"fn reads the variable {kernel.path}.",
            "A replica's program is compiled once and would not see new values of it.",
            "Pass values in args, and use model.stateless_call and the other stateless "
            "methods of Keras'.",
        ]
    with pytest.raises(StrategyError) as caught:
        strategy.run(assigns, args=(values,))
    assert three_beats(caught) == [
        f"fn assigns to the variable {kernel.path}.",
        "A replica returns values; variables belong to all replicas.",
        "Return the new value, reduce it, and assign after run.",
    ]
    trainable = model.trainable_variables
    found = strategy.run(
        lambda weights, x: model.stateless_call(weights, [], x)[0],
        args=(trainable, values),
    )
    np.testing.assert_allclose(strategy.gather(found), model(np.ones((3, 1))))


def test_variables_that_a_scope_of_the_user_s_maps_can_be_read() -> None:
    strategy, values = uneven_pair()
    variable = keras.Variable(1.0)

    def step(value: Any, values: Any) -> Any:
        with keras.StatelessScope(state_mapping=[(variable, value)]):
            return strategy.run(lambda x: x * variable.value, args=(values,))

    assert lists(jax.jit(step)(2.0, values)) == [[2.0, 4.0], [60.0]]


def test_recurrent_layers_run_on_replicas() -> None:
    strategy = mw.Mirrored(CPUS[:2])
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.GRU(3)])
    x = np.random.default_rng(0).normal(size=(5, 5, 2)).astype(np.float32)
    found = strategy.run(
        lambda w, others, x: model.stateless_call(w, others, x)[0],
        args=(
            model.trainable_variables,
            model.non_trainable_variables,
            split(strategy, x),
        ),
    )
    np.testing.assert_allclose(strategy.gather(found), model(x), atol=1e-6)


# reduce.


def test_reductions_of_unequal_parts_are_true_sums_and_means() -> None:
    strategy, values = uneven_pair()
    for sum_of, mean_of in (("SUM", "MEAN"), ("sum", "mean"), ("Sum", "Mean")):
        assert float(strategy.reduce(sum_of, values, axis=0)) == 33.0
        assert float(strategy.reduce(mean_of, values, axis=-1)) == 11.0
    with pytest.raises(PerReplicaError) as caught:
        strategy.reduce("SUM", values)
    assert three_beats(caught) == [
        "reduce received values of unequal shapes: (2,) on replica 0, (1,) on replica "
        "1.",
        "With axis=None values are added element by element, so their shapes are "
        "equal.",
        "Pass the dim of the samples, as in axis=0, to reduce along it too.",
    ]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float32) for name in STRATEGIES),
        *(("all axes", dtype) for dtype in (np.int32, np.uint8, np.bool, np.float16)),
    ],
)
def test_reductions_are_those_of_numpy(name: str, dtype: Any) -> None:
    strategy = STRATEGIES[name]()
    for size in (1, 8, 13):
        x = np.random.default_rng(size).integers(0, 200, (size, 3)).astype(dtype)
        values = split(strategy, x)
        ours = strategy.reduce("SUM", values, axis=0)
        np.testing.assert_allclose(ours, x.sum(0), rtol=1e-3)
        mean = strategy.reduce("MEAN", values, axis=0)
        np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-3)
        assert mean.dtype == (dtype if np.dtype(dtype).kind == "f" else np.float32)
        along_features = strategy.run(lambda x: x.T, args=(values,))
        ours = strategy.reduce("SUM", along_features, axis=1)
        np.testing.assert_allclose(ours, x.sum(0), rtol=1e-3)
        assert ours.sharding.is_fully_replicated


def test_the_mean_of_large_half_floats_does_not_overflow() -> None:
    strategy = mw.Mirrored()
    values = split(strategy, np.full(16, 60_000, np.float16))
    mean = strategy.reduce("MEAN", values, axis=0)
    assert (mean.dtype, float(mean)) == (np.float16, 60_000)


def test_trees_are_reduced_and_plain_values_are_their_own_mean() -> None:
    strategy = mw.Mirrored()
    values = split(strategy, np.arange(8.0, dtype=np.float32))
    thing = object()
    tree = {"a": [values, values], "b": thing, "c": None, "d": np.arange(4)}
    found = strategy.reduce("MEAN", tree)
    assert [float(v[0]) for v in found["a"]] == [3.5, 3.5]
    assert found["b"] is thing
    assert found["c"] is None
    assert found["d"] is tree["d"]
    assert float(strategy.reduce("MEAN", np.arange(4), axis=0)) == 1.5


def test_the_sum_of_a_plain_value_is_refused() -> None:
    strategy, values = uneven_pair()
    with pytest.raises(PerReplicaError) as caught:
        strategy.reduce("SUM", [values, 5.0], axis=0)
    assert three_beats(caught) == [
        "reduce('SUM') received 5.0 (a float), which is not one value per replica.",
        "A sum over replicas of what all of them share would depend on their number.",
        "Pass what strategy.run returned, or use 'MEAN', which leaves it as it is.",
    ]


@pytest.mark.parametrize("op", ["MAX", "", None, 3])
def test_other_ops_are_refused(op: Any) -> None:
    strategy, values = uneven_pair()
    with pytest.raises(PerReplicaError) as caught:
        strategy.reduce(op, values)
    assert three_beats(caught) == [
        f"reduce received {op!r} as op.",
        "Values are reduced by 'SUM' or by 'MEAN'.",
        "Use one of these, or compute with strategy.local_results(value).",
    ]


@pytest.mark.parametrize("axis", [1, -2, True, "0", 0.0])
def test_an_axis_is_a_dim_of_the_values(axis: Any) -> None:
    strategy, values = uneven_pair()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("reduce", lambda: strategy.reduce("SUM", values, axis=axis)),
        ("reduce", lambda: strategy.reduce("MEAN", np.ones(2), axis=axis)),
        ("gather", lambda: strategy.gather(values, axis=axis)),
    ]
    for name, call in calls:
        with pytest.raises(PerReplicaError) as caught:
            call()
        assert three_beats(caught) == [
            f"{name} received axis={axis!r} for values of shape (2,).",
            "The axis is a dim of the values, which have 1.",
            "Use a whole number from -1 to 0.",
        ]


def test_scalars_have_no_axis() -> None:
    strategy, values = uneven_pair()
    scalars = strategy.run(lambda x: x.sum(), args=(values,))
    with pytest.raises(PerReplicaError) as caught:
        strategy.reduce("MEAN", scalars, axis=0)
    assert three_beats(caught) == [
        "reduce received axis=0 for values of shape ().",
        "The axis is a dim of the values, which have 0.",
        "Use axis=None.",
    ]


def test_values_that_nobody_has_do_not_leak_into_results() -> None:
    """Replicas of other shapes compute too; what they find, even NaN, is dropped."""
    strategy = mw.Mirrored()
    values = split(strategy, np.arange(1.0, 10.0, dtype=np.float32))
    # On replicas without samples the mean is NaN, and so is what it is replaced by
    # elsewhere: only the parts with samples are finite.
    means = strategy.run(lambda x: jnp.where(len(x) > 0, x.mean(), 7.0), args=(values,))
    assert lists(means) == [1.5, 3.5, 5.5, 7.5, 9.0, 7.0, 7.0, 7.0]
    bad = strategy.run(lambda x: x / (0 if len(x) == 1 else 1), args=(values,))
    assert np.isinf(strategy.gather(bad)).tolist() == [False] * 8 + [True]


# gather and local_results.


def test_gathering_follows_tensorflow_on_unequal_parts() -> None:
    strategy, values = uneven_pair()
    assert strategy.gather(values).tolist() == [1.0, 2.0, 30.0]
    wide = strategy.run(
        lambda x: jnp.ones((2, 4 if len(x) == 2 else 3)) * x[0], args=(values,)
    )
    found = strategy.gather(wide, axis=1)
    np.testing.assert_array_equal(found, [[1] * 4 + [30] * 3] * 2)
    assert strategy.gather(wide, axis=-1).shape == (2, 7)


@on_every_mesh
def test_gathering_gives_the_batch_back_whole_on_every_device(name: str) -> None:
    strategy = STRATEGIES[name]()
    for size in (0, 1, 8, 9, 17):
        x = np.arange(size * 6, dtype=np.int32).reshape(size, 2, 3)
        values = split(strategy, x)
        found = strategy.gather({"x": values, "y": 5})
        np.testing.assert_array_equal(found["x"], x)
        assert found["y"] == 5
        assert found["x"].sharding.is_fully_replicated
        turned = strategy.run(lambda x: jnp.moveaxis(x, 0, 2), args=(values,))
        np.testing.assert_array_equal(
            strategy.gather(turned, axis=2), np.moveaxis(x, 0, 2)
        )


def test_scalars_cannot_be_gathered_and_later_calls_work() -> None:
    strategy, values = uneven_pair()
    scalars = strategy.run(lambda x: x.sum(), args=(values,))
    with pytest.raises(PerReplicaError) as caught:
        strategy.gather(scalars)
    assert three_beats(caught) == [
        "gather received scalars: () on replicas 0 to 1.",
        "Values are concatenated along a dim, and a scalar has none.",
        "Use strategy.reduce, or return value[None] from fn.",
    ]
    assert strategy.gather(values).tolist() == [1.0, 2.0, 30.0]


def test_shapes_that_do_not_fit_are_refused_and_later_calls_work() -> None:
    strategy, values = uneven_pair()
    wide = strategy.run(lambda x: jnp.ones((2, len(x))), args=(values,))
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("gather", lambda: strategy.gather(wide)),
        ("reduce", lambda: strategy.reduce("MEAN", wide, axis=0)),
    ]
    for name, call in calls:
        with pytest.raises(PerReplicaError) as caught:
            call()
        assert three_beats(caught) == [
            f"{name} received values whose shapes do not fit along axis=0: (2, 2) on "
            "replica 0, (2, 1) on replica 1.",
            "Only the dim that is named may differ between replicas.",
            "Name the dim that differs, or make the others equal inside fn.",
        ]
    assert strategy.gather(values).tolist() == [1.0, 2.0, 30.0]


def test_local_results_are_the_values_of_this_process() -> None:
    strategy, values = uneven_pair()
    first, second = strategy.local_results({"x": values, "y": 5})
    assert (first["x"].tolist(), first["y"]) == ([1.0, 2.0], 5)
    assert (second["x"].tolist(), second["y"]) == ([30.0], 5)
    assert strategy.local_results((1, 2)) == ((1, 2),)


# Inside of jax.jit.


@on_every_mesh
@pytest.mark.parametrize("size", [8, 13])
def test_run_reduce_and_gather_work_inside_of_jit_and_grad(
    name: str, size: int
) -> None:
    strategy = STRATEGIES[name]()
    x = np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)

    def step(w: Any, values: PerReplica) -> Any:
        outputs = strategy.run(lambda x: x @ w, args=(values,))  # w is enclosed
        losses = strategy.run(lambda o: (o**2).sum(-1), args=(outputs,))
        loss = strategy.reduce("MEAN", losses, axis=0)
        return loss, (strategy.gather(outputs), strategy.local_results(losses))

    values = split(strategy, x)
    (loss, (outputs, local)), gradient = jax.value_and_grad(
        jax.jit(step), has_aux=True
    )(w, values)
    np.testing.assert_allclose(outputs, x @ w, rtol=1e-5, atol=1e-5)
    expected = ((x @ w) ** 2).sum(-1)
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(local), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, 2 * x.T @ x @ w / size, rtol=1e-4, atol=1e-5)


def test_gradients_go_through_parts_without_samples() -> None:
    strategy = mw.Mirrored()
    x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    values = split(strategy, x)

    def total(w: Any) -> Any:
        outputs = strategy.run(lambda x: x @ w, args=(values,))
        return strategy.gather(outputs).sum()

    expected = np.repeat(x.sum(0)[:, None], 2, 1)
    for gradient in (jax.grad(total), jax.jit(jax.grad(total))):
        found = gradient(np.ones((4, 2), np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_new_trace_reads_the_world_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, values = uneven_pair()
    for rate in (1.0, 2.0):
        monkeypatch.setitem(globals(), "RATE", rate)
        step = jax.jit(lambda v: strategy.run(scaled, args=(v,)))
        assert lists(step(values)) == [[rate, 2 * rate], [30 * rate]]


def test_one_compiled_step_per_shape_inside_of_jit() -> None:
    strategy = mw.Mirrored()
    step = jax.jit(lambda v: strategy.reduce("SUM", strategy.run(jnp.sum, args=(v,))))
    for size in (16, 16, 9, 9, 16):
        assert int(step(split(strategy, np.ones(size, np.int32)))) == size
    assert step._cache_size() == 2


# Datasets.


def test_a_dataset_can_be_iterated_again_and_a_spent_generator_says_so() -> None:
    strategy = mw.Mirrored(CPUS[:2])
    batches = [np.arange(4), np.arange(3)]
    again = strategy.distribute_dataset(batches)
    assert [lists(b) for b in again] == [lists(b) for b in again]
    once = strategy.distribute_dataset(iter(batches))
    assert len(list(once)) == 2
    with pytest.raises(StrategyError) as caught:
        list(once)
    assert three_beats(caught) == [
        "A list_iterator was iterated over for the second time.",
        "A generator gives its batches once.",
        "Distribute a list, or an object whose __iter__ starts anew.",
    ]


def test_batches_are_split_when_their_turn_comes() -> None:
    def forever() -> Iterator[Any]:
        while True:
            yield np.arange(4)

    strategy = mw.Mirrored(CPUS[:2])
    first = next(iter(strategy.distribute_dataset(forever())))
    assert lists(first) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("data", [np.ones(4), (np.ones(4), np.ones(4)), {}, "ab", 3])
def test_what_is_no_iterable_of_batches_is_refused(data: Any) -> None:
    with pytest.raises(PerReplicaError) as caught:
        mw.Mirrored().distribute_dataset(data)
    assert three_beats(caught) == [
        f"distribute_dataset received a {type(data).__name__}.",
        "It takes an iterable of global batches, each a tree of arrays.",
        "Pass, for example, [(x[i:i+64], y[i:i+64]) for i in range(0, n, 64)], or "
        "arrays and a batch_size.",
    ]


def test_a_distributed_dataset_is_not_distributed_again() -> None:
    strategy = mw.Mirrored()
    with pytest.raises(PerReplicaError, match="received a DistributedDataset"):
        strategy.distribute_dataset(strategy.distribute_dataset([]))


# The whole loop.

X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(48, 2)).astype(np.float32)


def make_model() -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), *layers])


def train_by_hand(strategy: Strategy, size: int, batch_size: int) -> list[np.ndarray]:
    """Two epochs of a loop of one's own; run is called outside of jit."""
    model = mw.distribute(make_model(), strategy)  # its weights are split, too
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def gradients(weights: Any, x: Any, y: Any, count: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            predicted, _ = model.stateless_call(weights, [], x, training=True)
            return keras.losses.mean_squared_error(y, predicted).sum() / count

        return jax.grad(loss_of)(weights)

    weights = [v.value for v in model.trainable_variables]
    slots = [v.value for v in optimizer.variables]
    apply = jax.jit(optimizer.stateless_apply)
    cuts = [slice(i, min(i + batch_size, size)) for i in range(0, size, batch_size)]
    batches = [(X[cut], Y[cut]) for cut in cuts]
    for _ in range(2):
        for (x, y), host in zip(
            strategy.distribute_dataset(batches), batches, strict=True
        ):
            parts = strategy.run(gradients, args=(weights, x, y, len(host[0])))
            total = strategy.reduce("SUM", parts)
            weights, slots = apply(slots, total, weights)
    return [np.asarray(w) for w in weights]


def train_by_fit(size: int, batch_size: int) -> list[np.ndarray]:
    model = make_model()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    model.fit(
        *(X[:size], Y[:size]),
        epochs=2,
        batch_size=batch_size,
        shuffle=False,
        verbose=0,
    )
    return list(model.get_weights())


@pytest.mark.parametrize("remainder", range(16))
def test_a_loop_equals_fit_on_one_device_for_every_remainder(remainder: int) -> None:
    size = 32 + remainder
    ours = train_by_hand(mw.Mirrored(), size, 16)
    for own, theirs in zip(ours, train_by_fit(size, 16), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)


@on_every_mesh
def test_a_loop_equals_fit_on_one_device_on_every_mesh(name: str) -> None:
    ours = train_by_hand(STRATEGIES[name](), 45, 16)
    for own, theirs in zip(ours, train_by_fit(45, 16), strict=True):
        np.testing.assert_allclose(own, theirs, atol=1e-5)


def test_devices_can_be_set_up_anew_after_a_loop(run_script: Run) -> None:
    run_script(
        "import meshwright as mw, numpy as np\n"
        "mw.configure(virtual=4)\n"
        "def total(x): return x.sum()\n"
        "def loop():\n"
        "    strategy = mw.Mirrored()\n"
        "    for batch in strategy.distribute_dataset([np.arange(9)]):\n"
        "        parts = strategy.run(total, args=(batch,))\n"
        "        assert int(strategy.reduce('SUM', parts)) == 36\n"
        "        assert strategy.gather(batch).shape == (9,)\n"
        "    return strategy.num_replicas\n"
        "assert loop() == 4\n"
        "mw.configure(virtual=3)\n"
        "assert loop() == 3\n"
    )


# Datasets.


def rows_of(batch: Any) -> list[Any]:
    return [value.tolist() for value in batch.values]


def test_arrays_are_batched_in_an_order_of_seed_and_epoch_alone() -> None:
    x = np.arange(11)
    orders = []
    for devices in (2, 3, 8):
        strategy = mw.Mirrored([f"CPU:{i}" for i in range(devices)])
        dataset = strategy.distribute_dataset(x, 4, shuffle=True, seed=5)
        epochs = [[v for b in dataset for r in rows_of(b) for v in r] for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11))
        assert epochs[0] != epochs[1]
        orders.append(epochs)
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_position_counts_what_was_used_not_what_was_read_ahead(depth: int) -> None:
    def make() -> Any:
        strategy = mw.Mirrored(["CPU:0", "CPU:1"])
        strategy.prefetch = depth
        return strategy.distribute_dataset(np.arange(20), 4, shuffle=True, seed=1)

    dataset, expected = make(), [rows_of(batch) for batch in make()]
    batches = iter(dataset)
    used = [rows_of(next(batches)) for _ in range(2)]
    position = json.loads(json.dumps(dataset.position))
    assert position == {"epoch": 0, "batch": 2, "seed": 1}
    other = make()
    other.restore(position)
    assert used + [rows_of(batch) for batch in other] == expected


def test_what_has_no_order_of_its_own_has_no_position() -> None:
    dataset = mw.Mirrored(["CPU:0"]).distribute_dataset([np.arange(3)])
    for ask in (lambda: dataset.position, lambda: dataset.restore({})):
        with pytest.raises(StrategyError) as caught:
            ask()
        assert three_beats(caught) == [
            "The position of a list was asked for.",
            "Only batches that are made of arrays have a position: the order of others "
            "is not known.",
            "Pass arrays and a batch_size to distribute_dataset.",
        ]


def test_a_function_makes_the_batches_of_its_process_in_every_epoch() -> None:
    strategy = mw.Mirrored(["CPU:0", "CPU:1"])

    def read(shard: Any) -> Iterator[Any]:
        for file in shard.files(["1", "2", "3"]):
            yield np.array([int(file)] * 4)

    dataset = strategy.distribute_dataset(read)
    for _ in range(2):
        found = [rows_of(batch) for batch in dataset]
        assert found == [[[n, n], [n, n]] for n in (1, 2, 3)]
    with pytest.raises(PerReplicaError, match="received a dict"):
        iter(strategy.distribute_dataset(lambda shard: {}))
    with pytest.raises(PerReplicaError) as caught:
        list(strategy.distribute_dataset(lambda shard: [np.arange(3)]))
    assert three_beats(caught) == [
        "Process 0 has a batch of 3 samples for its 2 replicas.",
        "Processes that read data of their own split it evenly over their replicas, or "
        "the replicas of all would not have equal parts.",
        "Use batches that divide by 2, and leave out what remains.",
    ]


def test_the_thread_of_a_dataset_ends_with_its_loop() -> None:
    strategy = mw.Mirrored(["CPU:0", "CPU:1"])
    batches = iter(strategy.distribute_dataset(np.arange(40), 4))
    next(batches)
    names = [thread.name for thread in threading.enumerate()]
    assert "meshwright-prefetch" in names
    del batches
    names = [thread.name for thread in threading.enumerate()]
    assert "meshwright-prefetch" not in names
