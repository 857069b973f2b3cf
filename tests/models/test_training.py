"""Training steps are traced from shapes, and models stay as they are."""

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.errors import ProfileError
from meshwright.models.parts import split_program
from meshwright.models.piece_functions import PieceFunctions, added, flat_of
from meshwright.models.profile import build_abstractly
from meshwright.models.stages import Input, assign_by_cuts
from meshwright.models.training import (
    SAMPLES,
    TrainingStep,
    batch_shapes,
    ready_to_train,
    trace_loss,
    trace_training,
)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from tracing import staged_function

L = keras.layers


def normed(optimizer: Any = "adam", **options: Any) -> keras.Model:
    layers = [
        keras.Input((6,)),
        L.Dense(8, name="wide"),
        L.BatchNormalization(name="norm"),
        L.Dropout(0.5, seed=1),
        L.Dense(3, name="scores"),
    ]
    model = keras.Sequential(layers, name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def linear(optimizer: Any = "sgd") -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), L.Dense(2, name="out")], name="line")
    model.compile(optimizer, "mse")
    return model


def deep() -> keras.Model:
    layers = [L.Dense(16, activation="tanh", name=f"dense_{i}") for i in range(6)]
    model = keras.Sequential([keras.Input((16,)), *layers], name="deep")
    model.compile("sgd", "mse")
    return model


def operations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All operations, those of called programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            if isinstance(value, ClosedJaxpr | Jaxpr):
                yield from operations(getattr(value, "jaxpr", value))


def products(step: TrainingStep) -> list[Any]:
    found = operations(step.program.jaxpr)
    return [eqn for eqn in found if eqn.primitive.name == "dot_general"]


def test_inputs_are_named_by_what_they_are() -> None:
    model = normed()
    step = trace_training(model)
    found: dict[str, list[str]] = {}
    for each in step.inputs:
        found.setdefault(each.kind, []).append(each.path)
    assert step.name == "net"
    assert list(found) == ["weight", "state", "slot", "metric", "data"]
    assert found["weight"] == [v.path for v in model.trainable_variables]
    assert found["weight"][0] == "net/wide/kernel"
    assert found["state"] == [v.path for v in model.non_trainable_variables]
    assert "net/norm/moving_mean" in found["state"]
    adam = ["iteration", "learning_rate"]
    for weight in found["weight"]:
        name = weight.replace("/", "_")
        adam += [f"{name}_momentum", f"{name}_velocity"]
    assert [path.split("/")[-1] for path in found["slot"]] == adam
    assert found["metric"] == ["loss/total", "loss/count"], "others take no part"
    assert found["data"] == ["", ""]


def test_inputs_have_the_shapes_of_variables_and_data_has_its_own_size() -> None:
    step = trace_training(normed())
    assert len(step.inputs) == len(step.program.in_avals)
    for each, aval in zip(step.inputs, step.program.in_avals, strict=True):
        assert each.variable is None or aval.shape == tuple(each.variable.shape)
        assert (each.variable is None) == (each.kind == "data")
    x, y = step.program.in_avals[-2:]
    assert (x.shape, y.shape, y.dtype) == ((SAMPLES, 6), (SAMPLES,), "int32")


def test_the_samples_of_a_trace_are_a_prime() -> None:
    assert all(SAMPLES % n for n in range(2, int(SAMPLES**0.5) + 1))


def test_the_traced_step_computes_what_keras_computes() -> None:
    model = linear(keras.optimizers.SGD(0.1))
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SAMPLES, n)).astype("float32") for n in (4, 2))
    weight, bias = (np.asarray(v.value) for v in model.trainable_variables)
    step = trace_training(model)
    # The optimizer is a copy whose slots have no values: iteration and rate.
    given = [jnp.asarray(v.value) for v in model.trainable_variables]
    given += [jnp.asarray(0), jnp.asarray(0.1), jnp.zeros(()), jnp.zeros(())]
    given = [
        a.astype(aval.dtype)
        for a, aval in zip(given, step.program.in_avals, strict=False)
    ]
    found = jaxpr_as_fun(step.program)(*given, x, y)
    error = x @ weight + bias - y
    new_weight = weight - 0.1 * 2 * x.T @ error / error.size
    new_bias = bias - 0.1 * 2 * error.sum(axis=0) / error.size
    shapes = [np.shape(each) for each in found]
    np.testing.assert_allclose(found[shapes.index((4, 2))], new_weight, atol=1e-5)
    np.testing.assert_allclose(found[shapes.index((2,))], new_bias, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(None, "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")],
)
def test_layers_compute_in_the_precision_that_is_asked_for(
    precision: str | None, dtype: str
) -> None:
    step = trace_training(deep(), precision=precision)
    found = {str(v.aval.dtype) for eqn in products(step) for v in eqn.invars}
    assert found == {dtype}
    weights = zip(step.inputs, step.program.in_avals, strict=True)
    kept = {str(aval.dtype) for each, aval in weights if each.kind == "weight"}
    assert kept == {"float32"}


def test_remat_computes_the_forward_pass_of_blocks_again() -> None:
    model = deep()
    plain, again = (trace_training(model, remat=remat) for remat in (False, True))
    # Each layer has a product forward and two backward; the first one's input is data.
    assert len(products(plain)) == 3 * 6 - 1
    assert len(products(plain)) < len(products(again)) <= 4 * 6 - 1
    marks = [
        eqn
        for eqn in operations(again.program.jaxpr)
        if eqn.params.get("differentiated")
    ]
    assert marks


def looks(model: keras.Model) -> Any:
    values = [np.asarray(v.value).tobytes() for v in model.variables]
    policies = [layer.dtype_policy.name for layer in model._flatten_layers()]
    optimizer = model.optimizer
    return (
        values,
        policies,
        (id(optimizer), optimizer.built, len(optimizer.variables)),
        (id(model._compile_loss), model._compile_loss.built),
        (id(model._compile_metrics), model._compile_metrics.built),
        [v.path for v in model.metrics_variables],
        model.dtype_policy.name,
    )


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_model_stays_as_it_was(is_trained: bool) -> None:
    model = normed()
    if is_trained:
        model.fit(np.ones((8, 6)), np.zeros(8, "int32"), verbose=0)
    before = looks(model)
    assert before[2][1] == is_trained
    trace_training(model, precision="bfloat16", remat=True)
    trace_loss(model, precision="bfloat16")
    assert looks(model) == before


def test_the_model_stays_as_it_was_if_tracing_fails() -> None:
    model = normed()
    before = looks(model)
    with pytest.raises(RuntimeError, match="stop"), ready_to_train(model, None, 4):
        raise RuntimeError("stop")
    assert looks(model) == before


def test_models_without_values_are_traced_alike() -> None:
    abstract, concrete = build_abstractly(normed), normed()
    one, two = trace_training(abstract), trace_training(concrete)
    assert [(i.kind, i.path.split("/")[-1]) for i in one.inputs] == [
        (i.kind, i.path.split("/")[-1]) for i in two.inputs
    ]
    assert len(one.program.jaxpr.eqns) == len(two.program.jaxpr.eqns)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras does not know by name."""

    def __call__(self, step: Any) -> Any:
        """The rate of a step."""
        return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        """Nothing to configure."""
        return {}


class Own(keras.optimizers.SGD):
    """An optimizer that Keras does not know by name."""


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: Own(Falling()), ["iteration"]),
        (lambda: Own(0.1), ["iteration", "learning_rate"]),
        (
            lambda: keras.optimizers.LossScaleOptimizer(Own(0.1)),
            ["dynamic_scale", "iteration", "iteration", "learning_rate"],
        ),
    ],
)
def test_optimizers_and_schedules_of_the_users_own_are_traced(
    make: Callable[[], Any], slots: list[str]
) -> None:
    step = trace_training(linear(make()))
    found = [each.path.split("/")[-1] for each in step.inputs if each.kind == "slot"]
    assert sorted(found)[: len(slots)] == slots


def test_a_model_that_is_not_built_is_refused() -> None:
    model = keras.Sequential([L.Dense(2)], name="vague")
    model.compile("sgd", "mse")
    with pytest.raises(ProfileError) as caught:
        trace_training(model)
    assert str(caught.value) == (
        "'vague' was to be profiled, and is not built.\n"
        "The shapes of weights are known when a model is built.\n"
        "Give it a keras.Input, call it on a batch, or call build(input_shape)."
    )


def not_compiled() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), L.Dense(2)], name="raw")


def without_optimizer() -> keras.Model:
    model = not_compiled()
    model.compile(None, "mse")
    return model


@pytest.mark.parametrize("make", [not_compiled, without_optimizer])
@pytest.mark.parametrize("trace", [trace_training, trace_loss])
def test_a_model_that_is_not_compiled_is_refused(
    make: Callable[[], keras.Model], trace: Callable[[Any], Any]
) -> None:
    with pytest.raises(ProfileError) as caught:
        trace(make())
    assert str(caught.value) == (
        "'raw' was to be planned for, and is not compiled.\n"
        "What a training step does depends on the loss and the optimizer.\n"
        "Call compile(optimizer=..., loss=...) first."
    )


class Reserved(keras.Model):
    """A model that does not say what it takes."""

    def __init__(self) -> None:
        """Makes its layer."""
        super().__init__(name="reserved")
        self.dense = L.Dense(2)

    def call(self, x: Any) -> Any:
        """Calls its layer."""
        return self.dense(x)


def reserved() -> keras.Model:
    model = Reserved()
    model(np.ones((1, 4), "float32"))
    model.compile("sgd", "mse")
    return model


def test_a_model_that_does_not_know_its_inputs_is_refused() -> None:
    with pytest.raises(ProfileError) as caught:
        trace_training(reserved())
    assert str(caught.value) == (
        "'reserved', a Reserved, does not say what its inputs are.\n"
        "Functional and Sequential models know their inputs, others are shown some.\n"
        "Pass a batch of inputs, or its shapes, as data."
    )


def test_a_model_is_shown_data_of_any_size() -> None:
    batch = np.zeros((5, 4), "float32"), np.zeros((5, 2), "float32")
    step = trace_training(reserved(), batch)
    shapes = [aval.shape for aval in step.program.in_avals[-2:]]
    assert shapes == [(SAMPLES, 4), (SAMPLES, 2)]


def test_inputs_with_a_dim_that_is_not_known_are_refused() -> None:
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, L.Dense(2)(inputs), name="ragged")
    model.compile("sgd", "mse")
    with pytest.raises(ProfileError) as caught:
        trace_training(model)
    assert str(caught.value) == (
        "'ragged' takes inputs of shape (None, None, 4).\n"
        "How much there is to do depends on every dim.\n"
        "Pass a batch of inputs, or its shapes, as data."
    )


@pytest.mark.parametrize(
    ("loss", "shape", "dtype"),
    [
        ("mse", (7, 5, 3), "float32"),
        ("categorical_crossentropy", (7, 5, 3), "float32"),
        ("sparse_categorical_crossentropy", (7, 5), "int32"),
        (keras.losses.SparseCategoricalCrossentropy(), (7, 5), "int32"),
        (keras.losses.sparse_categorical_crossentropy, (7, 5), "int32"),
        (keras.losses.MeanSquaredError(), (7, 5, 3), "float32"),
    ],
)
def test_targets_are_as_the_loss_wants_them(
    loss: Any, shape: tuple[int, ...], dtype: str
) -> None:
    model = keras.Sequential([keras.Input((5, 4)), L.Dense(3)])
    model.compile("sgd", loss)
    inputs, targets = batch_shapes(model, num_samples=7)
    assert (inputs.shape, inputs.dtype) == ((7, 5, 4), "float32")
    assert (targets.shape, targets.dtype) == (shape, dtype)


def two_outputs(loss: Any, *, by_name: bool = False) -> keras.Model:
    inputs = {"b": keras.Input((4,), name="b"), "a": keras.Input((3,), name="a")}
    joined = L.Concatenate()([inputs["b"], inputs["a"]])
    scores, size = L.Dense(5, name="scores")(joined), L.Dense(1, name="size")(joined)
    outputs = {"scores": scores, "size": size} if by_name else [scores, size]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss)
    return model


SPARSE = "sparse_categorical_crossentropy"


@pytest.mark.parametrize("loss", [[SPARSE, "mse"], {"scores": SPARSE, "size": "mse"}])
def test_each_of_several_outputs_has_its_own_targets(loss: Any) -> None:
    inputs, targets = batch_shapes(two_outputs(loss), num_samples=7)
    assert {name: each.shape for name, each in inputs.items()} == {
        "a": (7, 3),
        "b": (7, 4),
    }
    assert [(each.shape, each.dtype) for each in targets] == [
        ((7,), "int32"),
        ((7, 1), "float32"),
    ]


def test_targets_of_outputs_with_names_have_these_names() -> None:
    loss = {"size": "mse", "scores": SPARSE}
    model = two_outputs(loss, by_name=True)
    _, targets = batch_shapes(model, num_samples=7)
    assert {name: (each.shape, str(each.dtype)) for name, each in targets.items()} == {
        "scores": ((7,), "int32"),
        "size": ((7, 1), "float32"),
    }
    trace_training(model)


def test_data_keeps_its_size_unless_another_is_asked_for() -> None:
    model = linear()
    data = np.zeros((5, 4), "float32"), np.zeros((5, 2)), np.zeros(5)
    same = batch_shapes(model, data)
    assert [each.shape for each in same] == [(5, 4), (5, 2), (5,)]
    assert str(same[1].dtype) == "float32", "as it is on a device"
    more = batch_shapes(model, data, 9)
    assert [each.shape for each in more] == [(9, 4), (9, 2), (9,)]


def test_the_loss_is_traced_with_the_roles_of_its_inputs() -> None:
    model = normed()
    staged = trace_loss(model)
    roles = [each.role for each in staged.inputs]
    assert list(dict.fromkeys(roles)) == [
        "weight",
        "state",
        "shared",
        "metric",
        "data",
    ]
    assert roles.count("weight") == len(model.trainable_variables)
    assert roles.count("state") == len(model.non_trainable_variables)
    assert roles.count("metric") == 2
    assert roles.count("data") == 2
    assert staged.starts == (0,)
    assert staged.program.out_avals[0].shape == ()
    nexts = [None if n is None else staged.inputs[n] for n in staged.updates]
    states = [Input("state", i) for i in range(len(model.non_trainable_variables))]
    assert nexts == [None, *states, Input("metric", 0), Input("metric", 1)]


def test_the_traced_loss_is_the_loss_of_keras() -> None:
    model = linear()
    staged = trace_loss(model)
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(SAMPLES, n)).astype("float32") for n in (4, 2))
    state = [jnp.asarray(v.value) for v in model.trainable_variables]
    rest = [
        jnp.zeros(aval.shape, aval.dtype)
        for aval in staged.program.in_avals[len(state) : -2]
    ]
    loss, *_ = jaxpr_as_fun(staged.program)(*state, *rest, x, y)
    weight, bias = (np.asarray(each) for each in state)
    np.testing.assert_allclose(loss, np.mean((x @ weight + bias - y) ** 2), rtol=1e-5)


def loss_of_two_layers(first: Any, second: Any, scale: Any, x: Any) -> Any:
    with jax.named_scope("one"):
        hidden = jnp.tanh(x @ first)
    with jax.named_scope("two"):
        return jnp.sum(jnp.tanh(hidden @ second) * scale)


def two_pieces(remat: bool) -> tuple[list[PieceFunctions], list[Any]]:
    rng = np.random.default_rng(2)
    shapes = [(4, 5), (5, 3), (3,), (6, 4)]
    args = [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]
    roles: Any = ("weight", "weight", "state", "data")
    staged = staged_function(loss_of_two_layers, roles, args)
    names = [eqn.primitive.name for eqn in staged.program.jaxpr.eqns]
    start = names.index("dot_general", names.index("dot_general") + 1)
    owners = assign_by_cuts(staged, [start], 2).owners
    parts = split_program(staged.program, owners, 2)
    return [PieceFunctions(staged, part, remat) for part in parts], args


@pytest.mark.parametrize("remat", [False, True])
def test_pieces_one_after_the_other_compute_loss_and_gradients(remat: bool) -> None:
    (one, two), args = two_pieces(remat)
    first, second, scale, x = args
    assert one.has_backward
    assert two.has_backward
    given_one: tuple[Any, Any] = ([first], []), ([x], [])
    (hidden,), _, kept_one = one.forward(*given_one)
    given_two: tuple[Any, Any] = ([second], [hidden]), ([scale], [])
    (loss,), (_, results), kept_two = two.forward(*given_two)
    np.testing.assert_allclose(loss, loss_of_two_layers(*args), rtol=1e-6)
    assert len(results) == 1
    assert (kept_one is None) == (kept_two is None) == remat
    zeros = [jnp.zeros_like(second)]
    to_second, to_hidden = two.backward(*given_two, kept_two, [jnp.ones(())], zeros)
    ones = [jnp.ones_like(first)]
    to_first, _ = one.backward(*given_one, kept_one, to_hidden, ones)
    wanted = jax.grad(loss_of_two_layers, (0, 1))(*args)
    np.testing.assert_allclose(to_first[0], 1 + wanted[0], rtol=1e-5)
    np.testing.assert_allclose(to_second[0], wanted[1], rtol=1e-5)


def test_what_a_backward_pass_is_given_anyway_is_not_kept() -> None:
    (one, two), (first, second, scale, x) = two_pieces(remat=False)
    (hidden,), _, kept = one.forward(([first], []), ([x], []))
    assert 1 in one.wanted_again, "the data, for the gradient of the first weight"
    assert all(each.shape != x.shape for each in flat_of(kept))
    two.forward(([second], [hidden]), ([scale], []))
    assert 0 in two.wanted_again, "the weight, for the gradient of what comes before"


@pytest.mark.parametrize("remat", [False, True])
def test_a_backward_pass_in_halves_computes_the_same(remat: bool) -> None:
    (one, two), (first, second, scale, x) = two_pieces(remat)
    (hidden,), *_ = one.forward(([first], []), ([x], []))
    given: tuple[Any, Any] = ([second], [hidden]), ([scale], [])
    _, _, kept = two.forward(*given)
    ends = [jnp.ones(())]
    to_second, to_hidden = two.backward(*given, kept, ends, [jnp.zeros_like(second)])
    flat = flat_of((*given, kept, ends))
    first_half, second_half = two.halves
    early, between = first_half(*flat)
    np.testing.assert_allclose(early[0], to_hidden[0], rtol=1e-6)
    np.testing.assert_allclose(second_half(flat, between)[0], to_second[0], rtol=1e-6)


def test_a_piece_that_gradients_do_not_reach_has_no_backward_pass() -> None:
    def run(weight: Any, x: Any) -> Any:
        with jax.named_scope("one"):
            still = jnp.tanh(x)
        return jnp.sum(still @ weight)

    args = [jnp.ones((3, 2)), jnp.ones((4, 3))]
    staged = staged_function(run, ("weight", "data"), args)
    parts = split_program(staged.program, assign_by_cuts(staged, [1], 2).owners, 2)
    one, two = (PieceFunctions(staged, part, remat=False) for part in parts)
    assert not one.has_backward
    assert two.has_backward
    carried, (left, _), kept = one.forward(([], []), ([args[1]], []))
    assert (carried, kept) == ([], None)
    np.testing.assert_allclose(left[0], np.tanh(np.ones((4, 3))), rtol=1e-6)


def test_gradients_are_added_one_by_one() -> None:
    assert added([1.0, 2.0], [10.0, 20.0]) == [11.0, 22.0]
    with pytest.raises(ValueError, match="zip"):
        added([1.0], [1.0, 2.0])
