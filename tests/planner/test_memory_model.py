"""Memory by arithmetic, against the compiler's own account and closed forms."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.models import blocks
from meshwright.models.flattening import flatten
from meshwright.models.formulations import Platform
from meshwright.models.kernels import flattened, make_kernels, renewed_values
from meshwright.models.operations import (
    ALL_GATHER,
    ALL_REDUCE,
    MAKE_WHOLE,
    FlatProgram,
)
from meshwright.models.profile import build_abstractly
from meshwright.models.training import (
    SAMPLES,
    TrainingStep,
    trace_loss,
    trace_training,
)
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.plan import Plan
from meshwright.planner.accumulating import LOOP, accumulated
from meshwright.planner.liveness import LivesBySize
from meshwright.planner.memory import MemoryEstimate, MemoryModel
from meshwright.planner.partitioning import (
    COPY,
    JOIN,
    InputSplit,
    Partitioned,
    partition,
)
from meshwright.planner.pipelining import (
    CutStep,
    Shares,
    TracedPieces,
    cut_evenly,
    starts_of,
)
from meshwright.planner.scratch import (
    KERNEL_WORKSPACE,
    LIBRARY_WORKSPACE,
    Scratch,
)
from meshwright.planner.splitting import divide
from meshwright.train.exact_memory import exact_memory

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

L = keras.layers
PLATFORMS: list[Platform] = ["cpu", "gpu"]


def mlp() -> keras.Model:
    layers = [L.Dense(256, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, L.Dense(16)], name="mlp")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def cnn() -> keras.Model:
    layers = [
        keras.Input((16, 16, 3)),
        L.Conv2D(16, 3, use_bias=False),
        L.BatchNormalization(),
        L.ReLU(),
        L.Conv2D(32, 3, activation="relu"),
        L.GlobalAveragePooling2D(),
        L.Dense(8),
    ]
    model = keras.Sequential(layers, name="cnn")
    model.compile("adam", "mse")
    return model


def transformer() -> keras.Model:
    tokens = keras.Input((16,), dtype="int32")
    x = L.Embedding(64, 32)(tokens)
    h = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(4, 8)(h, h, use_causal_mask=True)
    h = L.LayerNormalization()(x)
    x = x + L.Dense(32)(L.Dense(128, activation="gelu")(h))
    model = keras.Model(tokens, L.Dense(64)(x), name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def tagger() -> keras.Model:
    """Nearly all of it is a table, of which a batch wants a few rows."""
    layers = [keras.Input((8,), dtype="int32"), L.Embedding(8192, 64), L.Dense(4)]
    model = keras.Sequential(layers, name="tagger")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def deep() -> keras.Model:
    layers = [L.Dense(256, activation="tanh", name=f"dense_{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((64,)), *layers], name="deep")
    model.compile("adam", "mse")
    return model


class Known:
    """A model, what it is estimated to need, and how often it was traced."""

    def __init__(self, make: Callable[[], keras.Model], platform: Platform) -> None:
        """Builds the model without values."""
        self.model = build_abstractly(make)
        self.traces: Counter[Any] = Counter()
        self.memory = MemoryModel(self.model, self._trace, platform)

    def _trace(self, precision: str | None, remat: bool) -> TrainingStep:
        self.traces[precision, remat] += 1
        return trace_training(self.model, precision=precision, remat=remat)

    def estimate(self, batch: int, **plan: Any) -> MemoryEstimate:
        """What a plan needs."""
        return self.memory.estimate(Plan(**plan), batch)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(prod(v.shape) for v in self.model.trainable_variables)


@pytest.fixture(scope="module")
def known() -> Callable[[Callable[[], keras.Model], Platform], Known]:
    found: dict[Any, Known] = {}

    def get(make: Callable[[], keras.Model], platform: Platform) -> Known:
        if (make, platform) not in found:
            found[make, platform] = Known(make, platform)
        return found[make, platform]

    return get


Get = Callable[[Callable[[], keras.Model], Platform], Known]

PIPELINE = Plan(stages=2, microbatches=4)
COMPILED: list[tuple[Callable[[], keras.Model], int, Plan]] = [
    *(
        (mlp, 512, plan)
        for plan in (
            Plan(),
            Plan(data=8),
            Plan(fsdp=8),
            Plan(tensor=2),
            Plan(accumulate=4),
            Plan(tensor=2, accumulate=4),
            Plan(data=2, fsdp=2, tensor=2),
            PIPELINE,
            Plan(data=2, stages=2, microbatches=4),
        )
    ),
    (deep, 4096, Plan(remat=True)),  # whatever this version of XLA makes of it
    *((cnn, 64, plan) for plan in (Plan(data=8), Plan(tensor=2), PIPELINE)),
    *((transformer, 64, plan) for plan in (Plan(fsdp=8), Plan(tensor=2), PIPELINE)),
    *((tagger, 64, plan) for plan in (Plan(fsdp=8), Plan(fsdp=8, accumulate=2))),
]


@pytest.mark.parametrize(
    ("make", "batch", "plan"),
    COMPILED,
    ids=[f"{make.__name__}-{plan.describe()}" for make, _, plan in COMPILED],
)
def test_the_estimate_is_close_to_what_the_compiler_says(
    known: Get, make: Callable[[], keras.Model], batch: int, plan: Plan
) -> None:
    each = known(make, "cpu")
    names = tuple(device.name for device in mw.devices("CPU"))
    mesh = make_mesh(plan, names[: plan.num_devices])
    exact = exact_memory(each.model, plan, mesh, batch).bytes_per_device
    assert each.memory.estimate(plan, batch).total == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("degree", [1, 2, 8])
def test_adam_takes_twelve_bytes_for_each_parameter(
    known: Get, platform: Platform, degree: int
) -> None:
    each = known(deep, platform)
    found = each.estimate(64, fsdp=degree)
    assert found.parameters == each.num_parameters * 4 // degree
    # The iteration and the rate are not split.
    assert found.optimizer == each.num_parameters * 8 // degree + 8
    replicated = each.estimate(64, data=degree)
    assert replicated.parameters == each.num_parameters * 4


@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_kinds_add_up(known: Get, platform: Platform) -> None:
    for plan in (Plan(), Plan(data=2, fsdp=2, tensor=2), Plan(accumulate=4), PIPELINE):
        found = known(mlp, platform).memory.estimate(plan, 512)
        kinds = found.by_kind()
        assert list(kinds) == [
            "parameters",
            "optimizer",
            "gradients",
            "activations",
            "temporaries",
            "batch",
            "other",
        ]
        assert found.total == sum(kinds.values())
        assert all(isinstance(n, int) and n >= 0 for n in kinds.values())


@pytest.mark.parametrize("platform", PLATFORMS)
def test_activations_and_data_grow_with_the_batch_and_state_does_not(
    known: Get, platform: Platform
) -> None:
    each = known(deep, platform)
    small, large = each.estimate(4096), each.estimate(4 * 4096)
    assert small.activations >= 8 * 4096 * 256 * 4
    assert large.activations == 4 * small.activations
    assert small.batch == 4096 * (64 + 256) * 4
    assert large.batch == 4 * small.batch
    assert (large.parameters, large.optimizer) == (small.parameters, small.optimizer)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_replicas_hold_their_part_of_the_batch(known: Get, platform: Platform) -> None:
    each = known(deep, platform)
    for axes in ({"data": 4}, {"fsdp": 4}, {"data": 2, "fsdp": 2}):
        found = each.estimate(4 * 4096, **axes)
        assert found.batch == each.estimate(4096).batch
        assert found.activations <= 1.2 * each.estimate(4096).activations


def test_a_batch_that_does_not_divide_is_split_as_far_as_it_does(known: Get) -> None:
    each = known(deep, "gpu")
    assert each.estimate(6, data=4).batch == each.estimate(3).batch
    assert each.estimate(7, data=4).batch == each.estimate(7).batch


def test_remat_keeps_fewer_activations_on_gpus(known: Get) -> None:
    each = known(deep, "gpu")
    plain, again = each.estimate(4096), each.estimate(4096, remat=True)
    assert again.activations < 0.6 * plain.activations
    assert again.total < plain.total
    assert again.parameters == plain.parameters


def test_remat_changes_nothing_where_xla_for_cpus_repeats_nothing_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "_JAX_FOR_CPUS", (99,))
    each = Known(deep, "cpu")
    assert each.estimate(4096, remat=True) == each.estimate(4096)


def test_remat_keeps_only_what_passes_between_stages(known: Get) -> None:
    for platform in PLATFORMS:
        each = known(deep, platform)
        pipeline = {"stages": 2, "microbatches": 4}
        again = each.estimate(4096, remat=True, **pipeline)
        assert again.activations < 0.3 * each.estimate(4096, **pipeline).activations


def test_state_in_the_memory_of_the_host_comes_to_a_gpu_weight_by_weight(
    known: Get,
) -> None:
    each = known(deep, "gpu")
    plain, away = each.estimate(4096), each.estimate(4096, offload=True)
    largest = 4 * max(prod(weight.shape) for weight in each.model.trainable_weights)
    assert away == replace(plain, optimizer=2 * largest), "Adam has two slots"
    on_cpu = known(deep, "cpu")
    assert on_cpu.estimate(4096, offload=True) == on_cpu.estimate(4096)


def reader() -> keras.Model:
    """An LSTM, which a single GPU leaves to cuDNN."""
    model = keras.Sequential([keras.Input((32, 16)), L.LSTM(64), L.Dense(1)])
    model.compile("adam", "mse")
    return model


def test_what_cudnn_keeps_of_an_lstm_and_works_in_counts_on_a_single_gpu(
    known: Get,
) -> None:
    each = known(reader, "gpu")
    alone, beside = each.estimate(256), each.estimate(512, data=2)
    kept, working = 20 * 32 * 256 * 64 * 4, 22 * 32 * 256 * 64 * 4
    assert alone.activations >= kept > beside.activations, "XLA divides loops only"
    assert alone.total >= kept + working + LIBRARY_WORKSPACE
    assert known(reader, "cpu").estimate(256).total < kept


def attentive() -> keras.Model:
    inputs = keras.Input((256, 32))
    h = L.MultiHeadAttention(8, 8)(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, L.Dense(1)(h))
    model.compile("adam", "mse")
    return model


def test_attention_in_half_precision_keeps_no_scores_on_gpus(known: Get) -> None:
    each = known(attentive, "gpu")
    scores = 64 * 8 * 256 * 256 * 2
    half = {"precision": "bfloat16"}
    assert each.estimate(64).activations > scores
    assert each.estimate(64, **half).activations < scores / 2
    assert each.estimate(128, data=2, **half).activations < scores / 2
    assert known(attentive, "cpu").estimate(64, **half).activations > scores


def test_half_precision_halves_activations_on_gpus(known: Get) -> None:
    each = known(deep, "gpu")
    whole, half = each.estimate(4096), each.estimate(4096, precision="bfloat16")
    assert half.activations == pytest.approx(whole.activations / 2, rel=0.05)
    assert (half.parameters, half.optimizer) == (whole.parameters, whole.optimizer)


def test_half_precision_is_computed_wider_on_cpus(known: Get) -> None:
    each = known(deep, "cpu")
    half = each.estimate(4096, precision="bfloat16")
    assert half == each.estimate(4096, precision="float32")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_microbatches_divide_activations_and_add_sums_of_gradients(
    known: Get, platform: Platform
) -> None:
    each = known(deep, platform)
    whole, cut = each.estimate(4 * 4096), each.estimate(4 * 4096, accumulate=4)
    assert cut.activations < 0.4 * whole.activations
    assert cut.batch == whole.batch
    assert cut.gradients >= each.num_parameters * 4


@pytest.mark.parametrize("platform", PLATFORMS)
def test_tensor_divides_what_it_splits(known: Get, platform: Platform) -> None:
    each = known(deep, platform)
    whole, split = each.estimate(4096), each.estimate(4096, tensor=2)
    biases = 4 * 256 * 4  # those of every other layer are whole
    assert split.parameters == (whole.parameters - biases) // 2 + biases
    assert whole.activations / 2 <= split.activations < whole.activations
    assert split.batch == whole.batch


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_stage_that_needs_most_is_told(known: Get, platform: Platform) -> None:
    each = known(deep, platform)
    whole = each.estimate(4096)
    for stages in (2, 4):
        found = each.estimate(4096, stages=stages, microbatches=8)
        assert found.parameters < 1.5 * whole.parameters / stages
        assert found.gradients == found.parameters
        assert found.optimizer == pytest.approx(2 * found.parameters, abs=8)


def test_a_schedule_that_keeps_all_microbatches_needs_more(known: Get) -> None:
    each = known(deep, "gpu")
    plan = {"stages": 2, "microbatches": 8}
    early = each.estimate(4096, schedule="1f1b", **plan)
    late = each.estimate(4096, schedule="gpipe", **plan)
    # All eight are kept, instead of two.
    assert late.activations > 3 * early.activations


def test_stages_are_cut_where_names_say(known: Get) -> None:
    each = known(deep, "gpu")
    plan = {"stages": 2, "microbatches": 4}
    even = each.estimate(512, **plan)
    uneven = each.estimate(512, cuts=("dense_1",), **plan)
    seven = 7 * (256 * 256 + 256) * 4
    assert uneven.parameters == seven > even.parameters


def test_more_pieces_than_there_are_are_refused(known: Get) -> None:
    each = known(deep, "gpu")
    most = sum(trace_loss(each.model).is_cuttable) + 1
    assert 8 <= most < 64
    with pytest.raises(PlanError) as caught:
        each.estimate(512, stages=64, microbatches=64)
    assert str(caught.value) == (
        "'deep' was to be cut into 64 pieces.\n"
        f"Its training step has {most} that can stand alone.\n"
        f"Use at most {most} stages x chunks."
    )


def test_stages_that_begin_nowhere_are_refused(known: Get) -> None:
    with pytest.raises(PlanError) as caught:
        known(deep, "gpu").estimate(512, stages=2, microbatches=2, cuts=("nope",))
    assert str(caught.value) == (
        "Stages of 'deep' were to begin at 'nope'.\n"
        "Each begins at a layer that computes something in the training step.\n"
        "Use the names of layers, as model.summary() shows them."
    )


def test_chunks_count_as_pieces(known: Get) -> None:
    with pytest.raises(PlanError, match="'deep' was to be cut into 64 pieces"):
        known(deep, "gpu").estimate(
            512, stages=32, microbatches=32, schedule="interleaved", chunks=2
        )


def test_a_step_is_traced_once_for_all_plans() -> None:
    each = Known(mlp, "gpu")
    for axes in ({"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"accumulate": 4}):
        for batch in (64, 128):
            each.estimate(batch, **axes)
    assert each.traces == {(None, False): 1}
    each.estimate(64, precision="bfloat16", remat=True)
    assert each.traces == {(None, False): 1, ("bfloat16", True): 1}


X = jax.ShapeDtypeStruct((SAMPLES, 16), "float32")
WIDE = jax.ShapeDtypeStruct((16, 64), "float32")
NARROW = jax.ShapeDtypeStruct((64, 16), "float32")


def flat(
    function: Callable[..., Any], *args: Any, platform: Platform = "cpu"
) -> FlatProgram:
    return flatten(jax.make_jaxpr(function)(*args).jaxpr, platform)


def two_layers(x: Any, wide: Any, narrow: Any) -> Any:
    return jnp.tanh(x @ wide) @ narrow


def test_columns_then_rows_are_added_up_once() -> None:
    program = flat(two_layers, X, WIDE, NARROW)
    x, wide, narrow = program.inputs
    found = divide(program, {wide: 1, narrow: 0})
    assert found.sums == frozenset(program.outputs)
    assert found.gathers == {}
    assert all(found.divided)
    first, tanh, second = (op.outputs[0] for op in program.operations)
    assert [found.dims[v] for v in (x, first, tanh)] == [None, 1, 1]
    assert second == program.outputs[0]


def test_what_is_not_split_stays_whole() -> None:
    program = flat(two_layers, X, WIDE, NARROW)
    found = divide(program, {})
    assert set(found.dims) == {None}
    assert found.sums == frozenset()
    assert not any(found.divided)


@pytest.mark.parametrize(
    ("function", "shape", "dim", "wanted", "is_sum"),
    [
        (lambda x: jnp.sin(x) * 2.0, (6, 8), 1, 1, False),
        (lambda x: x.T, (6, 8), 1, 0, False),
        (lambda x: jnp.sum(x, axis=1), (6, 8), 1, None, True),
        (lambda x: jnp.sum(x, axis=0), (6, 8), 1, 0, False),
        (lambda x: x[:3], (6, 8), 1, 1, False),
        (lambda x: x[:3], (6, 8), 0, None, False),
        (lambda x: jnp.tile(x[None], (5, 1, 1)) + 1.0, (6, 8), 1, 2, False),
        (lambda x: x.reshape(6, 2, 4) + 1.0, (6, 8), 1, 1, False),
        (lambda x: jnp.cumsum(x, axis=0), (6, 8), 1, 1, False),
        (lambda x: x[jnp.array([1, 2])], (6, 8), 1, 1, False),
        (lambda x: x[jnp.array([1, 2])], (6, 8), 0, None, True),
    ],
)
def test_splits_are_followed_through_operations(
    function: Callable[[Any], Any],
    shape: tuple[int, ...],
    dim: int,
    wanted: int | None,
    is_sum: bool,
) -> None:
    program = flat(function, jax.ShapeDtypeStruct(shape, "float32"))
    found = divide(program, {program.inputs[0]: dim})
    (made,) = program.outputs
    assert found.dims[made] == wanted
    assert (made in found.sums) == is_sum


def convolve(x: Any, w: Any, groups: int = 1) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


def test_convolutions_are_split_by_channels() -> None:
    image = jax.ShapeDtypeStruct((SAMPLES, 8, 8, 4), "float32")
    program = flat(convolve, image, jax.ShapeDtypeStruct((3, 3, 4, 6), "float32"))
    x, w = program.inputs
    (made,) = program.outputs
    assert divide(program, {w: 3}).dims[made] == 3
    assert divide(program, {w: 2}).sums == {made}
    assert divide(program, {x: 3}).sums == {made}
    assert divide(program, {x: 0}).dims[made] == 0
    depthwise = jax.ShapeDtypeStruct((3, 3, 1, 4), "float32")
    program = flat(lambda x, w: convolve(x, w, 4), image, depthwise)
    found = divide(program, {program.inputs[0]: 3})
    assert (found.dims[program.outputs[0]], found.sums) == (3, frozenset())


def test_of_two_splits_that_do_not_agree_one_is_made_whole() -> None:
    program = flat(jnp.matmul, WIDE, NARROW)
    left, right = program.inputs
    found = divide(program, {left: 0, right: 1})
    assert list(found.gathers) == [left]
    assert found.gathers[left] == [0]
    assert found.dims[program.outputs[0]] == 1
    agreeing = divide(program, {left: 1, right: 0})
    assert agreeing.gathers == {}
    assert agreeing.sums == frozenset(program.outputs)


def test_scattered_rows_are_split_as_their_table_is() -> None:
    rows = jax.ShapeDtypeStruct((SAMPLES,), "int32")

    def add(table: Any, rows: Any, x: Any) -> Any:
        return table.at[rows].add(x, mode="promise_in_bounds")

    program = flat(add, jax.ShapeDtypeStruct((100, 16), "float32"), rows, X)
    table, _, x = program.inputs
    (made,) = program.outputs
    assert divide(program, {table: 1}).dims[made] == 1
    assert divide(program, {x: 1}).dims[made] == 1


def parts_of(
    make: Callable[[], keras.Model],
    platform: Platform,
    is_split: bool = True,
    **axes: Any,
) -> tuple[TrainingStep, Partitioned, dict[int, int]]:
    """The step of a model whose weights and their slots are split alike."""
    step = trace_training(build_abstractly(make))
    program = flattened(step, platform)
    renewed = renewed_values(step, program)
    splits = [
        InputSplit(is_gathered=each.kind == "weight", **axes)
        if len(program.values[value].shape) == 2 and each.kind in ("weight", "slot")
        else InputSplit()
        for value, each in zip(program.inputs, step.inputs, strict=True)
    ]
    found = partition(program, splits, renewed, platform, sums_over_samples=is_split)
    return step, found, renewed


def names(parts: Partitioned) -> list[str]:
    return [op.name for op in parts.flat.operations]


def is_in_order(program: FlatProgram) -> bool:
    known = {*program.inputs, *program.constants}
    for operation in program.operations:
        if not known.issuperset(operation.inputs):
            return False
        known.update(operation.outputs)
    return known.issuperset(program.outputs)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_one_device_exchanges_nothing(platform: Platform) -> None:
    _, parts, _ = parts_of(deep, platform, is_split=False)
    ours = {ALL_GATHER, ALL_REDUCE, MAKE_WHOLE, COPY, JOIN}
    assert not ours.intersection(names(parts))
    assert not any(parts.by_tensor)
    assert not any(parts.by_fsdp)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_weights_are_gathered_before_they_are_used(platform: Platform) -> None:
    step, parts, _ = parts_of(deep, platform, fsdp=0)
    assert is_in_order(parts.flat)
    found = [op for op in parts.flat.operations if op.name == ALL_GATHER]
    assert len(found) == 8
    first = next(
        i for i, op in enumerate(parts.flat.operations) if op.sort == "product"
    )
    assert all(parts.flat.operations.index(op) < first for op in found)
    for operation in found:
        (part,), (whole,) = operation.inputs, operation.outputs
        assert parts.by_fsdp[part]
        assert not parts.by_fsdp[whole]
    slots = [
        value
        for value, each in zip(parts.flat.inputs, step.inputs, strict=True)
        if each.kind == "slot" and len(parts.flat.values[value].shape) == 2
    ]
    readers = {n for v in slots for n in parts.flat.values[v].readers}
    assert all(parts.flat.operations[n].name != ALL_GATHER for n in readers)


def test_on_cpus_what_is_gathered_along_other_dims_is_put_in_order() -> None:
    for platform, dim, copies in (("cpu", 0, 0), ("cpu", 1, 8), ("gpu", 1, 0)):
        _, parts, _ = parts_of(deep, platform, fsdp=dim)  # type: ignore[arg-type]
        assert names(parts).count(COPY) == copies


def test_updates_read_what_is_gathered_as_it_came_and_layers_its_copy() -> None:
    _, parts, _ = parts_of(deep, "cpu", fsdp=1)
    operations = parts.flat.operations
    for copy in (op for op in operations if op.name == COPY):
        updates = [
            ["jvp(" not in operations[n].scope for n in parts.flat.values[v].readers]
            for v in (copy.outputs[0], copy.inputs[0])
        ]
        of_copy, of_first = updates
        assert set(of_copy) == {False}
        assert of_first == [True, True], "the copying, and the update"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_rows_of_an_embedding_travel_and_not_the_sums_of_its_table(
    platform: Platform,
) -> None:
    _, parts, _ = parts_of(tagger, platform, fsdp=0)
    operations = parts.flat.operations
    (adding,) = (op for op in operations if op.name == "scatter-add")
    table, _, rows = adding.inputs
    assert all(parts.by_fsdp[value] for value in (table, adding.outputs[0]))
    assert [v for v, is_of_all in enumerate(parts.of_all) if is_of_all] == [rows]
    summed = {v for op in operations if op.name == ALL_REDUCE for v in op.inputs}
    assert adding.outputs[0] not in summed
    _, alike, _ = parts_of(tagger, platform)
    assert not any(alike.of_all), "replicas add up all of it"


def test_gradients_travel_together() -> None:
    _, on_cpu, _ = parts_of(deep, "cpu")
    groups = [op for op in on_cpu.flat.operations if op.name == ALL_REDUCE]
    assert sum(len(op.outputs) for op in groups) >= 16
    assert len(groups) <= 2, "the loss may be apart"
    _, on_gpu, _ = parts_of(deep, "gpu")
    groups = [op for op in on_gpu.flat.operations if op.name == ALL_REDUCE]
    assert len(groups) <= 4
    joined = [op for op in on_gpu.flat.operations if op.name == JOIN]
    assert max(len(op.inputs) for op in joined) >= 16
    assert is_in_order(on_cpu.flat)
    assert is_in_order(on_gpu.flat)


def test_the_factor_is_gathered_whose_split_the_result_does_not_want() -> None:
    def gradient(dy: Any, x: Any) -> Any:
        product = lax.dot_general(dy, x, (((0,), (0,)), ((), ())))
        return product.T * 0.1

    dy = jax.ShapeDtypeStruct((SAMPLES, 64), "float32")
    program = flat(gradient, dy, X, platform="gpu")
    (made,), (left, right) = program.outputs, program.inputs
    both = {left: 1, right: 1}
    assert list(divide(program, both, {made: 1}).gathers) == [right]
    assert list(divide(program, both, {made: 0}).gathers) == [left]


def checkpointed(x: Any, v: Any, w: Any) -> Any:
    def block(x: Any, v: Any, w: Any) -> Any:
        return jnp.sin(jnp.sin(x @ v) @ w)

    again = jax.checkpoint(block)
    return jnp.sum(again(again(x, v, w), v, w))


def test_what_is_computed_again_gathers_its_weights_again() -> None:
    square = [SQUARE, SQUARE]
    program = flat(jax.grad(checkpointed, (1, 2)), X, *square, platform="gpu")
    splits = [InputSplit()] + [InputSplit(fsdp=0, is_gathered=True)] * 2
    found = partition(program, splits, {}, "gpu", sums_over_samples=False)
    gathers = [op for op in found.flat.operations if op.name == ALL_GATHER]
    blocks = {op.waits_for for op in gathers}
    assert len(gathers) == 2 * len(blocks) == 6, "forwards, and for both blocks"
    assert is_in_order(found.flat)


def test_gpus_join_only_sums_that_each_wants_whole() -> None:
    _, alike, _ = parts_of(deep, "gpu")
    assert JOIN in names(alike)
    _, parts, _ = parts_of(deep, "gpu", fsdp=0)
    joined = [op for op in parts.flat.operations if op.name == JOIN]
    shapes = [parts.flat.values[v].shape for op in joined for v in op.inputs]
    assert not any(len(shape) == 2 for shape in shapes), "kernels are scattered"
    sums = [
        v for op in parts.flat.operations if op.name == ALL_REDUCE for v in op.outputs
    ]
    kernels = [v for v in sums if len(parts.flat.values[v].shape) == 2]
    assert len(kernels) == 8
    assert all(parts.by_fsdp[v] for v in kernels)


def test_what_is_joined_of_parts_along_tensor_is_a_part() -> None:
    _, parts, _ = parts_of(deep, "gpu", tensor=1)
    joined = [op.outputs[0] for op in parts.flat.operations if op.name == JOIN]
    large = [v for v in joined if parts.flat.values[v].size.number > 10_000]
    assert large
    assert all(parts.by_tensor[v] for v in large)


def test_what_travels_together_on_gpus_is_limited() -> None:
    def wide() -> keras.Model:
        layers = [L.Dense(2048, use_bias=False) for _ in range(4)]
        model = keras.Sequential([keras.Input((2048,)), *layers])
        model.compile("sgd", "mse")
        return model

    _, parts, _ = parts_of(wide, "gpu")  # 16 MiB each
    weight = (2048, 2048)
    for operation in parts.flat.operations:
        if operation.name == JOIN:
            joined = [parts.flat.values[v].shape for v in operation.inputs]
            assert joined.count(weight) <= 1
    assert names(parts).count(ALL_REDUCE) >= 4


def test_sums_that_tensor_splits_are_added_up_without_a_split_batch() -> None:
    program = flat(two_layers, X, WIDE, NARROW)
    splits = [InputSplit(), InputSplit(tensor=1), InputSplit(tensor=0)]
    found = partition(program, splits, {}, "cpu", sums_over_samples=False)
    assert names(found)[-1] == ALL_REDUCE
    assert names(found).count(ALL_REDUCE) == 1
    assert found.flat.outputs == found.flat.operations[-1].outputs
    by_tensor = [found.by_tensor[v] for v in found.flat.inputs]
    assert by_tensor == [False, True, True]
    crossed = [InputSplit(), InputSplit(tensor=1), InputSplit(tensor=1)]
    found = partition(program, crossed, {}, "cpu", sums_over_samples=False)
    assert names(found).count(MAKE_WHOLE) == 1
    assert is_in_order(found.flat)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_microbatches_make_a_loop_of_what_computes_gradients(
    platform: Platform,
) -> None:
    _, parts, _ = parts_of(deep, platform, fsdp=0)
    found = accumulated(parts)
    (loop,) = [op for op in found.flat.operations if op.name == LOOP]
    assert loop.inner is not None
    outside = [op for op in found.flat.operations if op is not loop]
    assert not any(op.sort == "product" for op in outside)
    inside = Counter(op.sort for op in loop.inner.operations)
    assert inside["product"] == 3 * 8 - 1
    assert sum(op.name == ALL_GATHER for op in outside) == 8, "once for all"
    assert ALL_GATHER not in [op.name for op in loop.inner.operations]
    assert is_in_order(found.flat)
    assert is_in_order(loop.inner)
    assert loop.params["num_carry"] >= 1
    carried = [found.flat.values[v] for v in loop.outputs]
    numbers = sum(v.size.number for v in carried if v.size.power == 0)
    weights = sum(prod(v.shape) for v in build_abstractly(deep).trainable_variables)
    assert numbers >= weights, "the sums of all gradients"
    assert len(found.by_fsdp) == len(found.by_tensor) == len(found.flat.values)
    assert len(found.flat.outputs) == len(parts.flat.outputs)


def most(
    function: Callable[..., Any],
    *args: Any,
    samples: int = 1024,
    platform: Platform = "gpu",
    renewed: dict[int, int] | None = None,
) -> Any:
    """What is alive at the most; `renewed` are outputs with inputs, by number."""
    program = flat(function, *args, platform=platform)
    pairs = {program.outputs[a]: program.inputs[b] for a, b in (renewed or {}).items()}
    whole = [InputSplit()] * len(program.inputs)
    parts = partition(program, whole, pairs, platform, sums_over_samples=False)
    return LivesBySize(parts, pairs, platform).at(samples).most(samples, 1, 1)


SQUARE = jax.ShapeDtypeStruct((16, 16), "float32")
TENSOR = 1024 * 16 * 4


def chain(x: Any, w: Any) -> Any:
    for _ in range(6):
        x = x @ w
    return jnp.sum(x)


def chain_that_comes_back(x: Any, w: Any) -> Any:
    kept = []
    for _ in range(6):
        x = jnp.sin(x @ w)
        kept.append(x)
    for each in kept[::-1]:
        x = jnp.sin(x @ w) * each
    return jnp.sum(x)


def sums_of_products(x: Any, w: Any) -> Any:
    total = jnp.zeros(())
    for _ in range(6):
        x = x @ w
        total += jnp.sum(x @ w)
    return total


def test_of_a_chain_two_tensors_are_alive_at_a_time() -> None:
    found = most(chain, X, SQUARE)
    assert found.total == pytest.approx(2 * TENSOR, rel=0.01)
    assert found.returned == 4


def test_what_is_wanted_later_stays_alive() -> None:
    assert most(chain_that_comes_back, X, SQUARE).total >= 6 * TENSOR


FUSES_CHAINS = jax.__version_info__ >= (0, 11, 1)
"""Whether XLA for CPUs computes products and what lies between them in one kernel."""


@pytest.mark.parametrize(
    "function",
    [
        chain,
        pytest.param(
            chain_that_comes_back,
            marks=pytest.mark.skipif(
                FUSES_CHAINS, reason="this XLA fuses all of it; the estimate is higher"
            ),
        ),
        sums_of_products,
    ],
)
def test_what_is_alive_is_what_the_compiler_of_this_cpu_needs(
    function: Callable[[Any, Any], Any],
) -> None:
    x = jax.ShapeDtypeStruct((1024, 16), "float32")
    analysis = jax.jit(function).lower(x, SQUARE).compile().memory_analysis()
    assert analysis is not None
    needed = analysis.temp_size_in_bytes
    found = most(function, X, SQUARE, platform="cpu").total
    assert found == pytest.approx(needed, rel=0.01, abs=256)


def test_results_lie_in_the_place_of_what_is_read_for_the_last_time() -> None:
    def run(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w) @ w)

    # The sine takes no room beside the product.
    assert most(run, X, SQUARE).total == pytest.approx(2 * TENSOR, rel=0.01)


def test_what_is_returned_is_told_apart() -> None:
    found = most(lambda x, w: x @ w, X, SQUARE)
    assert (found.total, found.returned) == (0, TENSOR)
    in_place = most(lambda x, w: jnp.sin(x @ w), X, SQUARE, renewed={0: 0})
    assert in_place.returned == 0
    assert in_place.rest == in_place.total == TENSOR


def test_large_products_on_gpus_get_a_workspace() -> None:
    big = jax.ShapeDtypeStruct((512, 512), "float32")
    x = jax.ShapeDtypeStruct((SAMPLES, 512), "float32")
    small = most(jnp.matmul, x, big, samples=64)
    large = most(jnp.matmul, x, big, samples=4096)
    assert small.total < 2**21, "parts of sums alone"
    assert large.total == LIBRARY_WORKSPACE
    on_cpu = most(jnp.matmul, x, big, samples=4096, platform="cpu")
    assert on_cpu.total == 0


def test_products_that_are_divided_where_they_are_summed_get_a_small_workspace() -> (
    None
):
    big = jax.ShapeDtypeStruct((512, 512), "float32")
    x = jax.ShapeDtypeStruct((SAMPLES, 512), "float32")
    made = make_kernels(flatten(jax.make_jaxpr(jnp.matmul)(x, big).jaxpr, "gpu"), "gpu")
    (product,) = made.kernels
    sizes = np.full(len(made.buffers), 1e9)
    whole = np.ones(len(made.buffers), int)
    assert LIBRARY_WORKSPACE in Scratch(made).needed(4096, sizes, whole).values()
    divided = whole.copy()
    divided[[*product.reads]] = 8  # Along the dim that is summed over.
    assert not +Scratch(made).needed(4096, sizes, divided)


def test_small_products_on_gpus_are_summed_in_parts() -> None:
    x = jax.ShapeDtypeStruct((SAMPLES, 1024), "float32")
    narrow = jax.ShapeDtypeStruct((1024, 128), "float32")
    made = 128 * 128 * 4
    assert most(jnp.matmul, x, narrow, samples=128).total == 16 * made
    flat_sums = jax.ShapeDtypeStruct((64, 128), "float32")
    x = jax.ShapeDtypeStruct((SAMPLES, 64), "float32")
    assert most(jnp.matmul, x, flat_sums, samples=128).total == 0


def test_kernels_of_convolutions_are_summed_up_with_room_of_their_own() -> None:
    def gradient(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(convolved(x, w) ** 2)

        return jax.grad(loss)(w)

    x = jax.ShapeDtypeStruct((SAMPLES, 4, 4, 8), "float32")
    w = jax.ShapeDtypeStruct((3, 3, 8, 8), "float32")
    found = {
        platform: most(gradient, x, w, platform=platform) for platform in PLATFORMS
    }
    assert found["gpu"].total - found["cpu"].total > KERNEL_WORKSPACE // 2


def convolved(x: Any, w: Any) -> Any:
    order = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=order)


def test_gradients_of_transposed_convolutions_move_what_they_read() -> None:
    def gradient(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            order = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=order)
            return jnp.sum(y**2)

        return jax.grad(loss)(w)

    x = jax.ShapeDtypeStruct((SAMPLES, 32, 32, 8), "float32")
    w = jax.ShapeDtypeStruct((2, 2, 8, 8), "float32")
    program = flat(gradient, x, w, platform="gpu")
    kernels = make_kernels(program, "gpu")
    sizes = [buffer.bytes.at(16) for buffer in kernels.buffers]
    needed = Scratch(kernels).needed(16, sizes, [1] * len(sizes))
    small = 16 * 32 * 32 * 8 * 4
    assert max(needed.values()) == 2 * (small + 4 * small) + KERNEL_WORKSPACE


def test_a_loop_needs_what_its_largest_turn_needs() -> None:
    def loop(x: Any, w: Any, v: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            return (carry @ w) @ v, None

        return jnp.sum(lax.scan(turn, x, None, length=9)[0])

    found = most(loop, X, WIDE, NARROW)
    assert found.total >= 4 * TENSOR, "the wide one inside"
    assert found.total < 8 * TENSOR, "not one for each turn"


def test_inputs_that_are_read_after_their_update_are_copied_on_cpus() -> None:
    def run(x: Any, w: Any) -> Any:
        return w * 2.0, jnp.sum(jnp.tanh(x @ w), axis=1)

    found = {
        platform: most(run, X, SQUARE, samples=4, platform=platform, renewed={0: 1})
        for platform in PLATFORMS
    }
    assert found["cpu"].total - found["gpu"].total == 16 * 16 * 4


def staged_pieces(
    number: int, platform: Platform = "gpu", remat: bool = False
) -> TracedPieces:
    staged = trace_loss(build_abstractly(deep))
    starts = cut_evenly(staged, number)
    assert starts is not None
    return TracedPieces(staged, starts, platform, remat=remat)


def cut_step(pieces: TracedPieces, split: InputSplit | None = None) -> CutStep:
    splits = [
        split
        if split is not None and each.role == "weight" and len(aval.shape) == 2
        else InputSplit()
        for each, aval in zip(
            pieces.staged.inputs, pieces.staged.program.in_avals, strict=True
        )
    ]
    return CutStep(pieces, splits, sums_over_samples=False)


ALONE = Shares(samples=128, size=128, fsdp=1, tensor=1, has_several=False)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_pieces_sum_up_the_gradients_of_their_weights(platform: Platform) -> None:
    pieces = staged_pieces(4, platform)
    cut = cut_step(pieces)
    needs = [cut.needs(piece, ALONE) for piece in range(4)]
    weights = sum(prod(v.shape) for v in build_abstractly(deep).trainable_variables)
    assert cut.num_pieces == 4
    assert sum(each.gradients for each in needs) == weights * 4
    assert all(each.kept > 0 for each in needs)
    assert all(each.working >= 0 for each in needs)
    read = [each for piece in range(4) for each in cut.reads(piece)]
    assert sum(each.role == "weight" for each in read) == 16


def test_what_pieces_keep_grows_with_the_microbatch() -> None:
    cut = cut_step(staged_pieces(2))
    twice = ALONE._replace(samples=256, size=256)
    for piece in range(2):
        small, large = (cut.needs(piece, shares) for shares in (ALONE, twice))
        assert large.kept == pytest.approx(2 * small.kept, rel=0.01)
        assert large.gradients == small.gradients


def test_pieces_that_compute_again_keep_what_they_were_sent() -> None:
    again = cut_step(staged_pieces(2, remat=True))
    plain = cut_step(staged_pieces(2))
    # The first gets 64 numbers of a sample, the last 256 and as many targets.
    assert again.needs(0, ALONE).kept == pytest.approx(128 * 64 * 4, rel=0.01)
    assert again.needs(1, ALONE).kept == pytest.approx(128 * 512 * 4, rel=0.01)
    for piece in range(2):
        assert again.needs(piece, ALONE).kept < plain.needs(piece, ALONE).kept
        assert again.needs(piece, ALONE).working > plain.needs(piece, ALONE).working


def test_pieces_divide_gradients_and_keep_gathered_weights() -> None:
    pieces = staged_pieces(2)
    split = cut_step(pieces, InputSplit(fsdp=0, is_gathered=True))
    alone, shared = ALONE, ALONE._replace(fsdp=4, has_several=True)
    matrices = sum(
        prod(aval.shape) * 4
        for n in pieces.parts[1].arguments
        for aval in (pieces.staged.program.in_avals[n],)
        if pieces.staged.inputs[n].role == "weight" and len(aval.shape) == 2
    )
    whole, part = split.needs(1, alone), split.needs(1, shared)
    assert whole.gradients - part.gradients == pytest.approx(matrices * 3 / 4)
    assert part.kept - whole.kept == pytest.approx(matrices)


def test_pieces_that_cannot_be_are_not_found() -> None:
    staged = trace_loss(build_abstractly(deep))
    assert cut_evenly(staged, 64) is None
    assert starts_of(staged, ["dense_3", "nowhere"]) is None
    found = starts_of(staged, ["dense_3", "dense_6"])
    assert found is not None
    assert [staged.layers[n][-1] for n in found] == ["dense_3", "dense_6"]
    assert found == sorted(found)
    assert np.diff(found)[0] > 0
