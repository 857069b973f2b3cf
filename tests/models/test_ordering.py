"""The order of kernels: nothing before what it reads, and little memory on GPUs."""

from collections.abc import Callable
from typing import Any

from meshwright.models.blocks import keeps_blocks_apart
from meshwright.models.flattening import flatten
from meshwright.models.formulations import Platform
from meshwright.models.kernels import Kernels, make_kernels
from meshwright.models.ordering import (
    _Graph,
    _most_alive,
    breadth_first,
    depth_first,
    greedy,
    in_order,
    late,
)
from meshwright.models.training import SAMPLES, trace_training

import jax
import jax.numpy as jnp
import keras
import pytest
from jax import lax

L = keras.layers
SMALL = 256


def kernels(
    function: Callable[..., Any], *args: Any, platform: Platform = "gpu"
) -> Kernels:
    program = jax.make_jaxpr(function)(*args)
    return make_kernels(flatten(program.jaxpr, platform), platform, SMALL)


def back(hidden: Any, weight: Any) -> Any:
    """A product with a weight that is read transposed, which costs nothing."""
    return lax.dot_general(hidden, weight, (((1,), (1,)), ((), ())))


def branches(x: Any, *weights: Any) -> Any:
    """Wide products, each of which is summed up at once; sums are what is left."""
    return sum(jnp.sum(back(x @ w, w)) for w in weights)


def wide() -> Kernels:
    x = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
    weight = jax.ShapeDtypeStruct((16, 64), "float32")
    return kernels(branches, x, weight, weight, weight, weight)


def trained(platform: Platform) -> Kernels:
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = L.BatchNormalization()(L.Add()([x, L.Conv2D(4, 1)(x)]))
    model = keras.Model(inputs, L.Dense(2)(L.Flatten()(x)))
    model.compile("adam", "mse")
    step = trace_training(model)
    return make_kernels(flatten(step.program.jaxpr, platform), platform)


def is_in_order(found: Kernels, order: list[int]) -> bool:
    known = {b for b in range(len(found.buffers))}
    known -= {b for kernel in found.kernels for b in kernel.makes}
    for number in order:
        if not known.issuperset(found.kernels[number].reads):
            return False
        known.update(found.kernels[number].makes)
    return True


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_kernel_runs_once_and_after_what_it_reads(platform: Platform) -> None:
    found = trained(platform)
    numbers = list(range(len(found.kernels)))
    assert is_in_order(found, numbers)
    assert not is_in_order(found, numbers[::-1])
    graph = _Graph(found)
    orders = {
        "in_order": in_order(found, platform, SMALL),
        "breadth_first": breadth_first(found),
        "depth_first": depth_first(graph, SMALL),
        "greedy": greedy(graph, SMALL),
        "postorder": graph.postorder(),
    }
    for name, order in orders.items():
        assert sorted(order) == numbers, name
        assert is_in_order(found, order), name


def test_on_gpus_the_order_that_needs_least_memory_is_taken() -> None:
    found = trained("gpu")
    graph = _Graph(found)
    candidates = [graph.postorder(), depth_first(graph, SMALL), greedy(graph, SMALL)]
    needs = [_most_alive(graph, order, SMALL) for order in candidates]
    assert min(needs) < max(needs)
    taken = in_order(found, "gpu", SMALL)
    assert _most_alive(graph, taken, SMALL) == min(needs)


def test_on_cpus_all_that_is_ready_runs_first() -> None:
    found = wide()
    kinds = [found.kernels[n] for n in breadth_first(found)]
    x_times_weight = [k for k in kinds if k.products][:4]
    assert len({k.products[0].columns for k in x_times_weight}) == 1
    assert x_times_weight == kinds[:4], "no branch is finished before others begin"


def test_branches_one_after_the_other_need_less_memory_than_all_at_once() -> None:
    found = wide()
    graph = _Graph(found)
    hidden = SMALL * 64 * 4
    at_once = _most_alive(graph, breadth_first(found), SMALL)
    in_turn = _most_alive(graph, in_order(found, "gpu", SMALL), SMALL)
    assert at_once >= 4 * hidden
    # All that is summed up at the end, and one of the wide ones at a time.
    assert in_turn == hidden + 4 * SMALL * 16 * 4


def test_what_is_alive_is_counted_from_its_maker_to_its_last_reader() -> None:
    def run(x: Any, w: Any) -> Any:
        first = x @ w
        return (first @ w) @ w + first

    x = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
    found = kernels(run, x, jax.ShapeDtypeStruct((16, 16), "float32"))
    graph = _Graph(found)
    assert len(found.kernels) == 4
    tensor = SMALL * 16 * 4
    # The first product lives to the end, and two others are alive at a time.
    assert _most_alive(graph, [0, 1, 2, 3], SMALL) == 3 * tensor


def test_kernels_know_those_before_and_after_them() -> None:
    def run(x: Any, w: Any) -> Any:
        first = x @ w
        return first @ w, first @ w.T

    square = jax.ShapeDtypeStruct((16, 16), "float32")
    found = kernels(run, jax.ShapeDtypeStruct((SAMPLES, 16), "float32"), square)
    graph = _Graph(found)
    first = next(
        n for n, k in enumerate(found.kernels) if k.products and not graph.before(n)
    )
    assert len(graph.after(first)) == 2
    assert all(graph.before(n)[0] == first for n in graph.after(first))


def test_places_decide_which_of_several_comes_first() -> None:
    graph = _Graph(wide())
    forwards = graph.postorder()
    backwards = graph.postorder(lambda number: -forwards.index(number))
    assert sorted(forwards) == sorted(backwards)
    assert forwards != backwards


def test_greedy_runs_first_what_frees_the_most() -> None:
    def run(x: Any, w: Any, v: Any) -> Any:
        large, small = x @ w, x @ v
        return jnp.sum(back(large, w)) + jnp.sum(back(small, v))

    x = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
    w, v = (jax.ShapeDtypeStruct((16, n), "float32") for n in (512, 2))
    found = kernels(run, x, w, v)
    order = [found.kernels[n] for n in greedy(_Graph(found), SMALL)]
    widths = [k.products[0].columns.number if k.products else 0 for k in order]
    assert widths[0] == 2, "it takes the least"
    large = widths.index(512)
    assert set(order[large + 1].reads) & set(order[large].makes), "it frees most"


def checkpointed(x: Any, w: Any) -> Any:
    block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))
    for _ in range(3):
        x = block(x)
    return jnp.sum(x)


def test_what_is_computed_again_waits_for_the_gradients_of_its_results() -> None:
    x = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
    square = jax.ShapeDtypeStruct((16, 16), "float32")
    found = kernels(jax.grad(checkpointed, 1), x, square)
    made = {b: i for i, kernel in enumerate(found.kernels) for b in kernel.makes}
    waiting = [(i, k.waits_for) for i, k in enumerate(found.kernels) if k.waits_for]
    assert waiting
    assert all(made[b] < i for i, awaited in waiting for b in awaited)
    on_cpu = kernels(jax.grad(checkpointed, 1), x, square, platform="cpu")
    waits = any(kernel.waits_for for kernel in on_cpu.kernels)
    assert waits == keeps_blocks_apart("cpu")


def test_what_nobody_waits_for_can_run_late() -> None:
    x = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
    square = jax.ShapeDtypeStruct((16, 16), "float32")

    def chain(x: Any, weights: Any) -> Any:
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    found = kernels(jax.grad(chain, 1), x, [square] * 4)
    graph = _Graph(found)
    early = list(range(len(found.kernels)))
    order = late(graph, early)
    assert sorted(order) == early
    assert all(
        order.index(before) < order.index(number)
        for number in early
        for before in graph.before(number)
    )
    fixed = [
        n for n in early if found.buffers[found.kernels[n].makes[0]].shape[0] == 16
    ]
    gradients = [n for n in fixed if found.kernels[n].kind == "product"]
    assert len(gradients) == 4
    assert sum(map(order.index, gradients)) > sum(gradients)
