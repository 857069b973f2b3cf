"""Traced programs as one line of operations, as a compiler would see them."""

from collections.abc import Callable
from typing import Any

from meshwright.models.blocks import keeps_blocks_apart
from meshwright.models.flattening import flatten
from meshwright.models.formulations import Platform
from meshwright.models.kernels import flattened
from meshwright.models.operations import (
    FlatProgram,
    Operation,
    Size,
    Value,
)
from meshwright.models.training import SAMPLES, trace_training

import jax
import jax.numpy as jnp
import keras
import pytest
from jax import lax

L = keras.layers
X = jax.ShapeDtypeStruct((SAMPLES, 8), "float32")
SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")


def flat(
    function: Callable[..., Any], *args: Any, platform: Platform = "cpu"
) -> FlatProgram:
    return flatten(jax.make_jaxpr(function)(*args).jaxpr, platform)


def names(
    function: Callable[..., Any], *args: Any, platform: Platform = "cpu"
) -> list[str]:
    return [op.name for op in flat(function, *args, platform=platform).operations]


def test_what_is_computed_twice_counts_once() -> None:
    found = names(lambda x: jnp.sin(x) * jnp.cos(x) + jnp.sin(x), X)
    assert found == ["sin", "cos", "mul", "add"]


def test_what_differs_in_a_parameter_counts_twice() -> None:
    def run(x: Any) -> Any:
        return jnp.sum(x, axis=0) * jnp.sum(x, axis=1)

    assert names(run, SQUARE).count("reduce_sum") == 2


def test_what_nobody_reads_is_gone() -> None:
    def run(x: Any) -> Any:
        jnp.exp(x)
        return jnp.sin(x)

    assert names(run, X) == ["sin"]


def test_calls_are_written_out_and_what_only_renames_is_gone() -> None:
    def called(x: Any) -> Any:
        return jnp.sin(x.reshape(8, SAMPLES).reshape(-1))

    def run(x: Any) -> Any:
        return jax.nn.relu(lax.stop_gradient(jax.jit(called)(x)[:, None]))

    assert names(run, X) == ["sin", "broadcast_in_dim", "max"]


def test_of_branches_the_longest_counts() -> None:
    def run(x: Any, flag: Any) -> Any:
        return lax.cond(flag, jnp.sin, lambda x: jnp.cos(jnp.exp(x)), x)

    assert names(run, X, jnp.array(True)) == ["exp", "cos"]


def test_numbers_that_are_known_are_not_computed() -> None:
    def run(x: Any) -> Any:
        number = lax.add(lax.full((), 2.0), lax.full((), 3.0))
        chosen = lax.select(lax.full((), True), number, lax.full((), 9.0))
        return x * chosen

    found = flat(run, X)
    assert [op.name for op in found.operations] == ["broadcast_in_dim", "mul"]
    assert found.operations[0].inputs == [], "a tensor that is full of the number"


def test_dividing_by_a_known_number_is_multiplying() -> None:
    assert names(lambda x: x / 3.0, X)[-1] == "mul"
    assert names(lambda x, y: x / y, X, X) == ["div"]
    whole = jax.ShapeDtypeStruct((8,), "int32")
    assert names(lambda x: lax.div(x, lax.full((8,), 3)), whole)[-1] == "div"


def test_powers_are_products() -> None:
    assert names(lambda x: x**4, X) == ["mul"] * 3
    assert names(lambda x: lax.integer_pow(x, -2), X) == ["mul", "div"]
    assert names(jnp.square, X) == ["mul"]


def test_the_logistic_function_is_written_out() -> None:
    assert names(jax.nn.sigmoid, X) == ["neg", "exp", "add", "div"]


def test_a_product_with_yes_and_no_is_a_choice() -> None:
    assert names(lambda x, y: x * (y > 0), X, X)[-1] == "select_n"


def test_anything_is_larger_than_minus_infinity() -> None:
    assert names(lambda x: jnp.maximum(-jnp.inf, x), X) == []
    assert "max" in names(lambda x: jnp.maximum(0.0, x), X)


def test_transposing_twice_is_doing_nothing() -> None:
    assert names(lambda x: jnp.sin(x.T).T, X) == ["transpose", "sin", "transpose"]
    assert names(lambda x: x.T.T + x, X) == ["add"]
    cube = jax.ShapeDtypeStruct((2, 3, 4), "float32")
    twice = flat(lambda x: x.transpose(1, 0, 2).transpose(2, 0, 1), cube)
    (once,) = twice.operations
    assert once.params["permutation"] == (2, 1, 0)
    assert names(lambda x: x.transpose(1, 0, 2), jnp.ones((1, 3, 4))) == []


AGAIN = keeps_blocks_apart("cpu")


def two_sines(x: Any) -> Any:
    return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x))))


@pytest.mark.parametrize(("platform", "more"), [("cpu", 2 * AGAIN), ("gpu", 2)])
def test_what_is_computed_again_counts_again_where_blocks_are_kept_apart(
    platform: Platform, more: int
) -> None:
    plain = names(jax.value_and_grad(two_sines), X, platform=platform)
    again = jax.value_and_grad(jax.checkpoint(two_sines))
    found = names(again, X, platform=platform)
    assert plain.count("sin") == 3
    assert found.count("sin") == 3 + more, "the last sine has no use backward"


def test_a_block_that_is_not_differentiated_counts_once() -> None:
    def run(x: Any) -> Any:
        return jax.checkpoint(two_sines)(x) + two_sines(x)

    assert names(run, X, platform="gpu").count("sin") == 3


@pytest.mark.parametrize(("platform", "products"), [("cpu", 4 * AGAIN), ("gpu", 4)])
def test_rematerialised_layers_multiply_again_where_blocks_are_kept_apart(
    platform: Platform, products: int
) -> None:
    layers = [L.Dense(16, activation="tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile("sgd", "mse")

    def count(remat: bool) -> int:
        found = flattened(trace_training(model, remat=remat), platform)
        return sum(op.sort == "product" for op in found.operations)

    assert count(False) == 3 * 6 - 1
    more = count(True) - count(False)
    assert more >= products if products else more == 0


def test_sizes_take_the_samples_out() -> None:
    assert Size.of(12) == Size(12, 0)
    assert Size.of(12 * SAMPLES) == Size(12, 1)
    assert Size.of(12 * SAMPLES**2) == Size(12, 2)
    assert Size.of(0) == Size(0, 0)
    assert Size(12, 0).at(32) == 12
    assert Size(12, 1).at(32) == 12 * 32
    assert Size(12, 2).at(32) == 12 * 32**2


def test_sizes_of_values_are_those_of_any_batch() -> None:
    def run(x: Any, w: Any) -> Any:
        return jnp.sum(x @ w @ x.T, axis=0), w.astype("bfloat16")

    found = flat(run, X, SQUARE)
    small = flatten(jax.make_jaxpr(run)(jnp.ones((32, 8)), SQUARE).jaxpr)
    assert [v.size.at(32) for v in found.values] == [v.size.at(1) for v in small.values]
    assert [v.bytes.at(32) for v in found.values] == [
        v.bytes.at(1) for v in small.values
    ]
    assert {v.size.power for v in found.values} == {0, 1, 2}
    assert found.values[found.outputs[1]].bytes == Size(64 * 2, 0)


def test_values_know_who_makes_and_who_reads_them() -> None:
    found = flat(lambda x: jnp.sin(x) * x + jnp.sin(x), X)
    (x,) = found.inputs
    assert found.values[x].maker is None
    assert [found.operations[n].name for n in found.values[x].readers] == ["sin", "mul"]
    (made,) = found.outputs
    maker = found.values[made].maker
    assert maker is not None
    assert found.operations[maker].name == "add"
    copy = found.values[x].unread()
    assert (copy.shape, copy.dtype, copy.itemsize) == ((SAMPLES, 8), "float32", 4)
    assert copy.readers == []


def test_an_operation_may_read_others() -> None:
    made = Operation("sin", "elementwise", {}, [0], [1], [(2,)], "one", times=3)
    other = made.reading([5])
    assert other == Operation(
        "sin", "elementwise", {}, [5], [1], [(2,)], "one", None, 3
    )
    assert made.inputs == [0]
    assert not made.is_dear
    assert Operation("exp", "elementwise", {}, [0], [1], [(2,)], "").is_dear


def test_programs_are_connected_anew() -> None:
    values = [Value((2,), "float32", 4) for _ in range(4)]
    operations = [
        Operation("sin", "elementwise", {}, [0], [1], [(2,)], ""),
        Operation("exp", "elementwise", {}, [0], [2], [(2,)], ""),
        Operation("add", "elementwise", {}, [1, 1], [3], [(2,), (2,)], ""),
    ]
    found = FlatProgram(values, operations, [0], [3]).connected()
    assert [op.name for op in found.operations] == ["sin", "add"]
    assert found.values[2].maker is None
    assert found.values[1].readers == [1], "once, however often it reads"


def test_scopes_say_which_layer_an_operation_is_of() -> None:
    def run(x: Any) -> Any:
        with jax.named_scope("outer"):
            return jax.jit(inner)(x)

    def inner(x: Any) -> Any:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (found,) = flat(run, X).operations
    assert found.scope == "outer/inner"


def test_loops_keep_what_they_repeat_and_fill_zeros() -> None:
    def run(x: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            carry = jnp.sin(carry)
            return carry, carry

        return lax.scan(turn, x, None, length=5)

    found = flat(run, X)
    zeros, loop = found.operations
    assert zeros.sort == "broadcast"
    assert found.values[zeros.outputs[0]].shape == (5, SAMPLES, 8)
    assert (loop.sort, loop.times) == ("loop", 5)
    assert loop.inputs[-1] == zeros.outputs[0]
    assert loop.inner is not None
    assert [op.name for op in loop.inner.operations] == ["sin"]


def test_two_loops_that_look_alike_are_two() -> None:
    def run(x: Any) -> Any:
        def loop(x: Any) -> Any:
            return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x)

        return loop(x) + loop(x)

    assert names(run, X).count("scan") + names(run, X).count("while") == 2


def test_a_product_is_read_in_order_or_moved_before() -> None:
    heads = jax.ShapeDtypeStruct((SAMPLES, 6, 4, 8), "float32")

    def scores(q: Any, k: Any) -> Any:
        return jnp.einsum("bqhd,bkhd->bhqk", q, k)

    for platform, moved in (("cpu", 2), ("gpu", 2)):
        found = names(scores, heads, heads, platform=platform)  # type: ignore[arg-type]
        assert found.count("transpose") == moved, "heads lie inside of places"
    assert names(lambda a, b: a.T @ b, SQUARE, SQUARE) == ["transpose", "dot_general"]
    swapped = names(lambda a, b: jnp.einsum("ki,kj->ij", a, b), SQUARE, SQUARE)
    assert swapped == ["dot_general"]


def test_gpus_read_dims_that_lie_together_as_one() -> None:
    wide = jax.ShapeDtypeStruct((SAMPLES, 6, 8), "float32")
    weight = jax.ShapeDtypeStruct((6, 8, 5), "float32")

    def run(x: Any, w: Any) -> Any:
        return jnp.tensordot(x, x, ((0, 1), (0, 1))), jnp.tensordot(x, w, 2)

    on_gpu = flat(run, wide, weight, platform="gpu").operations
    assert [op.name for op in on_gpu] == ["dot_general"] * 2
    assert not on_gpu[0].reads_rows, "samples come first, and are summed over"
    assert on_gpu[1].reads_rows


def test_random_numbers_need_room_on_cpus_and_none_on_gpus() -> None:
    def run(key: Any) -> Any:
        return jax.random.bits(key, (SAMPLES, 8))

    key = jax.random.key(0)
    on_cpu = flat(run, key)
    (maker,) = [op for op in on_cpu.operations if op.name == "random_bits"]
    assert len(maker.outputs) == 3
    assert "xor" in [op.name for op in on_cpu.operations]
    assert "scramble" in names(run, key, platform="gpu")


def test_splitting_a_tensor_is_slicing_it() -> None:
    found = flat(lambda x: jnp.sin(jnp.split(x, 2, axis=1)[1]), X)
    assert [op.name for op in found.operations] == ["slice", "sin"]
    assert found.values[found.operations[0].outputs[0]].shape == (SAMPLES, 4)


def test_narrowing_to_bfloat16_has_a_name_of_its_own() -> None:
    narrow = names(lambda x: x.astype("bfloat16"), X)
    assert narrow == ["to_bfloat16"]
    wide = jax.ShapeDtypeStruct((8,), "bfloat16")
    assert names(lambda x: x.astype("float32"), wide) == ["convert_element_type"]
    assert names(lambda x: x.astype("float32"), X) == []


@pytest.mark.parametrize(("window", "num_copies"), [(3, 2), (1, 2)])
def test_libraries_for_gpus_want_the_outputs_of_a_kernel_first(
    window: int, num_copies: int
) -> None:
    def loss(x: Any, *weights: Any) -> Any:
        order = ("NHWC", "HWIO", "NHWC")
        for w in weights:
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=order)
            x = jnp.sin(x)
        return jnp.sum(x)

    x = jax.ShapeDtypeStruct((SAMPLES, 8, 8, 4), "float32")
    w = jax.ShapeDtypeStruct((window, window, 4, 4), "float32")
    program = jax.make_jaxpr(jax.grad(loss, (1, 2)))(x, w, w)
    found = flatten(program.jaxpr, "gpu")
    weights = set(found.inputs[1:])
    copies = [op for op in found.operations if weights.intersection(op.inputs)]
    copies = [op for op in copies if op.name == "transpose"]
    assert len(copies) == num_copies, "gradients of inputs read the same"
    assert not any(op.name == "rev" for op in found.operations)
