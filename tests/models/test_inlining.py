"""Programs without programs in them make the same values."""

from typing import Any

from meshwright.models.inlining import inlined
from meshwright.models.work import all_operations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

X = np.linspace(-1, 1, 6, dtype=np.float32)


def names(program: ClosedJaxpr) -> list[str]:
    return [operation.primitive.name for operation in program.jaxpr.eqns]


def assert_same(function: Any, *args: Any) -> ClosedJaxpr:
    """The inlined program of a function, which makes what the function makes."""
    program = inlined(jax.make_jaxpr(function)(*args))
    expected = jax.tree.leaves(function(*args))
    found = jaxpr_as_fun(program)(*jax.tree.leaves(args))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    return program


def test_what_is_called_stands_in_the_program_itself() -> None:
    inner = jax.jit(lambda x: jnp.sin(x) + 1.0)
    outer = jax.jit(lambda x: inner(inner(x)) * 2.0)
    program = assert_same(lambda x: outer(x) - x, X)
    assert names(program) == ["sin", "add", "sin", "add", "mul", "sub"]


def pick(which: Any, x: Any) -> Any:
    branches = [jnp.sin, jax.jit(lambda x: jnp.cos(x) * 2.0), jnp.exp]
    return jax.lax.switch(which, branches, x)


@pytest.mark.parametrize("which", [-3, 0, 1, 2, 9])
def test_of_several_branches_the_right_one_is_chosen(which: int) -> None:
    program = assert_same(pick, np.int32(which), X)
    assert {"sin", "cos", "exp"} < set(names(program))
    assert not {"cond", "jit", "pjit"} & set(names(program))


@pytest.mark.parametrize("is_on", [True, False])
def test_of_two_branches_the_right_one_is_chosen(is_on: bool) -> None:
    def either(is_on: Any, x: Any, y: Any) -> Any:
        return jax.lax.cond(is_on, lambda: (x, y + 1), lambda: (jnp.sin(x), y))

    program = assert_same(either, np.bool_(is_on), X, np.int32(3))
    assert "cond" not in names(program)


def test_a_branch_inside_of_a_branch_is_chosen_too() -> None:
    def nested(first: Any, second: Any, x: Any) -> Any:
        def inner() -> Any:
            return jax.lax.cond(second, jnp.sin, jnp.cos, x)

        return jax.lax.cond(first, inner, lambda: x)

    for first in (True, False):
        for second in (True, False):
            program = assert_same(nested, np.bool_(first), np.bool_(second), X)
            assert "cond" not in names(program)


def test_loops_constants_and_inputs_that_come_out_again_pass_through() -> None:
    table = jnp.arange(6.0)

    def odd(x: Any) -> Any:
        looped, _ = jax.lax.scan(lambda c, row: (c * row, None), x, jnp.ones((3, 6)))
        return looped + table, x, 5.0, table

    program = assert_same(odd, X)
    assert "scan" in names(program)


def test_numbers_drawn_from_a_key_are_the_same() -> None:
    def drawn(key: Any, x: Any) -> Any:
        return x + jax.random.normal(key, (6,))

    assert_same(drawn, jax.random.key(4), X)


def optimizer_and_weights() -> tuple[Any, list[Any]]:
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        initial_scale=64.0,
        dynamic_growth_steps=2,
    )
    weights = [keras.Variable(X, name=name) for name in ("a", "b")]
    optimizer.build(weights)
    return optimizer, weights


@pytest.mark.parametrize("second", [1.0, np.inf, np.nan], ids=str)
@pytest.mark.parametrize("is_due", [True, False], ids=["due", "not due"])
def test_a_loss_scale_is_updated_as_by_stock_keras(second: float, is_due: bool) -> None:
    """It has branches: if a gradient is not finite, and if the scale is due to grow."""
    optimizer, weights = optimizer_and_weights()
    gradients = [jnp.ones(6), jnp.ones(6) * second]
    optimizer.step_counter.assign(int(is_due))
    slots = [v.value for v in optimizer.variables]
    values = [w.value for w in weights]
    program = assert_same(optimizer.stateless_apply, slots, gradients, values)
    assert not {"cond", "jit", "pjit"} & set(names(program))


def test_the_branches_of_a_loss_scale_are_there_before() -> None:
    """So that the test above sees some."""
    optimizer, weights = optimizer_and_weights()
    args = [[v.value for v in group] for group in (optimizer.variables, weights)]
    traced = jax.make_jaxpr(optimizer.stateless_apply)(args[0], args[1], args[1])
    kinds = {operation.primitive.name for operation in all_operations(traced.jaxpr)}
    assert "cond" in kinds
