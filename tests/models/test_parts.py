"""Programs in parts: what passes between them, and that they add up to the whole."""

from typing import Any

from meshwright.models.parts import (
    as_function,
    bytes_of,
    in_halves,
    is_inexact,
    split_program,
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tracing import run_parts

X = np.linspace(-1, 1, 6, dtype=np.float32)


def owned(*numbers: int | set[int]) -> list[frozenset[int]]:
    return [frozenset({n} if isinstance(n, int) else n) for n in numbers]


def chain(x: Any, y: Any) -> Any:
    first = jnp.sin(x)
    second = jnp.cos(first)
    return first * y, second + first


def test_a_part_gets_what_it_reads_and_no_more() -> None:
    program = jax.make_jaxpr(chain)(X, X)
    sine, cosine, product, total = program.jaxpr.eqns
    first, second = split_program(program, owned(0, 1, 1, 0), 2)
    assert (first.operations, second.operations) == ((sine, total), (cosine, product))
    assert (first.arguments, second.arguments) == ((0,), (1,))
    assert (first.sent, second.received) == (tuple(sine.outvars),) * 2
    assert (second.sent, first.received) == (tuple(cosine.outvars),) * 2
    assert (first.results, second.results) == ((1,), (0,))


def test_a_value_is_sent_once_however_many_parts_read_it() -> None:
    program = jax.make_jaxpr(chain)(X, X)
    parts = split_program(program, owned(0, 1, 2, 2), 3)
    made = [tuple(op.outvars) for op in program.jaxpr.eqns]
    assert [part.sent for part in parts] == [made[0], made[1], ()]
    assert [part.received for part in parts] == [(), made[0], (*made[0], *made[1])]


def test_what_several_parts_compute_does_not_travel() -> None:
    program = jax.make_jaxpr(chain)(X, X)
    first, second = split_program(program, owned({0, 1}, 0, 1, 1), 2)
    assert first.sent == second.received == tuple(program.jaxpr.eqns[1].outvars)
    assert first.arguments == (0,)
    assert second.arguments == (0, 1)


def test_a_part_without_work_passes_nothing() -> None:
    program = jax.make_jaxpr(chain)(X, X)
    _, idle = split_program(program, owned(0, 0, 0, 0), 2)
    assert not any(vars(idle).values())


def tower(weights: list[Any], x: Any) -> Any:
    skipped = x
    for weight in weights:
        x = jnp.tanh(x @ weight) + skipped * jnp.arange(4.0)
    return x, x.sum(), (x > 0) & (skipped > 0)


@pytest.mark.parametrize("seed", range(4))
def test_parts_one_after_the_other_make_what_the_whole_makes(seed: int) -> None:
    """Cut anywhere, with skip connections over several parts."""
    with jax.enable_x64(True):
        compare_parts_with_the_whole(seed)


def compare_parts_with_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(4, 4)) for _ in range(5)]
    x = rng.normal(size=(3, 4))
    program = jax.make_jaxpr(tower)(weights, x)
    number = len(program.jaxpr.eqns)
    cuts = np.sort(rng.choice(np.arange(1, number), 3, replace=False))
    pieces = np.searchsorted(cuts, np.arange(number), side="right")
    parts = split_program(program, owned(*map(int, pieces)), 4)
    assert all(part.received for part in parts[1:])
    expected = jax.tree.leaves(tower(weights, x))
    found = run_parts(program, parts, [*weights, x])
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_constants_are_those_of_the_part_and_stay_on_the_host() -> None:
    """A constant on a device would pull the part there."""
    table = jax.device_put(jnp.arange(6.0), jax.devices()[0])

    def odd(x: Any) -> Any:
        return jnp.sin(x) + table, jnp.cos(x) * (table - 1.0)

    program = jax.make_jaxpr(odd)(X)
    is_early = [op.primitive.name in ("sin", "add") for op in program.jaxpr.eqns]
    parts = split_program(program, owned(*(not e for e in is_early)), 2)
    away = jax.devices()[3]
    for part, expected in zip(parts, odd(X), strict=True):
        outputs = [program.jaxpr.outvars[n] for n in part.results]
        function = as_function(program, part, program.jaxpr.invars, outputs)
        (found,) = function(jax.device_put(X, away))
        assert found.devices() == {away}
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_part_can_be_differentiated() -> None:
    program = jax.make_jaxpr(chain)(X, X)
    (part,) = split_program(program, owned(0, 0, 0, 0), 1)
    jaxpr = program.jaxpr
    function = as_function(program, part, jaxpr.invars, jaxpr.outvars)

    def loss(function: Any, x: Any) -> Any:
        return sum(each.sum() for each in function(x, X))

    found, expected = (
        jax.grad(lambda x, f=f: loss(f, x))(X) for f in (function, chain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def three(x: Any, y: Any) -> Any:
    shared = jnp.sin(x)
    return shared * y, shared, jnp.cos(y) + shared


@pytest.mark.parametrize("early", [[0], [1], [2], [0, 2], [2, 0], [], [0, 1, 2]])
def test_halves_make_what_the_whole_makes(early: list[int]) -> None:
    program = jax.make_jaxpr(three)(X, X + 1)
    begin, end = in_halves(program, early)
    expected = three(X, X + 1)
    first, between = begin(X, X + 1)
    for ours, number in zip(first, early, strict=True):
        np.testing.assert_allclose(ours, expected[number], rtol=1e-6)
    late = [number for number in range(3) if number not in early]
    for ours, number in zip(end([X, X + 1], between), late, strict=True):
        np.testing.assert_allclose(ours, expected[number], rtol=1e-6)


def test_the_first_half_does_only_what_its_outputs_need() -> None:
    program = jax.make_jaxpr(three)(X, X)
    begin, end = in_halves(program, [1])
    first = jax.make_jaxpr(begin)(X, X)
    assert [op.primitive.name for op in first.jaxpr.eqns] == ["sin"]
    assert len(first.jaxpr.outvars) == 2
    _, between = begin(X, X)
    second = jax.make_jaxpr(end)([X, X], between)
    assert [op.primitive.name for op in second.jaxpr.eqns] == ["mul", "cos", "add"]


def test_halves_pass_inputs_and_constants_through() -> None:
    table = np.arange(3.0, dtype=np.float32)

    def odd(x: Any) -> Any:
        return jnp.sin(x), x, table, 5.0, table + x.sum()

    program = jax.make_jaxpr(odd)(X)
    for early in ([0], [0, 1, 2, 3], [4]):
        begin, end = in_halves(program, early)
        first, between = begin(X)
        late = [number for number in range(5) if number not in early]
        found = [*first, *end([X], between)]
        for ours, number in zip(found, [*early, *late], strict=True):
            np.testing.assert_allclose(ours, odd(X)[number], rtol=1e-6)


def test_sizes_are_bytes_and_keys_count_nothing() -> None:
    def odd(x: Any, key: Any) -> Any:
        return x + jax.random.normal(key, (6,)), x > 2.0

    program = jax.make_jaxpr(odd)(X, jax.random.key(1))
    x, key = program.jaxpr.invars
    made, is_large = program.jaxpr.outvars
    compared = program.jaxpr.eqns[-1].invars[1]
    assert [bytes_of(v) for v in (x, key, made, is_large)] == [24, 0, 24, 6]
    assert bytes_of(compared) == 0
    assert [is_inexact(v) for v in (x, made, is_large)] == [True, True, False]
