"""Which operations are computed together, by the rules of XLA's compilers."""

import re
from collections.abc import Callable
from typing import Any

from meshwright.models.flattening import flatten
from meshwright.models.formulations import Platform
from meshwright.models.fusing import (
    LIBRARY_FROM,
    MOST_COPIES,
    RETURNED,
    Fused,
    Graph,
    fuse,
)
from meshwright.models.operations import FlatProgram
from meshwright.models.training import SAMPLES

import jax
import jax.numpy as jnp
import pytest
from jax import lax

PLATFORMS: list[Platform] = ["cpu", "gpu"]
X = jax.ShapeDtypeStruct((SAMPLES, 8), "float32")
W = jax.ShapeDtypeStruct((8, 16), "float32")
B = jax.ShapeDtypeStruct((16,), "float32")
SQUARE = jax.ShapeDtypeStruct((64, 64), "float32")


def flat(function: Callable[..., Any], platform: Platform, *args: Any) -> FlatProgram:
    return flatten(jax.make_jaxpr(function)(*args).jaxpr, platform)


def fused(
    function: Callable[..., Any],
    platform: Platform,
    *args: Any,
    samples: int = SAMPLES,
) -> list[Fused]:
    return fuse(flat(function, platform, *args), platform, samples)


def groups(
    function: Callable[..., Any],
    platform: Platform,
    *args: Any,
    samples: int = SAMPLES,
) -> list[list[str]]:
    """The names of operations that are computed together, without broadcasts."""
    found = flat(function, platform, *args)
    return [
        sorted(
            found.operations[n].name
            for n in each.members
            if found.operations[n].sort != "broadcast"
        )
        for each in fuse(found, platform, samples)
    ]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_chain_of_elementwise_operations_is_one_kernel(platform: Platform) -> None:
    def run(x: Any) -> Any:
        return jnp.sin(x) * jnp.exp(x) + x

    assert groups(run, platform, X) == [["add", "exp", "mul", "sin"]]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_operations_are_computed_and_none_reads_what_is_not_stored(
    platform: Platform,
) -> None:
    def run(x: Any, w: Any, b: Any) -> Any:
        hidden = jax.nn.softmax(jnp.tanh(x @ w + b))
        return jnp.sum(hidden, axis=0), hidden * jnp.mean(hidden)

    program = flat(run, platform, X, W, B)
    found = fuse(program, platform)
    assert {n for each in found for n in each.members} == set(
        range(len(program.operations))
    )
    stored = {*program.inputs, *program.constants}
    stored |= {v for each in found for v in program.operations[each.root].outputs}
    for each in found:
        assert set(each.reads) <= stored
        assert each.root in each.members
        assert set(each.overwrites) <= set(each.reads)
    assert stored >= set(program.outputs)


def test_a_chain_that_ends_in_a_sum_is_one_kernel_on_gpus() -> None:
    def run(x: Any) -> Any:
        return jnp.sum(jnp.sin(x) * 2.0, axis=1)

    assert groups(run, "gpu", X) == [["mul", "reduce_sum", "sin"]]
    # The library for CPUs has no sine.
    assert groups(run, "cpu", X) == [["sin"], ["mul", "reduce_sum"]]


def test_bias_and_activation_go_with_the_product_on_cpus_and_apart_on_gpus() -> None:
    def run(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    assert groups(run, "cpu", X, W, B) == [["add", "dot_general", "max"]]
    assert groups(run, "gpu", X, W, B) == [["dot_general"], ["add", "max"]]


def test_small_tensors_are_not_given_to_the_library() -> None:
    def run(x: Any, w: Any, b: Any) -> Any:
        return jax.nn.relu(x @ w + b)

    few = LIBRARY_FROM // 16 - 1
    apart = [["dot_general"], ["add", "max"]]
    assert groups(run, "cpu", X, W, B, samples=few) == apart
    assert groups(run, "cpu", X, W, B, samples=few + 1) != apart


def test_what_is_dear_and_read_twice_is_stored_on_cpus_and_repeated_on_gpus() -> None:
    def run(x: Any) -> Any:
        power = jnp.exp(x)
        return jnp.sum(power, axis=0), power.T

    assert groups(run, "cpu", X)[0] == ["exp"]
    repeated = [["exp", "reduce_sum"], ["exp", "transpose"]]
    assert groups(run, "gpu", X) == repeated


def test_what_takes_very_long_is_stored_on_gpus_too() -> None:
    def run(x: Any) -> Any:
        number = lax.erf_inv(x)
        return jnp.sum(number, axis=0), number.T

    assert ["erf_inv"] in groups(run, "gpu", X)


def test_a_softmax_takes_three_passes_on_gpus() -> None:
    found = groups(jax.nn.softmax, "gpu", X)
    assert found == [
        ["reduce_max"],
        ["exp", "reduce_sum", "sub"],
        ["div", "exp", "sub"],
    ]


def test_what_is_returned_is_stored_even_if_others_compute_it_too() -> None:
    def run(x: Any) -> Any:
        double = x * 2.0
        return double, jnp.sin(double)

    for platform in PLATFORMS:
        assert groups(run, platform, X) == [["mul"], ["mul", "sin"]]


def halved(times: int) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for _ in range(times):
            x = x[::2] * x[1::2]
        return x

    return run


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nothing_is_written_out_too_often(platform: Platform) -> None:
    long = jax.ShapeDtypeStruct((2**10,), "float32")
    levels = MOST_COPIES.bit_length() - 1
    assert len(fused(halved(levels), platform, long)) == 1
    assert len(fused(halved(levels + 2), platform, long)) > 1


@pytest.mark.parametrize("platform", PLATFORMS)
def test_wide_concatenations_are_stored_and_narrow_ones_are_not(
    platform: Platform,
) -> None:
    def run(x: Any) -> Any:
        return jnp.sin(jnp.concatenate([jnp.cos(x), x], axis=1))

    wide = jax.ShapeDtypeStruct((SAMPLES, 64), "float32")
    assert groups(run, platform, wide) == [["cos"], ["concatenate"], ["sin"]]
    assert groups(run, platform, X) == [["concatenate", "cos", "sin"]]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_result_may_lie_in_the_place_of_what_is_read_number_by_number(
    platform: Platform,
) -> None:
    (plain,) = fused(lambda x, y: x + jnp.sin(y), platform, X, X)
    assert plain.overwrites == plain.reads
    assert len(plain.overwrites) == 2
    (moved,) = fused(lambda x, y: x + jnp.sin(y).T, platform, SQUARE, SQUARE)
    assert moved.overwrites == [0], "the other one is read in another order"
    (both,) = fused(lambda x: x + jnp.sin(x).T, platform, SQUARE)
    assert both.overwrites == []
    half = jax.ShapeDtypeStruct((64, 64), "bfloat16")
    (wider,) = fused(lambda x: x.astype("float32"), platform, half)
    assert wider.overwrites == [], "it is of another size"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_loops_and_updates_work_in_place(platform: Platform) -> None:
    def loop(x: Any, y: Any) -> Any:
        return lax.scan(lambda c, _: (jnp.sin(c) + y, c), x, None, length=5)

    zeros, scan = fused(loop, platform, X, X)
    assert zeros.reads == []
    program = flat(loop, platform, X, X)
    filled = program.operations[zeros.root].outputs
    x, y = program.inputs
    assert scan.overwrites == [x, *filled]
    assert y in scan.reads

    def update(x: Any, y: Any) -> Any:
        return lax.dynamic_update_slice(x, y, (0, 0))

    (changed,) = fused(update, platform, SQUARE, jnp.ones((2, 64)))
    assert changed.overwrites == [0]

    def count(x: Any) -> Any:
        return lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x)

    (turns,) = fused(count, platform, SQUARE)
    assert turns.overwrites == [0]


def test_joining_two_operations_keeps_who_reads_whom() -> None:
    program = flat(lambda x: jnp.exp(jnp.sin(x)) + jnp.cos(x), "cpu", X)
    graph = Graph(program, samples=4)
    sin, exp, cos, add = range(4)
    assert graph.operation(exp).name == "exp"
    assert graph.size(exp) == 4 * 8
    assert graph.users[add] == {RETURNED: None}
    graph.join(sin, exp, exp)
    assert graph.members[exp] == [sin, exp]
    assert graph.operands[exp] == {}
    assert graph.users[exp] == {add: None}
    assert set(graph.operands) == {exp, cos, add}
    graph.join(exp, add, add)
    assert graph.operands[add] == {cos: None}
    assert graph.users[add] == {RETURNED: None}


def entry_operations(function: Callable[..., Any], *args: Any) -> list[str]:
    """What the program computes that XLA makes for this machine's CPU."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    found = re.findall(r"= \S+ ([\w-]+)\(", text[text.index("ENTRY") :])
    idle = ("parameter", "constant", "tuple", "bitcast", "get-tuple-element")
    return [name for name in found if name not in idle]


OLDER = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11, 1), reason="newer XLA stores one or two more"
)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.sin(x) * jnp.exp(x) + x,
        pytest.param(lambda x: (lambda e: (e, e.T))(jnp.exp(x)), marks=OLDER),
        pytest.param(
            lambda x: jnp.sin(jnp.concatenate([jnp.cos(x), x], axis=1)), marks=OLDER
        ),
        halved(3),
        halved(6),
    ],
)
def test_kernels_are_as_many_as_the_compiler_of_this_cpu_makes(
    function: Callable[[Any], Any],
) -> None:
    x = jnp.ones((2**10, 8))
    assert len(fused(function, "cpu", x)) == len(entry_operations(function, x))


def test_gpus_store_what_is_dearer_to_compute_for_each_of_its_readers() -> None:
    def with_readers(number: int) -> Callable[..., Any]:
        def run(a: Any, b: Any, c: Any) -> Any:
            mixed = a * b + c
            return [(mixed * float(n + 2)).sum(axis=0) for n in range(number)]

        return run

    one = groups(with_readers(1), "gpu", X, X, X)
    assert one == [["add", "mul", "mul", "reduce_sum"]]
    four = groups(with_readers(4), "gpu", X, X, X)
    assert four == [["add", "mul"], *[["mul", "reduce_sum"]] * 4]


def test_gpus_compute_again_what_is_made_of_one_tensor() -> None:
    def run(a: Any) -> Any:
        return [(a * 3.0 * float(n + 2)).sum(axis=0) for n in range(4)]

    assert all("reduce_sum" in group for group in groups(run, "gpu", X))
