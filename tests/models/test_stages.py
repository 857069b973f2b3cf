"""Which piece of a pipeline computes what, and where weights and states live."""

from itertools import combinations
from typing import Any

from meshwright.models.parts import bytes_of, split_program
from meshwright.models.stages import (
    Assignment,
    Input,
    Role,
    StagedProgram,
    assign_by_cuts,
    assign_by_homes,
    layers_of_pieces,
)
from meshwright.models.work import cost_of
from meshwright.train.mesh_step import training_state

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import Var

from tracing import run_parts, staged_function, traced_training

L = keras.layers
WIDE = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
STATE = np.float32(2)


def names(staged: StagedProgram) -> list[str]:
    return [operation.primitive.name for operation in staged.program.jaxpr.eqns]


def by_name(staged: StagedProgram, found: Assignment) -> dict[str, set[int]]:
    pairs = zip(names(staged), found.owners, strict=True)
    return {name: set(owner) for name, owner in pairs}


def two_layers(first: Any, second: Any, x: Any) -> Any:
    hidden = jnp.sin(x @ first.T)
    return jnp.cos(hidden @ second.T).sum()


def staged_layers() -> StagedProgram:
    return staged_function(two_layers, ["weight", "weight", "data"], [WIDE, WIDE, X])


def test_what_depends_on_weights_alone_is_not_bound_to_a_place() -> None:
    staged = staged_layers()
    free = {n: staged.is_free(i) for i, n in enumerate(names(staged))}
    assert free == {
        **{"transpose": True, "dot_general": False, "sin": False},
        **{"cos": False, "reduce_sum": False},
    }


def test_what_depends_on_weights_alone_is_computed_wherever_it_is_read() -> None:
    def shared(weight: Any, x: Any) -> Any:
        turned = weight.T
        return jnp.sin(x @ turned).sum() + jnp.cos(jnp.tanh(x) @ turned).sum()

    staged = staged_function(shared, ["weight", "data"], [WIDE, X])
    found = assign_by_cuts(staged, [names(staged).index("tanh")], 2)
    assert found.owners[names(staged).index("transpose")] == {0, 1}
    first, second = split_program(staged.program, found.owners, 2)
    assert [v.aval.shape for v in second.received] == [()]
    assert first.arguments == second.arguments == (0, 1)


def test_what_depends_on_weights_alone_is_not_computed_where_nobody_reads_it() -> None:
    staged = staged_layers()
    at = [i for i, name in enumerate(names(staged)) if name == "dot_general"]
    found = assign_by_cuts(staged, [at[1]], 2)
    turned = [i for i, name in enumerate(names(staged)) if name == "transpose"]
    assert [found.owners[i] for i in turned] == [{0}, {1}]
    assert dict(found.homes) == {Input("weight", 0): 0, Input("weight", 1): 1}


def test_a_penalty_is_computed_where_its_weight_lives_and_one_number_travels() -> None:
    def penalised(first: Any, second: Any, x: Any) -> Any:
        loss = two_layers(first, second, x)
        return loss + 0.1 * jnp.square(first).sum() + 0.1 * jnp.abs(second).max()

    staged = staged_function(penalised, ["weight", "weight", "data"], [WIDE, WIDE, X])
    cut = [i for i, name in enumerate(names(staged)) if name == "dot_general"][1]
    for found in (
        assign_by_cuts(staged, [cut], 2),
        assign_by_homes(staged, {Input("weight", 0): 0, Input("weight", 1): 1}, 2),
    ):
        owners = by_name(staged, found)
        assert owners["square"] == {0}
        assert owners["abs"] == owners["reduce_max"] == {1}
        first, second = split_program(staged.program, found.owners, 2)
        assert second.arguments == (1,)
        assert sorted(v.aval.shape for v in second.received) == [(), (3, 4)]
        assert (first.received, second.sent) == ((), ())


def test_penalties_of_keras_layers_travel_as_numbers() -> None:
    model = keras.Sequential(
        [
            *(keras.Input((4,)), L.Dense(32, kernel_regularizer="l2")),
            *(L.Dense(8, name="middle"), L.Dense(4, kernel_regularizer="l1")),
        ]
    )
    model.compile(optimizer="sgd", loss="mse")
    staged = traced_training(model, X, X).staged
    at = [each[:1] for each in staged.layers].index(("middle",))
    found = assign_by_cuts(staged, [at], 2)
    _, second = split_program(staged.program, found.owners, 2)
    assert [found.homes[Input("weight", i)] for i in range(6)] == [0, 0, 1, 1, 1, 1]
    assert not {0, 1} & set(second.arguments)
    assert sorted(v.aval.shape for v in second.received) == [(), (3, 32)]


def test_a_weight_that_is_read_twice_has_one_home_where_it_is_read_first() -> None:
    def tied(weight: Any, x: Any) -> Any:
        hidden = jnp.sin(x @ weight)
        return jnp.cos(hidden @ weight.T).sum()

    staged = staged_function(tied, ["weight", "data"], [WIDE, X])
    for found in (
        assign_by_cuts(staged, [names(staged).index("cos") - 1], 2),
        assign_by_homes(staged, {Input("weight", 0): 0}, 2),
    ):
        assert found.homes == {Input("weight", 0): 0}
    found = assign_by_cuts(staged, [names(staged).index("transpose")], 2)
    first, second = split_program(staged.program, found.owners, 2)
    assert (set(first.arguments), set(second.arguments)) == ({0, 1}, {0})


def test_weights_that_nobody_reads_live_in_the_first_piece() -> None:
    staged = staged_function(
        lambda unused, x: jnp.sin(x).sum(), ["weight", "data"], [WIDE, X]
    )
    assert assign_by_cuts(staged, [1], 2).homes == {Input("weight", 0): 0}


def counting(state: Any, x: Any) -> Any:
    """Reads a state, and makes its next value in two steps."""
    early = jnp.sin(x) * state
    new = jnp.exp(jnp.tanh(state))
    return jnp.cos(early).sum(), new


def test_between_the_first_reading_of_a_state_and_its_next_value_is_no_cut() -> None:
    staged = staged_function(counting, ["state", "data"], [STATE, X], {1: 0})
    pairs = zip(names(staged), staged.is_cuttable, strict=True)
    assert dict(pairs) == {
        # In front of the first operation there is nothing.
        **{"sin": False, "mul": True, "tanh": False, "exp": False},
        **{"cos": True, "reduce_sum": True},
    }


def test_a_state_that_is_read_after_its_next_value_was_made_is_not_cut_off() -> None:
    """The pieces after the cut would read the next value in place of the old one."""

    def late(state: Any, x: Any) -> Any:
        new = jnp.sin(x).max()
        return (jnp.cos(x) * state).sum(), new

    staged = staged_function(late, ["state", "data"], [STATE, X], {1: 0})
    pairs = zip(names(staged), staged.is_cuttable, strict=True)
    assert dict(pairs) == {
        **{"sin": False, "reduce_max": True, "cos": False, "mul": False},
        "reduce_sum": True,
    }


def test_states_that_do_not_change_may_be_cut_through() -> None:
    def still(state: Any, x: Any) -> Any:
        return (jnp.cos(jnp.sin(x) * state) * state).sum(), state

    staged = staged_function(still, ["state", "data"], [STATE, X], {1: 0})
    assert staged.is_cuttable == [False, True, True, True, True]


def test_a_state_that_depends_on_weights_alone_is_made_where_it_lives() -> None:
    """Again and again: its home does not change with the size of the batch."""

    def copying(weight: Any, state: Any, x: Any) -> Any:
        return jnp.cos(jnp.sin(x) @ weight).sum(), weight * 2.0

    roles: list[Role] = ["weight", "state", "data"]
    staged = staged_function(copying, roles, [WIDE, WIDE, X], {1: 1})
    first = assign_by_cuts(staged, [names(staged).index("dot_general")], 2)
    again = assign_by_homes(staged, first.homes, 2)
    for found in (first, again):
        (made,) = by_name(staged, found)["mul"]
        assert made == first.homes[Input("state", 0)]


def normal_model() -> keras.Model:
    model = keras.Sequential(
        [
            *(keras.Input((4,)), L.Dense(4), L.BatchNormalization()),
            *(L.Dropout(0.5), L.Dense(4), L.Dropout(0.5)),
        ]
    )
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def test_batchnorm_and_the_seeds_of_dropout_are_never_cut_through() -> None:
    """Wherever the cut is: who reads a state writes it, and nobody else reads it."""
    staged = traced_training(normal_model(), X, X).staged
    states = [n for n, each in enumerate(staged.inputs) if each.role == "state"]
    allowed = [i for i, is_allowed in enumerate(staged.is_cuttable) if is_allowed]
    assert len(states) == 4
    assert len(allowed) > 20
    for cut in allowed:
        found = assign_by_cuts(staged, [cut], 2)
        for piece, part in enumerate(split_program(staged.program, found.owners, 2)):
            written = [staged.updates[n] for n in part.results]
            for state in states:
                assert (state in part.arguments) == (state in written)
                if state in written:
                    assert found.homes[staged.inputs[state]] == piece


def test_metrics_live_in_the_last_piece_wherever_the_cut_is() -> None:
    staged = traced_training(normal_model(), X, X).staged
    metrics = {n for n, each in enumerate(staged.inputs) if each.role == "metric"}
    for cut in [i for i, allowed in enumerate(staged.is_cuttable) if allowed][::5]:
        found = assign_by_cuts(staged, [cut], 2)
        first, second = split_program(staged.program, found.owners, 2)
        assert not metrics & set(first.arguments)
        assert metrics <= set(second.arguments)
        written = {staged.updates[n] for n in second.results}
        assert metrics <= written


@pytest.mark.parametrize("num_pieces", [2, 3])
def test_pieces_one_after_the_other_make_what_the_whole_step_makes(
    num_pieces: int,
) -> None:
    """Against the traced program, run as one; what is sent only goes onwards."""
    model = normal_model()
    step = traced_training(model, X, X)
    values = jax.tree.leaves((training_state(model, (X, X)), (X, X)))
    program = step.staged.program
    expected = jax.core.eval_jaxpr(program.jaxpr, program.consts, *values)
    allowed = [i for i, is_allowed in enumerate(step.staged.is_cuttable) if is_allowed]
    some = list(combinations(allowed[:: 4 * num_pieces], num_pieces - 1))
    for cuts in some:
        first = assign_by_cuts(step.staged, cuts, num_pieces)
        again = assign_by_homes(step.staged, first.homes, num_pieces)
        assert again.homes == first.homes
        for found in (first, again):
            parts = split_program(program, found.owners, num_pieces)
            made = run_parts(program, parts, values)
            for ours, theirs in zip(made, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_alive_at_a_cut_is_what_travels() -> None:
    """What the first piece sends, and outputs, which are wanted at the end.

    In front of the metrics, which are in the last piece wherever they are cut.
    """
    staged = traced_training(normal_model(), X, X).staged
    pairs = zip(staged.program.jaxpr.invars, staged.inputs, strict=True)
    metrics = {v for v, each in pairs if each.role == "metric"}
    operations = enumerate(staged.program.jaxpr.eqns)
    end = next(
        i
        for i, op in operations
        if any(v in metrics for v in op.invars if isinstance(v, Var))
    )
    cuts = [i for i in range(end) if staged.is_cuttable[i]]
    assert len(cuts) > 20
    for cut in cuts:
        found = assign_by_cuts(staged, [cut], 2)
        first, _ = split_program(staged.program, found.owners, 2)
        made = [n for n in first.results if staged.updates[n] is None]
        outputs = {staged.program.jaxpr.outvars[n] for n in made}
        assert sum(map(bytes_of, {*first.sent, *outputs})) == staged.alive[cut]


def test_only_work_that_is_bound_costs_something() -> None:
    staged = staged_layers()
    costs = [cost_of(operation) for operation in staged.program.jaxpr.eqns]
    expected = [
        0 if name == "transpose" else cost
        for name, cost in zip(names(staged), costs, strict=True)
    ]
    assert staged.costs == expected
    # A product of (3, 4) and (4, 4), and the twelve numbers that it makes.
    assert staged.costs[1] == 2 * 3 * 4 * 4 + 10 * 12 * 4


def test_gradients_travel_between_weights_and_loss_only() -> None:
    def mixed(weight: Any, x: Any, y: Any) -> Any:
        prepared = jnp.exp(x)
        hidden = jnp.sin(prepared @ weight)
        right = (jnp.tanh(hidden) > 0) == (y > 0)
        return jnp.cos(hidden).sum(), right.all()

    staged = staged_function(mixed, ["weight", "data", "data"], [WIDE, X, X])
    made = {
        op.primitive.name: any(v in staged.needs_gradient for v in op.outvars)
        for op in staged.program.jaxpr.eqns
    }
    needed = {name for name, needs in made.items() if needs}
    assert needed == {"dot_general", "sin", "cos", "reduce_sum"}
    weight, x, y = staged.program.jaxpr.invars
    assert weight in staged.needs_gradient
    assert not {x, y} & staged.needs_gradient


def test_whole_numbers_carry_no_gradients() -> None:
    def rounded(weight: Any, x: Any) -> Any:
        choice = (x @ weight).argmax(axis=-1)
        return (weight[choice] * 2).sum()

    staged = staged_function(rounded, ["weight", "data"], [WIDE, X])
    needed = staged.needs_gradient
    assert any(v.aval.dtype == jnp.float32 for v in needed)
    assert all(v.aval.dtype == jnp.float32 for v in needed)


def test_layers_are_named_in_the_pieces_that_compute_them() -> None:
    inner = keras.Sequential([keras.Input((4,)), L.Dense(4, name="deep")], name="inner")
    layers = [L.Dense(4, name="one"), inner, L.ReLU(name="two"), L.Dense(4, name="end")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer="sgd", loss="mse")
    staged = traced_training(model, X, X).staged
    assert ("inner", "deep") in staged.layers
    at = [each[:1] for each in staged.layers].index(("two",))
    found = assign_by_cuts(staged, [at], 2)
    pieces = layers_of_pieces(staged, found.owners, 2)
    assert pieces[0] == ["one", "inner"]
    assert pieces[1][:2] == ["two", "end"]
