"""The exact memory of training steps, against the programs that `fit` compiles."""

import resource
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import meshwright as mw
from meshwright.devices.memory import StepMemory
from meshwright.errors import MemoryLimitError, ProfileError, StrategyError
from meshwright.models.profile import build_abstractly
from meshwright.strategies.attach import attached, place, step_over_mesh
from meshwright.train.exact_memory import (
    ExactMemory,
    _whatever_kernels_win,
    exact_memory,
)
from meshwright.train.mesh_step import training_state
from meshwright.train.stage_cut import StageCut

import jax
import keras
import numpy as np
import pytest

from conftest import FUSED_FOR_USERS

L = keras.layers
CPUS = [f"CPU:{i}" for i in range(8)]
BATCH = 16

Case = Callable[[], tuple[keras.Model, Any]]
"""Makes a compiled model, and a batch for it."""


def cnn() -> tuple[keras.Model, Any]:
    layers = [
        keras.Input((12, 12, 3)),
        L.Conv2D(16, 3, use_bias=False),
        L.BatchNormalization(),
        L.ReLU(),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dropout(0.25),
        L.Dense(8, activation="softmax"),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model, (np.zeros((BATCH, 12, 12, 3), "float32"), np.zeros(BATCH, "int32"))


def lstm() -> tuple[keras.Model, Any]:
    words = keras.Input((12,), dtype="int32")
    hidden = L.LSTM(32)(L.Embedding(96, 32)(words))
    model = keras.Model(words, [L.Dense(1, name="one")(hidden), L.Dense(8)(hidden)])
    model.compile("rmsprop", ["mse", "mae"])
    y = [np.zeros((BATCH, size), "float32") for size in (1, 8)]
    return model, (np.zeros((BATCH, 12), "int32"), y)


def transformer() -> tuple[keras.Model, Any]:
    tokens = keras.Input((16,), dtype="int32")
    x = L.Embedding(64, 32)(tokens)
    h = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(4, 8)(h, h, use_causal_mask=True)
    h = L.LayerNormalization()(x)
    x = x + L.Dense(32)(L.Dense(128, activation="gelu")(h))
    model = keras.Model(tokens, L.Dense(64)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adamw", loss)
    return model, (np.zeros((BATCH, 16), "int32"),) * 2


def unet() -> tuple[keras.Model, Any]:
    convolve = partial(L.Conv2D, kernel_size=3, padding="same", activation="relu")
    image = keras.Input((16, 16, 1))
    fine = convolve(8)(image)
    coarse = convolve(16)(L.MaxPooling2D()(fine))
    back = L.Conv2DTranspose(8, 2, strides=2)(coarse)
    joined = convolve(8)(L.Concatenate()([fine, back]))
    model = keras.Model(image, L.Conv2D(1, 1, activation="sigmoid")(joined))
    model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC()])
    return model, (np.zeros((BATCH, 16, 16, 1), "float32"),) * 2


def measured(model: Any, strategy: Any, **options: Any) -> ExactMemory:
    found = exact_memory(model, strategy.plan, strategy.mesh, **options)
    assert sum(found.by_kind.values()) == found.bytes_per_device
    return found


def refused(model: Any, batch: Any, strategy: Any) -> MemoryLimitError:
    """What `fit` says of the very program that it would run."""
    mw.configure(memory_limit=1)
    with pytest.raises(MemoryLimitError) as caught:
        mw.distribute(model, strategy).fit(*batch, batch_size=BATCH, verbose=0)
    return caught.value


STRATEGIES: list[tuple[Case, Callable[[], Any]]] = [
    (cnn, lambda: mw.FSDP(devices=CPUS[:4], precision="float16", remat=True)),
    (transformer, lambda: mw.TensorParallel(2, devices=CPUS[:2])),
    (unet, lambda: mw.Single("CPU:0", accumulate=3)),
]
MORE_STRATEGIES: list[tuple[Case, Callable[[], Any]]] = [
    (cnn, lambda: mw.Single("CPU:0")),
    (cnn, lambda: mw.Mirrored(CPUS, precision="bfloat16")),
    (lstm, lambda: mw.FSDP(devices=CPUS[:4], accumulate=2)),
    (transformer, lambda: mw.Hybrid(data=2, fsdp=2, tensor=2, devices=CPUS)),
    (unet, lambda: mw.FSDP(devices=CPUS[:4])),
]


@pytest.mark.parametrize(
    ("make", "make_strategy"),
    [
        *STRATEGIES,
        *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE_STRATEGIES),
    ],
)
def test_it_is_what_the_step_of_fit_needs(
    make: Case, make_strategy: Callable[[], Any]
) -> None:
    """Shapes of the batch are those that the model and its loss imply."""
    (model, batch), strategy = make(), make_strategy()
    found = measured(model, strategy, batch_size=BATCH)
    real = refused(model, batch, strategy)
    assert found.by_kind == real.by_kind
    assert found.bytes_per_device == real.needed


PIPELINES: list[tuple[Case, Callable[[], Any]]] = [
    (transformer, lambda: mw.Pipeline(2, 4, devices=CPUS[:2])),
    (cnn, lambda: mw.Pipeline(2, 3, "gpipe", devices=CPUS[:2], remat=True)),
    (
        transformer,
        lambda: mw.Hybrid(fsdp=2, stages=2, microbatches=2, devices=CPUS[:4]),
    ),
]


@pytest.mark.parametrize(("make", "make_strategy"), PIPELINES)
def test_of_a_pipeline_the_stage_that_needs_most_counts(
    make: Case, make_strategy: Callable[[], Any]
) -> None:
    (model, batch), strategy = make(), make_strategy()
    found = measured(model, strategy, batch_size=BATCH)
    place(model, strategy)
    cut = StageCut(model.name, strategy.plan)
    step: Any = step_over_mesh(model, jax.jit(model.train_step), strategy, cut)
    real = step.memory(training_state(model, batch), batch)
    totals = [stage.total for stage in real]
    assert [sum(kinds.values()) for kinds in found.by_stage] == totals
    assert found.bytes_per_device == max(totals)
    assert found.by_kind == real[found.stage].by_kind()
    weights = sum(kinds["parameters"] for kinds in found.by_stage)
    held = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    assert weights * strategy.plan.fsdp == held
    assert weights == sum(kinds["gradients"] for kinds in found.by_stage)


def test_weights_and_slots_are_counted_as_they_are_split() -> None:
    model = keras.Sequential([keras.Input((64,)), L.Dense(64, use_bias=False)])
    model.compile("adam", "mse")
    found = measured(model, mw.FSDP(devices=CPUS), batch_size=8)
    assert found.by_kind["parameters"] == 64 * 64 * 4 // 8
    counters = 2 * 4
    assert found.by_kind["optimizer state"] == 2 * 64 * 64 * 4 // 8 + counters
    assert found.by_kind["batch"] == 2 * 64 * 4
    assert found.by_kind["temporaries"] >= 64 * 64 * 4, "the gathered weight"
    assert found.largest


def test_machine_code_that_is_made_in_haste_needs_as_much() -> None:
    """As far as `fit` is concerned; tests are made in haste anyway."""
    model, batch = cnn()
    strategy = mw.FSDP(devices=CPUS[:4])
    found = measured(model, strategy, batch_size=BATCH)
    place(model, strategy)
    state = training_state(model, batch)
    step: Any = step_over_mesh(model, jax.jit(model.train_step), strategy)
    careful: dict[str, Any] = {"xla_backend_optimization_level": 3}
    careful |= FUSED_FOR_USERS
    compiled = step.lower(state, batch).compile(compiler_options=careful)
    assert StepMemory.of(compiled, {}).needed == found.bytes_per_device


def looks(model: Any) -> Any:
    """All that somebody may have made of a model, by identity where there is one."""
    parts = [model.optimizer, model._compile_loss, model._compile_metrics]
    variables = [*model.variables, *model.metrics_variables]
    variables += model.optimizer.variables
    return (
        [(id(part), part.built) for part in parts if part is not None],
        [(id(v), id(v._value), v._layout, v.trainable) for v in variables],
        [id(layer.dtype_policy) for layer in model._flatten_layers()],
        [model.train_function, model.test_function, model.predict_function],
        attached(model),
    )


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that nobody registered."""

    def __call__(self, step: Any) -> Any:
        return 0.1 * 0.5 ** keras.ops.cast(step, "float32")

    def get_config(self) -> dict[str, Any]:
        return {}


def restless() -> tuple[keras.Model, Any]:
    """Draws random numbers, keeps state, and makes variables late."""
    keras.utils.set_random_seed(5)
    hidden = L.Dropout(0.5)(L.BatchNormalization()(inputs := keras.Input((6,))))
    outputs = [L.Dense(2, name=n, activation="sigmoid")(hidden) for n in ("a", "b")]
    model = keras.Model(inputs, outputs)
    lazy = keras.metrics.AUC(multi_label=True, name="late")
    metrics = [[lazy, "accuracy"], [keras.metrics.AUC(name="early")]]
    model.compile(keras.optimizers.SGD(Halving()), ["mse", "mae"], metrics=metrics)
    rng = np.random.default_rng(0)
    y = [rng.integers(0, 2, (32, 2)).astype("float32") for _ in range(2)]
    return model, (rng.normal(size=(32, 6)).astype("float32"), y)


def of_half_precision() -> Any:
    return mw.FSDP(devices=CPUS[:2], precision="float16", accumulate=2)


def of_two_stages() -> Any:
    return mw.Pipeline(2, 2, devices=CPUS[2:4], precision="bfloat16")


@pytest.mark.parametrize(
    ("is_attached", "make_strategy"),
    [(False, of_half_precision), (True, of_two_stages)],
)
def test_the_model_stays_as_it_is_and_trains_as_without(
    is_attached: bool, make_strategy: Callable[[], Any]
) -> None:
    def trained(measures: bool) -> Any:
        (model, batch), histories = restless(), []
        if is_attached:
            mw.distribute(model, mw.Mirrored(CPUS[:2]))
        for _ in range(2):  # before it is first trained, and after that
            if measures:
                before = looks(model)
                measured(model, make_strategy(), batch_size=16)
                assert looks(model) == before
            histories.append(model.fit(*batch, batch_size=16, verbose=0).history)
        return histories, model.get_weights()

    (plain, weights), (again, same) = trained(False), trained(True)
    assert again == plain
    for one, two in zip(weights, same, strict=True):
        np.testing.assert_array_equal(one, two)


def decoder(blocks: int, width: int, hidden: int) -> keras.Model:
    tokens = keras.Input((32,), dtype="int32")
    x = L.Embedding(1024, width)(tokens)
    for _ in range(blocks):
        h = L.RMSNormalization()(x)
        x = x + L.MultiHeadAttention(16, width // 16)(h, h, use_causal_mask=True)
        h = L.Dense(hidden, activation="gelu")(L.RMSNormalization()(x))
        x = x + L.Dense(width)(h)
    model = keras.Model(tokens, L.Dense(1024)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def test_a_model_of_two_billion_parameters_is_measured_without_being_made() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build_abstractly(lambda: decoder(2, 8192, 49_152))
    parameters = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert parameters > 2e9
    found = measured(model, mw.FSDP(devices=CPUS), batch_size=8)
    assert found.by_kind["parameters"] == pytest.approx(parameters * 4 / 8, rel=0.01)
    assert found.by_kind["optimizer state"] == pytest.approx(parameters, rel=0.01)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 1_000_000, "KiB"


def test_a_model_without_values_needs_what_it_would_with_them() -> None:
    abstract, concrete = build_abstractly(lambda: cnn()[0]), cnn()[0]
    for strategy in (
        mw.FSDP(devices=CPUS[:2], accumulate=2, precision="bfloat16"),
        mw.Pipeline(2, 2, devices=CPUS[:2]),
    ):
        found = measured(abstract, strategy, batch_size=BATCH)
        assert found == measured(concrete, strategy, batch_size=BATCH)


MIB = 2**20


def test_fit_needs_room_for_batches_ahead_and_for_trials_of_kernels() -> None:
    kinds = {"parameters": 4000 * MIB, "batch": 100 * MIB, "temporaries": 3000 * MIB}
    found = ExactMemory(by_stage=(kinds,))
    assert found.bytes_in_use == (7100 + 300) * MIB
    same = ExactMemory(by_stage=(kinds,), trials=2900 * MIB)
    assert same.bytes_in_use == found.bytes_in_use, "the step takes more than they do"
    more = ExactMemory(by_stage=(kinds,), trials=6000 * MIB)
    assert more.bytes_in_use == (4100 + 6000 + 300) * MIB


def test_small_batches_are_counted_in_stacks() -> None:
    stacked = ExactMemory(by_stage=({"batch": 5 * MIB},))
    assert stacked.bytes_in_use == 5 * MIB + 4 * 3 * 5 * MIB
    alone = ExactMemory(by_stage=({"batch": 9 * MIB},))
    assert alone.bytes_in_use == 4 * 9 * MIB
    assert ExactMemory(by_stage=({"parameters": 7},)).bytes_in_use == 7


def test_what_the_allocator_leaves_in_pieces_is_kept_spare() -> None:
    small = ExactMemory(by_stage=({"temporaries": 1000 * MIB},))
    assert small.bytes_to_run == 1128 * MIB, "it leaves up to 128 MiB of a piece"
    large = ExactMemory(by_stage=({"temporaries": 99000 * MIB},))
    assert large.bytes_to_run == 100000 * MIB


class _Lowered:
    """A step for a GPU: what it needs depends on who computes its products."""

    def __init__(self, unknown: str | None = None) -> None:
        self._unknown = unknown

    def compile(self, compiler_options: dict[str, Any]) -> Any:
        assert compiler_options["xla_gpu_autotune_level"] == 0, "nothing runs"
        if self._unknown in compiler_options:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such option")
        temporaries = 1000 if len(compiler_options) == 1 else 3000
        analysis = SimpleNamespace(
            argument_size_in_bytes=0,
            temp_size_in_bytes=temporaries,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
        )
        text = "HloModule jit_run\n\nENTRY %main () -> () {\n}\n"
        return SimpleNamespace(memory_analysis=lambda: analysis, as_text=lambda: text)


@pytest.mark.parametrize("unknown", [None, "xla_gpu_experimental_autotune_backends"])
def test_products_are_counted_with_the_kernels_that_need_more(
    unknown: str | None,
) -> None:
    found = _whatever_kernels_win(_Lowered(unknown), {})
    assert found.by_kind["temporaries"] == 3000


def test_what_an_xla_cannot_be_asked_for_is_left_out() -> None:
    assert _whatever_kernels_win(_Unaskable(), {}).by_kind["temporaries"] == 1000


class _Unaskable(_Lowered):
    def compile(self, compiler_options: dict[str, Any]) -> Any:
        if len(compiler_options) > 1:
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such option")
        return super().compile(compiler_options)


def test_data_may_be_shown_instead_of_inferred() -> None:
    model, (x, y) = cnn()
    strategy = mw.Single("CPU:0")
    weights = np.ones(BATCH, "float32")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, y))
    inferred = measured(model, strategy, batch_size=BATCH)
    assert measured(model, strategy, data=shapes) == inferred
    some = measured(model, strategy, batch_size=BATCH, data=(x[:3], y[:3]))
    assert some == inferred
    weighted = measured(model, strategy, data=(x, y, weights))
    more = weighted.by_kind["batch"] - inferred.by_kind["batch"]
    assert more == weights.nbytes


def test_what_fit_refuses_is_refused_here() -> None:
    model, _ = transformer()
    strategy = mw.Pipeline(2, 4, devices=CPUS[:2])
    with pytest.raises(StrategyError, match="was to be cut into 4 microbatches"):
        measured(model, strategy, batch_size=2)
    model = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    with pytest.raises(ProfileError, match="is not compiled"):
        measured(model, strategy, batch_size=8)
