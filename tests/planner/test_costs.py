"""What kernels cost, against closed forms of a device that is easy to calculate."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

from meshwright.models.flattening import flatten
from meshwright.models.kernels import Kernels, kernels_of, make_kernels
from meshwright.models.training import SAMPLES, trace_training
from meshwright.planner.costs import KernelCosts, kind_in_context
from meshwright.planner.speed import CrowdPoint, ProductPoint, Speed, StreamPoint

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

FLOPS, BANDWIDTH = 1e12, 1e11
SIZES = [1, 64, 4096]
SPEED = Speed(
    products=tuple(
        ProductPoint(kind, "float32", form, 1, r, i, c, 2 * r * i * c / rate)
        for kind, form, rate in (
            ("product", "nn", FLOPS),
            ("product", "nt", FLOPS / 2),
            ("convolution", "outputs", FLOPS / 4),
        )
        for r, i, c in product(SIZES, repeat=3)
    ),
    streams=tuple(StreamPoint(size, size / BANDWIDTH) for size in (1.0, 1e6, 1e12)),
)
"""1e12 FLOP/s, half of it if a factor is transposed, a quarter for convolutions."""

X = jax.ShapeDtypeStruct((SAMPLES, 512), "float32")
W = jax.ShapeDtypeStruct((512, 1024), "float32")


def kernels(function: Callable[..., Any], *args: Any) -> Kernels:
    program = jax.make_jaxpr(function)(*args)
    return make_kernels(flatten(program.jaxpr, "gpu"), "gpu")


def seconds(found: Kernels, samples: float, speed: Speed = SPEED, **how: Any) -> Any:
    return KernelCosts(found, speed).seconds(samples, **how)


@pytest.mark.parametrize("samples", [512, 4096])
def test_a_product_takes_as_long_as_the_speed_says(samples: int) -> None:
    (found,) = seconds(kernels(jnp.matmul, X, W), samples)
    assert found == pytest.approx(2 * samples * 512 * 1024 / FLOPS, rel=0.01)


def test_forms_have_speeds_of_their_own() -> None:
    def transposed(x: Any, w: Any) -> Any:
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    turned = jax.ShapeDtypeStruct((1024, 512), "float32")
    (plain,) = seconds(kernels(jnp.matmul, X, W), 4096)
    (slower,) = seconds(kernels(transposed, X, turned), 4096)
    assert slower == pytest.approx(2 * plain, rel=0.01)


def test_a_convolution_has_a_speed_of_its_own() -> None:
    image = jax.ShapeDtypeStruct((SAMPLES, 16, 16, 64), "float32")
    weight = jax.ShapeDtypeStruct((3, 3, 64, 64), "float32")

    def convolve(x: Any, w: Any) -> Any:
        with jax.named_scope("jvp(conv)"):
            dims = ("NHWC", "HWIO", "NHWC")
            return lax.conv_general_dilated(
                x, w, (1, 1), "VALID", dimension_numbers=dims
            )

    *_, found = seconds(kernels(convolve, image, weight), 32)
    flops = 2 * 32 * 14 * 14 * 9 * 64 * 64
    assert found == pytest.approx(flops / (FLOPS / 4), rel=0.05)


def test_a_small_product_waits_for_memory() -> None:
    (found,) = seconds(kernels(jnp.matmul, X, W), 1)
    moved = 4 * (512 + 512 * 1024 + 1024)
    assert found == pytest.approx(moved / BANDWIDTH, rel=1e-6)


def test_elementwise_kernels_take_as_long_as_their_bytes() -> None:
    found = kernels(lambda x, y: jnp.sin(x) * y + x, X, X)
    (taken,) = seconds(found, 64)
    assert taken == pytest.approx(3 * 64 * 512 * 4 / BANDWIDTH, rel=1e-6)
    assert seconds(found, 128)[0] == pytest.approx(2 * taken)


def test_what_takes_many_cycles_is_counted_if_memory_is_faster() -> None:
    found = kernels(lambda x: jnp.exp(x) * x, X)
    numbers = 64 * 512
    slow = replace(SPEED, per_dear={"exp": 1e-6}, per_number=1e-8)
    (taken,) = seconds(found, 64, slow)
    assert taken == pytest.approx(numbers * 1e-6 + 2 * numbers * 1e-8)
    fast = replace(SPEED, per_dear={"exp": 1e-15}, per_number=1e-15)
    assert seconds(found, 64, fast)[0] == pytest.approx(2 * numbers * 4 / BANDWIDTH)


def test_numbers_that_are_summed_up_take_as_long_as_their_type_says() -> None:
    found = kernels(lambda x: x.sum(axis=0), X)
    slow = replace(SPEED, per_summed={"float32": 1e-6, "bfloat16": 1.0})
    assert seconds(found, 64, slow)[0] == pytest.approx(64 * 512 * 1e-6)
    fast = replace(SPEED, per_summed={"float32": 1e-15})
    assert seconds(found, 64, fast)[0] == pytest.approx(seconds(found, 64)[0])


def test_on_gpus_products_wait_for_memory_on_top_of_what_they_compute() -> None:
    points = tuple(p._replace(bytes=1.0) for p in SPEED.products if p.rows >= 64)
    gpu = replace(SPEED, products=points, units=1)
    (found,) = seconds(kernels(jnp.matmul, X, W), 4096, gpu)
    flops = 2 * 4096 * 512 * 1024 / FLOPS
    moved = 4 * (4096 * 512 + 512 * 1024 + 4096 * 1024)
    assert found == pytest.approx(flops + moved / BANDWIDTH, rel=0.1)


def test_a_kernel_costs_at_least_its_start() -> None:
    found = kernels(lambda x, w: jnp.tanh(x @ w), X, W)
    late = replace(SPEED, kernel=1.0)
    assert list(seconds(found, 64, late)) == [1.0, 1.0]
    early = replace(SPEED, kernel=1e-15)
    assert list(seconds(found, 64, early)) == list(seconds(found, 64))


def test_without_overlap_each_start_comes_on_top() -> None:
    found = kernels(lambda x, w: jnp.tanh(x @ w), X, W)
    alone = seconds(found, 64)
    waiting = replace(SPEED, kernel=1e-3, overlaps=False)
    np.testing.assert_allclose(seconds(found, 64, waiting), alone + 1e-3)


def test_a_loop_costs_all_of_its_turns() -> None:
    square = jax.ShapeDtypeStruct((512, 512), "float32")

    def turn(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def run(x: Any, w: Any) -> Any:
        return lax.scan(lambda c, _: (turn(c, w), None), x, None, length=7)[0]

    found = kernels(run, X, square)
    (loop,) = [i for i, kernel in enumerate(found.kernels) if kernel.kind == "loop"]
    speed = replace(SPEED, kernel=1e-6, turn=1e-3)
    once = float(seconds(kernels(turn, X, square), 64, speed).sum())
    assert seconds(found, 64, speed)[loop] == pytest.approx(7 * (once + 1e-3))


def test_a_loop_costs_what_it_takes_from_stacks_and_puts_on_others() -> None:
    def run(xs: Any) -> Any:
        return lax.scan(lambda c, x: (c, x * 2.0), 0.0, xs)[1]

    stack = jax.ShapeDtypeStruct((7, SAMPLES, 512), "float32")
    found = kernels(run, stack)
    (loop,) = [i for i, kernel in enumerate(found.kernels) if kernel.kind == "loop"]
    one = 64 * 512 * 4
    # Each turn computes, reads and writes; the new stack is made and copied before.
    moved = 7 * one * (2 + 2 + 2) + 3 * 7 * one
    assert seconds(found, 64)[loop] == pytest.approx(moved / BANDWIDTH)


def test_where_devices_share_cores_small_kernels_fill_the_gaps() -> None:
    points = [
        CrowdPoint("product", 4, 1e-6, 0.25),
        CrowdPoint("product", 4, 1e-3, 1.0),
        CrowdPoint("other", 2, 1e-3, 0.5),
    ]
    crowd = replace(SPEED, crowding=points)

    def forward(x: Any, w: Any) -> Any:
        with jax.named_scope("jvp(dense)"):
            return jnp.tanh(x @ w)

    costs = KernelCosts(kernels(forward, X, W), crowd)
    small = costs.crowd_ratios(np.array([1e-7, 1e-7]), 4)
    np.testing.assert_allclose(small, [0.5, 1.0])
    large = costs.crowd_ratios(np.array([1.0, 1.0]), 4)
    np.testing.assert_allclose(large, [1.0, 1.0])
    between = costs.crowd_ratios(np.array([3e-5, 1.0]), 4)
    assert 0.5 < between[0] < 1.0
    # Nobody waits for anybody in updates.
    update = KernelCosts(kernels(lambda x, w: jnp.tanh(x @ w), X, W), crowd)
    np.testing.assert_allclose(update.crowd_ratios(np.full(2, 1e-7), 4), [0.25, 1.0])


def on_cpu(function: Callable[..., Any], *args: Any) -> Kernels:
    program = jax.make_jaxpr(function)(*args)
    return make_kernels(flatten(program.jaxpr, "cpu"), "cpu")


CACHED = replace(
    SPEED,
    streams=(
        StreamPoint(1.0, 1.0 / BANDWIDTH),
        StreamPoint(2.0**20, 2.0**20 / BANDWIDTH),
        StreamPoint(2.0**21, 2.0**21 / (BANDWIDTH / 10)),
        StreamPoint(1e12, 1e12 / (BANDWIDTH / 10)),
    ),
)
"""A CPU whose cache holds one MiB; other memory is ten times slower."""


def test_what_was_touched_a_moment_ago_comes_from_a_cache() -> None:
    found = on_cpu(lambda x: jnp.sin(x) * 2.0, X)
    few, many = seconds(found, 16, CACHED), seconds(found, 4096, CACHED)
    moved = 2 * 512 * 4
    assert few.sum() == pytest.approx(16 * moved / BANDWIDTH, rel=1e-6)
    assert many.sum() == pytest.approx(4096 * moved / (BANDWIDTH / 10), rel=1e-6)


def test_devices_that_share_caches_have_less_of_them() -> None:
    found = on_cpu(lambda x: jnp.sin(x) * 2.0, X)
    alone, crowded = (seconds(found, 64, CACHED, crowd=n).sum() for n in (1, 64))
    assert crowded == pytest.approx(10 * alone)


def test_numbers_that_change_places_take_longer() -> None:
    found = on_cpu(lambda x: jnp.transpose(x) * 2.0, X)
    slow = replace(SPEED, per_transposed=1e-6)
    assert seconds(found, 64, slow).sum() == pytest.approx(64 * 512 * 1e-6)


def test_kernels_take_longer_in_steps_by_their_kind() -> None:
    found = on_cpu(lambda x, w: jnp.tanh(x @ w).T, X, W)
    plain = seconds(found, 64)
    factors = {"product": 1.5, "transpose": 3.0}
    longer = seconds(found, 64, replace(SPEED, in_context=factors)) / plain
    kinds = [kind_in_context(kernel) for kernel in found.kernels]
    assert {"product", "transpose"} <= {*kinds}
    assert longer.tolist() == pytest.approx([factors.get(kind, 1.0) for kind in kinds])


def test_sums_for_divided_weights_are_divided_in_loops() -> None:
    def turn(total: Any, x: Any) -> Any:
        return total * 1.5, x

    def run(xs: Any) -> Any:
        return lax.scan(turn, jnp.zeros((512, 512)), xs)[0]

    found = on_cpu(run, jax.ShapeDtypeStruct((7, SAMPLES, 512), "float32"))
    (loop,) = [i for i, kernel in enumerate(found.kernels) if kernel.kind == "loop"]
    slow = replace(SPEED, per_number=1e-7)
    whole, parts = (seconds(found, 1, slow, shards=n)[loop] for n in (1, 4))
    assert whole - parts == pytest.approx(7 * 512 * 512 * 0.75e-7, rel=0.01)


def test_of_a_table_only_the_rows_are_read() -> None:
    rows = jax.ShapeDtypeStruct((SAMPLES,), "int32")

    def look_up(table: Any, rows: Any) -> Any:
        return table.at[rows].get(mode="promise_in_bounds")

    taken = []
    for size in (1000, 1_000_000):
        table = jax.ShapeDtypeStruct((size, 512), "float32")
        found = kernels(look_up, table, rows)
        assert found.kernels[-1].operation == "gather"
        taken.append(seconds(found, 64)[-1])
    indices = 64 * 4
    moved = 2 * 64 * 512 * 4 + indices
    assert taken[0] == taken[1] == pytest.approx(moved / BANDWIDTH)


def test_rows_of_a_table_that_something_is_done_to_at_once_are_read_alone() -> None:
    rows = jax.ShapeDtypeStruct((SAMPLES,), "int32")

    def look_up(table: Any, rows: Any, x: Any) -> Any:
        return table.at[rows].get(mode="promise_in_bounds") + x

    taken = []
    for size in (1000, 1_000_000):
        table = jax.ShapeDtypeStruct((size, 512), "float32")
        found = kernels(look_up, table, rows, X)
        taken.append(seconds(found, 64).sum())
    assert taken[0] == taken[1]


def test_random_numbers_cost_what_they_cost() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))

    def draw(key: Any, x: Any) -> Any:
        return x * jax.random.bits(key, x.shape)

    found = kernels(draw, key, X)
    slow = replace(SPEED, per_random=1e-3)
    more = seconds(found, 64, slow).sum() - seconds(found, 64).sum()
    assert more == pytest.approx(64 * 512 * 1e-3, rel=0.01)


def test_a_table_is_changed_at_its_rows_only() -> None:
    rows = jax.ShapeDtypeStruct((SAMPLES,), "int32")

    def add(table: Any, rows: Any, x: Any) -> Any:
        return table.at[rows].add(x, mode="promise_in_bounds")

    taken = []
    for size in (1000, 1_000_000):
        table = jax.ShapeDtypeStruct((size, 512), "float32")
        found = kernels(add, table, rows, X)
        assert found.kernels[-1].operation.startswith("scatter")
        taken.append(seconds(found, 64)[-1])
    assert taken[0] == taken[1] == pytest.approx(2 * 64 * 512 * 4 / BANDWIDTH)


def test_divided_kernels_take_their_part_of_the_time() -> None:
    found = kernels(lambda x, w: jnp.tanh(x @ w), X, W)
    whole = seconds(found, 4096)
    both = seconds(found, 4096, divided=np.array([True, True]), degree=4)
    np.testing.assert_allclose(both, whole / 4, rtol=0.01)
    none = seconds(found, 4096, divided=np.array([False, False]), degree=4)
    np.testing.assert_allclose(none, whole)
    one = seconds(found, 4096, divided=np.array([False, True]), degree=4)
    np.testing.assert_allclose(one, [whole[0], whole[1] / 4])


def test_of_a_divided_product_the_larger_side_is_split() -> None:
    """Rows are slow below 1000, columns are not."""

    def rate(rows: int) -> float:
        return FLOPS / (1 + 1000 / rows)

    points = [
        ProductPoint("product", "float32", "nn", 1, r, i, c, 2 * r * i * c / rate(r))
        for r in (16, 128, 1024, 8192)
        for i in SIZES
        for c in SIZES
    ]
    speed = replace(SPEED, products=tuple(points))
    found = kernels(jnp.matmul, X, jax.ShapeDtypeStruct((512, 4096), "float32"))
    how = {"divided": np.array([True]), "degree": 4}
    by_columns = seconds(found, 1024, speed)[0] / seconds(found, 1024, speed, **how)[0]
    assert by_columns == pytest.approx(4, rel=0.05)
    by_rows = seconds(found, 8192, speed)[0] / seconds(found, 8192, speed, **how)[0]
    assert by_rows < 3.7


def test_tensors_that_grow_with_the_square_of_the_batch_are_counted_so() -> None:
    found = kernels(lambda x: jnp.sin(x @ x.T), X)
    *_, sine = seconds(found, 4096)
    assert sine == pytest.approx(2 * 4096**2 * 4 / BANDWIDTH, rel=1e-6)


def test_a_step_has_one_entry_for_each_kernel() -> None:
    layers = [keras.layers.Dense(512) for _ in range(3)]
    model = keras.Sequential([keras.Input((512,)), *layers])
    model.compile("sgd", "mse")
    found = kernels_of(trace_training(model), "gpu")
    taken = seconds(found, 4096)
    assert taken.shape == (len(found.kernels),)
    assert (taken >= 0).all()
    flops = sum(p.flops(4096) for kernel in found.kernels for p in kernel.products)
    assert flops / FLOPS < taken.sum() < 3 * flops / FLOPS


def test_a_program_of_nothing_costs_nothing() -> None:
    assert seconds(kernels(lambda x: x, X), 64).shape == (0,)
