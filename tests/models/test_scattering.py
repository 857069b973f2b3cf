"""Programs whose inputs lie in several places: small values travel to large ones."""

from typing import Any

from meshwright.models.inlining import inlined
from meshwright.models.parts import split_program
from meshwright.models.scattering import Unit, scatter

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from tracing import run_parts

X = np.linspace(-1, 1, 6, dtype=np.float32)
SMALL = np.float32(3)


def test_work_is_done_where_the_largest_input_lies() -> None:
    def both(large: Any, small: Any) -> Any:
        return small * large, jnp.sin(small)

    program = jax.make_jaxpr(both)(X, SMALL)
    units, owners = scatter(program, [0, 1], 2)
    product, sine = owners
    assert [units[n] for n in product] == [Unit(phase=1, place=0)]
    assert [units[n] for n in sine] == [Unit(phase=0, place=1)]


def test_what_has_no_place_is_computed_wherever_it_is_read_and_nowhere_else() -> None:
    def decayed(rate: Any, first: Any, second: Any) -> Any:
        half = rate * 0.5
        return first * half, second * half

    program = jax.make_jaxpr(decayed)(SMALL, X, X)
    units, (shared, *_) = scatter(program, [None, 0, 1], 3)
    assert {units[n] for n in shared} == {Unit(0, 0), Unit(0, 1)}


def test_an_output_that_has_no_place_is_computed_everywhere() -> None:
    program = jax.make_jaxpr(lambda step, x: (step + 1, x * 2.0))(1, X)
    units, (counted, doubled) = scatter(program, [None, 1], 3)
    assert {units[n].place for n in counted} == {0, 1, 2}
    assert {units[n].place for n in doubled} == {1}


def test_units_are_in_an_order_in_which_they_can_run() -> None:
    """There and back, and there again: what arrives comes from earlier units."""

    def talk(first: Any, second: Any) -> Any:
        asked = first.sum()
        answered = (second * asked).sum()
        return (first * answered).sum() * second

    program = jax.make_jaxpr(talk)(X, X + 1)
    units, owners = scatter(program, [0, 1], 2)
    assert units == [Unit(0, 0), Unit(0, 1), Unit(1, 1), Unit(2, 0), Unit(3, 1)]
    parts = split_program(program, owners, len(units))
    made: set[Any] = set()
    for part in parts:
        assert set(part.received) <= made
        made |= set(part.sent)
    assert all(v.aval.size == 1 for v in made)
    (found,) = run_parts(program, parts, [X, X + 1])
    np.testing.assert_allclose(found, talk(X, X + 1), rtol=1e-6)


@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 1, 0]], ids=str)
def test_of_a_norm_of_all_gradients_only_numbers_travel(places: list[int]) -> None:
    """And the update is that of stock Keras."""
    rng = np.random.default_rng(0)
    shapes = [(4, 6), (6,), (6, 3), (3,)]
    weights = [keras.Variable(rng.normal(size=shape)) for shape in shapes]
    gradients = [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]
    optimizer = keras.optimizers.Adam(0.1, global_clipnorm=0.5)
    optimizer.build(weights)
    slots = [v.value for v in optimizer.variables]
    values = [w.value for w in weights]
    traced = jax.make_jaxpr(optimizer.stateless_apply)(slots, gradients, values)
    program = inlined(traced)
    slot_places: list[int | None] = [
        next((p for p, s in zip(places, shapes, strict=True) if s == slot.shape), None)
        for slot in slots
    ]
    given = [*slot_places, *places, *places]
    units, owners = scatter(program, given, 3)
    parts = split_program(program, owners, len(units))
    for unit, part in zip(units, parts, strict=True):
        assert all(v.aval.size <= len(weights) for v in part.received)
        homes = [given[number] for number in part.arguments]
        assert set(homes) <= {unit.place, None}
    has_company = len(set(places)) > 1
    assert any(part.received for part in parts) == has_company
    found = run_parts(program, parts, [*slots, *gradients, *values])
    optimizer.apply(gradients)
    for ours, theirs in zip(found, [*weights, *optimizer.variables], strict=True):
        np.testing.assert_allclose(ours, theirs.value, rtol=1e-5, atol=1e-6)
