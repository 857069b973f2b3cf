"""Mixed precision: what a strategy's precision does to models and optimizers.

The reference is stock Keras with its global policy, on one device.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import StrategyError
from meshwright.models.precision import keeping_precision, set_precision
from meshwright.strategies import attach, verification
from meshwright.train.mesh_step import MeshStep, training_state

import jax
import keras
import numpy as np
import pytest

CPUS = [f"CPU:{i}" for i in range(8)]
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)
L = keras.layers

SPLITS: dict[str, Callable[[Any], Any]] = {
    "mirrored": lambda precision: mw.Mirrored(precision=precision),
    "fsdp": lambda precision: mw.FSDP(8, precision=precision),
    "tensor": lambda precision: mw.TensorParallel(
        2, devices=CPUS[:2], precision=precision
    ),
    "hybrid": lambda precision: mw.Hybrid(2, 2, 2, precision=precision),
}


@contextmanager
def global_policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def make_model(optimizer: Any = None, head: str | None = None) -> keras.Model:
    keras.utils.set_random_seed(2)
    layers = [L.Dense(16, activation="relu"), L.Dense(4, dtype=head, name="head")]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile(
        optimizer=optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss="mse"
    )
    return model


def fit(model: keras.Model, **options: Any) -> keras.Model:
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **options)
    return model


def compute_dtypes(model: keras.Model) -> set[str]:
    layers = model._flatten_layers()
    return {x.compute_dtype for x in layers if not isinstance(x, L.InputLayer)}


def state(model: keras.Model) -> dict[str, Any]:
    variables = [*model.variables, *model.optimizer.variables]
    return {f"{i} {v.path}": np.asarray(v.value) for i, v in enumerate(variables)}


def assert_same(ours: Any, theirs: Any) -> None:
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)
    assert ours.keys() == theirs.keys()


def assert_near(ours: keras.Model, theirs: keras.Model, atol: float) -> None:
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def lowered(model: keras.Model, strategy: Any) -> str:
    train_step = jax.jit(model.train_step)
    step = MeshStep(model, train_step, strategy.plan, strategy.mesh)
    batch = (X[:8], Y[:8])
    return str(step.lower(training_state(model, batch), batch).as_text())


def operands_of_products(program: str) -> set[str]:
    """What the matrix products of a lowered program multiply."""
    lines = [line for line in program.splitlines() if "dot_general" in line]
    return {t for line in lines for t in re.findall(r"x(b?f\d+)>", line)}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["scope", "distribute"])
def test_every_product_is_computed_in_the_strategys_precision(
    way: str, precision: Any
) -> None:
    strategy = mw.Mirrored(precision=precision)
    if way == "scope":
        with strategy.scope():
            model = make_model()
    else:
        model = mw.distribute(make_model(), strategy)
    fit(model)
    assert compute_dtypes(model) == {precision}
    assert {v.dtype for v in model.variables} == {"float32"}
    short = {"bfloat16": "bf16", "float16": "f16"}[precision]
    assert operands_of_products(lowered(model, strategy)) == {short}
    assert model.predict(X, verbose=0).dtype == precision
    mw.distribute(model, mw.Mirrored(precision="float32"))
    assert operands_of_products(lowered(model, strategy)) == {"f32"}


def test_no_precision_leaves_a_model_as_it_is() -> None:
    with global_policy("mixed_bfloat16"):
        model = make_model()
    mw.distribute(model, mw.Mirrored())
    assert compute_dtypes(fit(model)) == {"bfloat16"}
    with mw.Mirrored().scope():
        assert keras.config.dtype_policy().name == "float32"


def test_a_scope_puts_the_policy_back_also_after_an_error() -> None:
    before = keras.config.dtype_policy()
    with mw.Mirrored(precision="float16").scope():
        assert keras.config.dtype_policy().name == "mixed_float16"
        seen: list[str] = []
        other = threading.Thread(
            target=lambda: seen.append(keras.config.dtype_policy().name)
        )
        other.start()
        other.join()
        assert seen == ["float32"], "another thread is not in the scope"
    assert keras.config.dtype_policy() is before
    with pytest.raises(KeyError), mw.Mirrored(precision="bfloat16").scope():
        raise KeyError
    assert keras.config.dtype_policy() is before
    with global_policy("mixed_bfloat16"), mw.Mirrored(precision="float32").scope():
        assert compute_dtypes(make_model()) == {"float32"}


class Blocks(keras.layers.Layer):
    """Makes a layer when it is built, keeps others in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [L.Dense(8), L.Dropout(0.1)]

    def build(self, input_shape: Any) -> None:
        self.late = L.Dense(8)
        self.late.build(input_shape)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.late(x)


def nested() -> keras.Model:
    """Wrappers, cells, attention, and a model inside of a model."""
    inputs = keras.Input((6, 8))
    x = L.Bidirectional(L.LSTM(4, return_sequences=True))(inputs)
    x = L.TimeDistributed(L.Dense(8))(x)
    x = x + L.MultiHeadAttention(2, 4)(x, x)
    inner = keras.Sequential([keras.Input((6, 8)), Blocks(), L.BatchNormalization()])
    x = L.RNN([L.GRUCell(4), L.SimpleRNNCell(4)])(inner(x))
    model = keras.Model(inputs, L.Dense(4)(x))
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_layers_inside_of_layers_follow_and_return() -> None:
    model = nested()
    mw.distribute(model, mw.Mirrored(CPUS[:2], precision="bfloat16"))
    assert compute_dtypes(model) == {"bfloat16"}
    assert model.dtype_policy.name == "mixed_bfloat16"
    assert model.predict(np.ones((4, 6, 8)), verbose=0).dtype == "bfloat16"
    mw.distribute(model, mw.Mirrored(CPUS[:2], precision="float32"))
    assert compute_dtypes(model) == {"float32"}
    assert model.predict(np.ones((4, 6, 8)), verbose=0).dtype == "float32"


def test_layers_that_are_made_after_the_scope_follow_too() -> None:
    with mw.Mirrored(CPUS[:2], precision="bfloat16").scope():
        model = keras.Sequential([Blocks(), L.Dense(4)])
        model.compile(optimizer="sgd", loss="mse")
    fit(model)
    assert compute_dtypes(model) == {"bfloat16"}


def test_layers_with_a_policy_of_another_kind_keep_it() -> None:
    special = keras.dtype_policies.DTypePolicyMap()
    pure = L.Dense(4, dtype="bfloat16")
    mapped, quantized = L.Dense(8, dtype=special), L.Dense(8, dtype="int8_from_float32")
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(8), mapped, quantized, pure], name="net"
    )
    mw.distribute(model, mw.Mirrored(precision="float16"))
    assert model.layers[0].dtype_policy.name == "mixed_float16"
    assert mapped.dtype_policy is special
    assert quantized.dtype_policy.name == "int8_from_float32"
    assert pure.dtype_policy.name == "bfloat16", "its weights are bfloat16 too"


def test_a_layer_kept_in_float32_on_purpose_stays_there_on_every_road() -> None:
    with mw.Mirrored(precision="bfloat16").scope():
        model = make_model(head="float32")
    for precision in ("bfloat16", "float16", "float32", "bfloat16"):
        mw.distribute(model, mw.FSDP(8, precision=precision))
        wanted = [precision, "float32"]
        assert [layer.compute_dtype for layer in model.layers] == wanted
    text = str(mw.FSDP(8, precision="float16").explain(model, X[:8], Y[:8]))
    assert "1 layers compute in float32: net/head" in text
    assert "1 layers compute in float16: net/dense" in text
    assert model.layers[0].compute_dtype == "bfloat16", "explain changes nothing"


def test_a_float32_model_that_is_loaded_in_a_scope_computes_as_the_scope_says(
    tmp_path: Path,
) -> None:
    fit(make_model()).save(tmp_path / "model.keras")
    with mw.Mirrored(precision="bfloat16").scope():
        model = keras.saving.load_model(tmp_path / "model.keras")
    assert compute_dtypes(fit(model)) == {"bfloat16"}


def test_a_float16_model_is_saved_and_loaded_with_the_state_of_its_loss_scale(
    tmp_path: Path,
) -> None:
    strategy = mw.FSDP(8, precision="float16")
    model = fit(mw.distribute(make_model(), strategy))
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for _ in range(2):
        pairs = zip(state(loaded).values(), state(model).values(), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
        fit(loaded)
        fit(model)


def test_words_are_not_rounded_to_bfloat16() -> None:
    words = np.array([[256], [257], [258]] * 4, np.int32)
    with mw.Mirrored(CPUS[:2], precision="bfloat16").scope():
        model = keras.Sequential([L.Embedding(300, 4), L.Flatten()])
        model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    model.fit(words, np.zeros((12, 4)), verbose=0)
    rows = np.asarray(model.predict(words[:3], verbose=0)).astype(np.float32)
    table = np.asarray(model.weights[0])[256:259]
    np.testing.assert_allclose(rows, table, rtol=2**-8)


@pytest.mark.parametrize("given", [True, False])
def test_normalization_follows_with_its_statistics_and_loses_none(given: bool) -> None:
    mean, variance = 1.001, 4.003  # neither is a bfloat16

    def make() -> keras.Model:
        keras.utils.set_random_seed(2)
        layer = L.Normalization(mean=mean, variance=variance) if given else None
        layer = layer or L.Normalization()
        model = keras.Sequential([keras.Input((8,)), layer, L.Dense(4)])
        if not given:
            layer.adapt(X * np.sqrt(variance) + mean)
        model.compile(optimizer="sgd", loss="mse")
        return model

    with global_policy("mixed_bfloat16"):
        expected = make().predict(X, verbose=0)
    model = make()
    exact = model.predict(X, verbose=0)
    mw.distribute(model, mw.FSDP(8, precision="bfloat16"))
    assert model.layers[0].mean.dtype == "bfloat16"
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    mw.distribute(model, mw.Mirrored(CPUS[:2], precision="float32"))
    np.testing.assert_allclose(model.predict(X, verbose=0), exact, atol=1e-6)


def test_momentum_iterations_and_slots_come_along_into_loss_scaling() -> None:
    model = fit(make_model(keras.optimizers.Adam(0.01)))
    inner, before = model.optimizer, state(model)
    mw.distribute(model, mw.FSDP(8, precision="float16"))
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is inner
    assert int(model.optimizer.iterations) == 2
    kept = {key.split(" ")[1]: value for key, value in state(model).items()}
    for key, value in before.items():
        np.testing.assert_array_equal(kept[key.split(" ")[1]], value, err_msg=key)
    fit(model)
    assert int(model.optimizer.iterations) == 4
    shapes = {
        v.name: v.value.sharding.shard_shape(tuple(v.shape))
        for v in model.optimizer.variables
    }
    kernels = {n: s for n, s in shapes.items() if "kernel" in n}
    assert len(kernels) == 4
    assert set(kernels.values()) == {(8, 2), (2, 4)}
    assert shapes["dynamic_scale"] == shapes["step_counter"] == ()
    mw.distribute(model, mw.FSDP(8, precision="float32"))
    assert model.optimizer is inner
    assert int(fit(model).optimizer.iterations) == 6


def test_an_optimizer_that_does_not_check_whether_it_is_built_keeps_its_slots() -> None:
    class Momentum(keras.optimizers.Optimizer):
        """As in Keras' own documentation of custom optimizers."""

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.slots = [
                self.add_variable_from_reference(v, name="momentum") for v in variables
            ]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            slot = self.slots[self._get_variable_index(variable)]
            self.assign(slot, slot * 0.9 - gradient * learning_rate)
            self.assign_add(variable, slot)

    model = fit(make_model(Momentum(learning_rate=0.05)))
    slots = [np.asarray(v) for v in model.optimizer.slots]
    assert np.abs(slots[0]).max() > 0
    num_variables = len(model.optimizer.variables)
    mw.distribute(model, mw.Mirrored(precision="float16"))
    inner = model.optimizer.inner_optimizer
    assert len(inner.variables) == num_variables
    for new, old in zip(inner.slots, slots, strict=True):
        np.testing.assert_array_equal(np.asarray(new), old)
    reference = fit(make_model(), epochs=2)  # Keras' SGD with momentum is the same
    assert_near(fit(model), reference, 2e-3)


def test_training_goes_on_through_every_precision_near_float32() -> None:
    reference = fit(make_model(), epochs=4)
    model = fit(make_model())
    for precision in ("bfloat16", "float16", "float32"):
        fit(mw.distribute(model, mw.Hybrid(2, 2, 2, precision=precision)))
    start = make_model()
    moved = np.abs(reference.get_weights()[0] - start.get_weights()[0]).max()
    assert_near(model, reference, 2**-6 * moved)


def test_a_wrapper_of_the_users_own_stays() -> None:
    outer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.05), initial_scale=4.0
    )
    model = make_model(outer)
    for precision in ("float16", "bfloat16", "float32"):
        mw.distribute(model, mw.Mirrored(precision=precision))
        assert fit(model).optimizer is outer
    assert float(outer.dynamic_scale.value) == 4.0


def test_a_fixed_loss_scale_returns_with_float32() -> None:
    model = make_model(keras.optimizers.SGD(0.05, loss_scale_factor=8.0))
    inner = model.optimizer
    mw.distribute(model, mw.Mirrored(precision="float16"))
    assert inner.loss_scale_factor is None, "scaled once, by the wrapper"
    with keeping_precision(model):
        set_precision(model, "float32")
        assert model.optimizer is inner
    assert inner.loss_scale_factor is None
    mw.distribute(model, mw.Mirrored(precision="bfloat16"))
    assert model.optimizer is inner
    assert inner.loss_scale_factor == 8.0


def test_compiling_again_and_without_loss_scaling_is_respected() -> None:
    model = mw.distribute(make_model(), mw.Mirrored(precision="float16"))
    model.compile(optimizer="sgd", loss="mse")
    assert isinstance(fit(model).optimizer, keras.optimizers.LossScaleOptimizer)
    model.compile(optimizer="sgd", loss="mse", auto_scale_loss=False)
    assert isinstance(fit(model).optimizer, keras.optimizers.SGD)


def scale_of(model: keras.Model) -> tuple[float, int, int]:
    optimizer = model.optimizer
    return (
        float(optimizer.dynamic_scale.value),
        int(optimizer.step_counter.value),
        int(optimizer.iterations),
    )


def scales_of_steps(model: keras.Model) -> list[tuple[float, int, int]]:
    """Ten steps, the fourth of which overflows."""
    seen = []
    for step in range(10):
        factor = 1e6 if step == 3 else 1.0
        before = state(model)
        model.train_on_batch(X[:8] * factor, Y[:8])
        seen.append(scale_of(model))
        if step == 3:
            after = state(model)
            same = [k for k in before if np.array_equal(before[k], after[k])]
            changed = {k.split("/")[-1] for k in before.keys() - set(same)}
            assert "dynamic_scale" in changed
            assert changed <= {"dynamic_scale", "step_counter"}, "it is skipped"
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_the_loss_scale_of_float16_moves_as_in_stock_keras(split: str) -> None:
    def make() -> keras.Model:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        outer = keras.optimizers.LossScaleOptimizer(
            inner, initial_scale=2.0**24, dynamic_growth_steps=3
        )
        return make_model(outer)

    with global_policy("mixed_float16"):
        expected = scales_of_steps(make())
    scales = [scale for scale, _, _ in expected]
    assert scales[0] == 2.0**23, "the first step overflows"
    assert any(after == 2 * before for before, after in pairwise(scales)), "it grows"
    assert scales[3] == scales[2] / 2
    assert scales_of_steps(mw.distribute(make(), SPLITS[split]("float16"))) == expected
    with SPLITS[split]("float16").scope():
        model = make()
    assert scales_of_steps(model) == expected


def test_an_overflow_is_skipped_with_the_default_scale_too() -> None:
    model = mw.distribute(make_model(), mw.FSDP(8, precision="float16"))
    seen = scales_of_steps(model)
    assert [scale for scale, _, _ in seen] == [2.0**15] * 3 + [2.0**14] * 7
    assert seen[-1] == (2.0**14, 6, 9)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_verify_compares_in_low_precision_and_leaves_the_model_alone(
    precision: Any,
) -> None:
    model = fit(make_model(keras.optimizers.SGD(0.05, 0.9, loss_scale_factor=2.0)))
    optimizer, before = model.optimizer, state(model)
    strategy = mw.Hybrid(2, 2, 2, precision=precision)
    found = mw.verify(model, X, Y, strategy, batch_size=8)
    assert found.ok
    assert found.precision == precision
    assert str(found).splitlines()[0].split() == [
        *("variable", "max", "|difference|", "relative", "allowed")
    ]
    assert str(found).endswith(
        f"{strategy!r}, 3 steps: equal to one device in {precision}; "
        "allowed is 4 x what other roundings of the weights change on one device"
    )
    largest = max(d.relative for d in found.differences)
    assert largest > verification.TOLERANCE, "it was not compared in float32"
    assert compute_dtypes(model) == {"float32"}
    assert model.optimizer is optimizer
    assert optimizer.loss_scale_factor == 2.0
    assert_same(state(model), before)
    assert mw.verify(model, X, Y, mw.Mirrored(), batch_size=8).precision == "float32"


def test_the_reference_of_verify_is_not_a_program_from_before() -> None:
    model, batch = make_model(), (X[:8], Y[:8])
    from_before = jax.jit(model.train_step)
    from_before.lower(training_state(model, batch), batch)
    set_precision(model, "bfloat16")
    step = verification._step_alone(model, mw.Plan())
    program = step.lower(training_state(model, batch), batch).as_text()
    assert operands_of_products(program) == {"bf16"}


def test_verify_puts_a_distributed_model_back_into_its_own_precision() -> None:
    model = fit(mw.distribute(make_model(), mw.FSDP(8, precision="float16")))
    optimizer, before = model.optimizer, state(model)
    for precision in ("bfloat16", None):
        strategy = mw.Mirrored(precision=precision)
        found = mw.verify(model, X, Y, strategy, batch_size=8)
        assert found.ok
        assert found.precision == (precision or "float16")
        assert compute_dtypes(model) == {"float16"}
        assert model.optimizer is optimizer
        assert_same(state(model), before)
        assert model.weights[0].value.sharding.shard_shape((8, 16)) == (8, 2)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_verify_names_a_wrong_gradient_in_low_precision(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooLarge(MeshStep):
        """Computes one update a quarter too large."""

        def __call__(self, state: Any, data: Any) -> Any:
            before = np.asarray(state[0][2])
            outputs, (first, *rest) = super().__call__(state, data)
            wrong = before + 1.25 * (np.asarray(first[2]) - before)
            first[2] = jax.device_put(wrong, first[2].sharding)
            return outputs, (first, *rest)

    monkeypatch.setattr(attach, "MeshStep", TooLarge)
    model = make_model(keras.optimizers.SGD(0.01))
    strategy = mw.Mirrored(precision=precision)
    found = mw.verify(model, X, Y, strategy, batch_size=8, steps=1)
    assert [d.path for d in found.failures] == [model.trainable_variables[2].path]


def test_verify_says_that_steps_which_are_all_skipped_compare_nothing() -> None:
    model = make_model()
    with pytest.raises(StrategyError) as caught:
        mw.verify(model, X * 1e6, Y, mw.Mirrored(precision="float16"), batch_size=8)
    assert str(caught.value).split("\n") == [
        "verify trained 3 steps in float16 on one device, and no weight moved.",
        "Steps whose gradients overflow are skipped, each halves the loss scale, and "
        "what is skipped cannot be compared.",
        "Pass more steps, smaller inputs, or a LossScaleOptimizer with a smaller "
        "initial_scale to compile.",
    ]
    assert compute_dtypes(model) == {"float32"}
    assert isinstance(model.optimizer, keras.optimizers.SGD)
