"""Programs with operations computed in another way give the same numbers."""

from typing import Any

import meshwright as mw
from meshwright.models.convolution import convolve_as_known, convolve_in_order
from meshwright.models.pooling import max_by_slices, max_gradient_by_slices
from meshwright.models.products import product_in_order
from meshwright.models.rewriting import Rules, rewritten

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

RULES: Rules = {
    "conv_general_dilated": convolve_in_order,
    "reduce_window_max": max_by_slices,
    "select_and_scatter_add": max_gradient_by_slices,
    ("dot_general", "transpose"): product_in_order,
}


def operations(program: Any) -> str:
    return str(program.jaxpr)


def check(function: Any, *args: Any, rules: Any = RULES, rtol: float = 1e-5) -> Any:
    """The rewritten program gives what the original gives; returns it."""
    original = jax.make_jaxpr(function)(*args)
    program = rewritten(original, rules)
    found = jax.jit(jaxpr_as_fun(program))(*jax.tree.leaves(args))
    wanted = jaxpr_as_fun(original)(*jax.tree.leaves(args))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        scale = float(jnp.abs(theirs.astype("float32")).max())
        np.testing.assert_allclose(
            np.asarray(ours, "float32"),
            np.asarray(theirs, "float32"),
            atol=rtol * max(scale, 1.0),
        )
    return program


def random(*shape: int, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


def convolution(places: int, **options: Any) -> Any:
    letters = "WHD"[:places][::-1]
    order = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def total(x: Any, kernel: Any) -> Any:
        settings = {"window_strides": (1,) * places, "padding": "VALID"} | options
        y = jax.lax.conv_general_dilated(x, kernel, dimension_numbers=order, **settings)
        return (y.astype("float32") ** 2).sum()

    return jax.value_and_grad(total, argnums=(0, 1))


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "SAME"},
        {"window_strides": (2, 3)},
        {"window_strides": (2, 1), "padding": "SAME"},
        {"rhs_dilation": (2, 1)},
        {"rhs_dilation": (2, 3), "padding": "SAME"},
        {"lhs_dilation": (2, 3), "padding": ((1, 0), (0, 2))},
        {"padding": ((0, 3), (2, 1))},
    ],
)
def test_convolutions_and_their_gradients_stay_the_same(
    options: dict[str, Any], features: int
) -> None:
    x, kernel = random(4, 11, 9, features), random(3, 2, features, 5)
    check(convolution(2, **options), x, kernel)
    rules = {"conv_general_dilated": convolve_as_known}
    check(convolution(2, **options), x, kernel, rules=rules)


@pytest.mark.parametrize(
    ("x", "kernel"),
    [
        ((3, 9, 2), (4, 2, 5)),
        ((2, 5, 6, 4, 3), (2, 3, 2, 3, 4)),
        ((1, 5, 5, 2), (5, 5, 2, 3)),
    ],
)
def test_convolutions_of_other_ranks_and_of_one_sample_stay_the_same(
    x: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    check(convolution(len(x) - 2), random(*x), random(*kernel))


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((2, 2), (2, 2), "VALID"), ((3, 4), (2, 3), "SAME"), ((5, 2), (1, 2), "VALID")],
)
def test_transposed_convolutions_read_nothing_backwards(
    window: tuple[int, int], strides: tuple[int, int], padding: str
) -> None:
    x, kernel = random(4, 7, 6, 3), random(*window, 3, 5)

    def total(x: Any, kernel: Any) -> Any:
        return (jax.lax.conv_transpose(x, kernel, strides, padding) ** 2).sum()

    program = check(jax.value_and_grad(total, argnums=(0, 1)), x, kernel)
    compiled = jax.jit(jaxpr_as_fun(program)).lower(x, kernel).compile()
    assert "rhs_reversal" not in compiled.as_text()


def test_gradients_of_transposed_kernels_are_those_of_kernels_on_gpus() -> None:
    x, kernel = random(4, 7, 6, 3), random(2, 2, 3, 5)

    def total(kernel: Any) -> Any:
        return (jax.lax.conv_transpose(x, kernel, (2, 2), "VALID") ** 2).sum()

    rules = {"conv_general_dilated": convolve_as_known}
    program = check(jax.grad(total), kernel, rules=rules)
    *_, gradient = [
        equation.params
        for equation in program.jaxpr.eqns
        if equation.primitive.name == "conv_general_dilated"
    ]
    # What moves over the gradients of the outputs has gaps, as with strides.
    assert gradient["lhs_dilation"] == (1, 1)
    assert gradient["rhs_dilation"] == (2, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_low(dtype: str) -> None:
    x, kernel = random(4, 8, 8, 1, dtype=dtype), random(3, 3, 1, 5, dtype=dtype)
    check(convolution(2), x, kernel, rtol=2e-2)


def test_groups_are_left_alone() -> None:
    x, kernel = random(4, 8, 8, 4), random(3, 3, 1, 8)
    function = convolution(2, feature_group_count=4)
    program = check(function, x, kernel)
    assert operations(program).count("conv_general_dilated") == 3


def test_a_single_channel_is_a_matrix_product_in_both_directions() -> None:
    x, kernel = random(4, 8, 8, 1), random(3, 3, 1, 5)
    program = check(convolution(2), x, kernel)
    assert operations(program).count("dot_general") == 1  # that of the kernel
    rules = {"conv_general_dilated": convolve_as_known}
    program = check(convolution(2), x, kernel, rules=rules)
    assert operations(program).count("dot_general") == 2


def test_all_convolutions_have_their_dims_in_order() -> None:
    x, kernel = random(4, 8, 8, 3), random(3, 3, 3, 5)
    program = check(convolution(2), x, kernel)
    specs = {
        e.params["dimension_numbers"]
        for e in program.jaxpr.eqns
        if e.primitive.name == "conv_general_dilated"
    }
    assert specs == {
        jax.lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
    }


def pooling(window: tuple[int, ...], strides: tuple[int, ...], padding: str) -> Any:
    def total(x: Any) -> Any:
        y = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, padding)
        return (y * jnp.arange(y.size).reshape(y.shape)).sum()

    return jax.value_and_grad(total)


@pytest.mark.parametrize("size", [(6, 6), (7, 9)])
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (1, 4)])
def test_pooling_stays_the_same_also_for_equal_numbers(
    window: tuple[int, int], size: tuple[int, int]
) -> None:
    # Few different numbers, so that most windows have several largest ones.
    x = jnp.round(random(3, *size, 2))
    sizes = (1, *window, 1)
    program = check(pooling(sizes, sizes, "VALID"), x)
    assert "window" not in operations(program)


@pytest.mark.parametrize(
    ("strides", "padding"), [((1, 1, 1, 1), "VALID"), ((1, 2, 2, 1), "SAME")]
)
def test_windows_that_overlap_or_are_padded_are_left_alone(
    strides: tuple[int, ...], padding: str
) -> None:
    program = check(pooling((1, 2, 2, 1), strides, padding), random(3, 7, 7, 2))
    assert "select_and_scatter_add" in operations(program)


def test_rules_reach_into_loops_branches_and_checkpoints() -> None:
    kernel = random(3, 3, 2, 2)

    def layer(x: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y)

    def total(x: Any) -> Any:
        y, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(layer)(x), None), x, length=2)
        y = jax.lax.cond(y.sum() > 0, layer, lambda y: y, y)
        return jax.jit(layer)(y).sum()

    program = check(jax.grad(total), random(2, 5, 5, 2))
    assert "lhs_spec=(3, 0, 1, 2)" not in operations(program)


def test_what_runs_per_device_is_left_alone() -> None:
    mesh = mw.Mirrored(["CPU:0", "CPU:1"]).mesh
    where = jax.sharding.PartitionSpec("data")
    part = convolution(2)
    function = jax.shard_map(
        lambda x, kernel: part(x, kernel)[1][0],
        mesh=mesh,
        in_specs=(where, jax.sharding.PartitionSpec()),
        out_specs=where,
    )
    program = check(function, random(4, 8, 8, 3), random(3, 3, 3, 5))
    assert "shard_map" in operations(program)


def test_a_program_without_such_operations_is_returned_itself() -> None:
    program = jax.make_jaxpr(jnp.sin)(1.0)
    assert rewritten(program, RULES) is program


def test_the_names_of_layers_survive() -> None:
    def named(x: Any) -> Any:
        with jax.named_scope("first_layer"):
            return pooling((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)

    program = rewritten(jax.make_jaxpr(named)(random(2, 4, 4, 1)), RULES)
    lowered = jax.jit(jaxpr_as_fun(program)).lower(random(2, 4, 4, 1))
    assert "first_layer" in lowered.as_text(debug_info=True)


def transposed_products(program: Any) -> int:
    """Transpositions of what a product puts out."""
    products = {
        variable
        for operation in program.jaxpr.eqns
        if operation.primitive.name == "dot_general"
        for variable in operation.outvars
    }
    return sum(
        operation.primitive.name == "transpose" and operation.invars[0] in products
        for operation in program.jaxpr.eqns
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bi,io->bo", ((6, 3), (3, 5))),
        ("bsi,io->bso", ((2, 4, 3), (3, 5))),
        ("bhsd,bhdt->bhst", ((2, 3, 4, 5), (2, 3, 5, 6))),
    ],
)
def test_gradients_of_kernels_come_out_in_their_order(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=shape).astype("float32") for shape in shapes)

    def gradient(x: Any, kernel: Any) -> Any:
        return jax.grad(lambda k: (jnp.einsum(equation, x, k) ** 2).sum())(kernel)

    before = jax.make_jaxpr(gradient)(x, kernel)
    assert transposed_products(before) == 1
    assert transposed_products(check(gradient, x, kernel)) == 0


def test_other_transpositions_of_a_product_stay() -> None:
    x = np.arange(24, dtype="float32").reshape(2, 3, 4)
    y = np.arange(20, dtype="float32").reshape(4, 5)

    def function(x: Any, y: Any) -> Any:
        return jnp.transpose(jnp.einsum("abc,cd->abd", x, y), (1, 0, 2))

    assert transposed_products(check(function, x, y)) == 1


def num_products(program: Any) -> int:
    return operations(program).count("= dot_general[")


def test_a_product_is_computed_once_whoever_reads_it() -> None:
    x = np.arange(12, dtype="float32").reshape(3, 4)

    def twice(x: Any) -> Any:
        product = jax.lax.dot(x, x.T)
        return product + 2, product.T + 1

    def in_turn(x: Any) -> Any:
        return jax.lax.dot(x, x.T * 2).T + 1

    assert num_products(check(twice, x)) == 1
    program = check(in_turn, x)
    assert num_products(program) == 1
    assert transposed_products(program) == 0
