"""Programs that differ in constants only, and how one stands for all."""

from collections.abc import Callable
from typing import Any

from meshwright.errors import PackedTrialsError
from meshwright.trials.packed_constants import (
    differing,
    first_difference,
    read_program,
    run_program,
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Make = Callable[[float], Callable[[Any], Any]]


def plain(constant: float) -> Callable[[Any], Any]:
    return lambda x: x * constant + jnp.array([constant, 2.0])


def called(constant: float) -> Callable[[Any], Any]:
    return lambda x: jax.nn.relu(jnp.where(x > constant, x, constant))


def looped(constant: float) -> Callable[[Any], Any]:
    def body(carry: Any, each: Any) -> Any:
        return carry * constant + each, carry - constant

    return lambda x: jax.lax.scan(body, x[0], x)[1]


def waiting(constant: float) -> Callable[[Any], Any]:
    return lambda x: jax.lax.while_loop(
        lambda carry: carry.sum() < 10.0 * constant, lambda carry: carry + constant, x
    )


def choosing(constant: float) -> Callable[[Any], Any]:
    return lambda x: jax.lax.cond(
        x.sum() > 0, lambda x: x * constant, lambda x: x - constant, x
    )


def checkpointed(constant: float) -> Callable[[Any], Any]:
    return jax.grad(jax.checkpoint(lambda x: jnp.sin(x * constant).sum()))


def with_own_gradient(constant: float) -> Callable[[Any], Any]:
    double = jax.custom_vjp(lambda x: x * constant)
    double.defvjp(lambda x: (x * constant, None), lambda _, g: (g * constant,))
    return lambda x: double(x)


MAKE = [plain, called, looped, waiting, choosing, checkpointed, with_own_gradient]


@pytest.mark.parametrize("make", MAKE)
def test_one_program_does_what_each_does_wherever_the_constant_is(make: Make) -> None:
    values, x = [0.5, 2.0, 3.0], jnp.array([1.0, 2.0])
    programs = [jax.make_jaxpr(make(value))(x) for value in values]
    readings = [read_program(program) for program in programs]
    assert all(first_difference(readings[0], other) is None for other in readings)
    found = differing([reading.constants for reading in readings])
    assert found, "there is a constant that differs"

    def run(inputs: Any) -> Any:
        return run_program(programs[0], [x], inputs)[0]

    outputs = jax.vmap(run)({key: jnp.stack(each) for key, each in found.items()})
    wanted = [make(value)(x) for value in values]
    np.testing.assert_allclose(outputs, wanted, rtol=1e-6)


def test_what_is_the_same_stays_a_constant() -> None:
    x = jnp.ones(2)
    constants = [
        read_program(jax.make_jaxpr(plain(3.0))(x)).constants for _ in range(2)
    ]
    assert differing(constants) == {}


def test_nan_is_the_same_as_nan() -> None:
    x = jnp.ones(2)
    constants = [
        read_program(jax.make_jaxpr(plain(np.nan))(x)).constants for _ in range(2)
    ]
    assert differing(constants) == {}


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x - 2.0,
        lambda x: x.astype("float16") * 2,
        lambda x: (x * 2.0) * 2.0,
        lambda x: 2.0 * x * x,
        lambda x: x[:1] * 2.0,
    ],
    ids=["operation", "type", "longer", "wiring", "shape"],
)
def test_other_programs_are_told_apart(other: Callable[[Any], Any]) -> None:
    x = jnp.ones(2)
    one = read_program(jax.make_jaxpr(lambda x: x * 2.0)(x))
    assert first_difference(one, read_program(jax.make_jaxpr(other)(x))) is not None


def test_a_constant_inside_of_another_operation_is_refused() -> None:
    def make(constant: float) -> Callable[[Any], Any]:
        return lambda x: jax.lax.custom_linear_solve(
            lambda v: v * constant, x, lambda _, b: b / constant, symmetric=True
        )

    x = jnp.ones(2)
    programs = [jax.make_jaxpr(make(value))(x) for value in (2.0, 3.0)]
    constants = [read_program(program).constants for program in programs]
    number, values = next(iter(differing(constants).items()))
    with pytest.raises(PackedTrialsError) as raised:
        run_program(programs[0], [x], {number: values[1]})
    assert "inside of the operation custom_linear_solve" in raised.value.received
    assert "inside of scan, while, cond" in raised.value.rule
    assert "a variable of the model" in raised.value.change
