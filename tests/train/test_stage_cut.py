"""Where a model is cut into stages, and what is refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import meshwright as mw
from meshwright.errors import MemoryLimitError, PlanError, StrategyError
from meshwright.models.stages import Input
from meshwright.parallel.plan import Plan
from meshwright.strategies.attach import cut_of
from meshwright.train.cut import Room
from meshwright.train.stage_cut import StageCut

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from tracing import staged_function, traced_training

CPUS = [f"CPU:{i}" for i in range(8)]
L = keras.layers


def table(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 6)).astype(np.float32)
    return x, rng.normal(size=(size, 4)).astype(np.float32)


def named(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    inner = keras.Sequential([keras.Input((8,)), L.Dense(8, name="deep")], name="inner")
    model = keras.Sequential(
        [
            *(keras.Input((6,)), L.Dense(8, name="first"), L.Dropout(0.5, name="drop")),
            *(inner, L.ReLU(name="bend"), L.Dense(4, name="head")),
        ],
        name="mine",
    )
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return model


def refusal(error: type[mw.errors.MeshwrightError], act: Callable[..., Any]) -> Any:
    with pytest.raises(error) as caught:
        act()
    return str(caught.value).split("\n")


def fit_refusal(model: keras.Model, strategy: Any, size: int = 8) -> Any:
    mw.distribute(model, strategy)
    x, y = table(size)
    return refusal(StrategyError, lambda: model.fit(x, y, batch_size=size, verbose=0))


def layers_of_model(names: list[str], model: keras.Model | None = None) -> Any:
    model = model or named()
    devices = CPUS[: len(names) + 1]
    mw.distribute(model, mw.Pipeline(names, microbatches=2, devices=devices))
    model.fit(*table(8), batch_size=8, verbose=0)
    return cut_of(model).layers


def test_stages_begin_at_the_layers_that_are_named() -> None:
    assert layers_of_model(["head"]) == [
        ["first", "drop", "inner", "bend"],
        ["head", "compile_loss"],
    ]
    assert layers_of_model(["drop", "bend"]) == [
        ["first"],
        ["drop", "inner"],
        ["bend", "head", "compile_loss"],
    ]


def test_a_stage_may_begin_at_a_layer_inside_of_a_model() -> None:
    assert layers_of_model(["deep"])[1] == ["inner", "bend", "head", "compile_loss"]


def test_a_pinned_cut_changes_where_weights_live() -> None:
    model = named()
    layers_of_model(["head"], model)
    devices = {
        variable.path: {d.id for d in variable._value.devices()}
        for variable in model.trainable_variables
    }
    kernels = [on for path, on in devices.items() if path.endswith("kernel")]
    assert kernels == [{0}, {0}, {1}]


def cut_through(model: keras.Model, **plan: Any) -> StageCut:
    cut = StageCut(model.name, Plan(**plan))
    cut.assign(traced_training(model, *table(8)).staged)
    return cut


def test_a_cut_says_why_and_how_much_each_piece_has_to_do() -> None:
    pinned = cut_through(named(), stages=2, cuts=("head",))
    assert pinned.because == "the cuts were given"
    assert sum(pinned.shares) == pytest.approx(1.0)
    assert pinned.shares[0] > 3 * pinned.shares[1]
    free = cut_through(named(), stages=2)
    assert max(free.shares) < pinned.shares[0]


class Deep(keras.layers.Layer):
    """Several products in one layer."""

    def build(self, shape: Any) -> None:
        self.kernels = [
            self.add_weight(shape=(shape[-1], shape[-1]), name=f"k{i}") for i in "abcd"
        ]

    def call(self, x: Any) -> Any:
        for kernel in self.kernels:
            x = keras.ops.matmul(x, kernel)
        return x


def plain_sum(y: Any, predicted: Any) -> Any:
    return keras.ops.sum(predicted)


def of_layers(*layers: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer="sgd", loss=plain_sum)
    return model


def test_cuts_are_between_layers_where_that_is_nearly_as_fast() -> None:
    wide = [L.Dense(256, activation="tanh") for _ in range(4)]
    cut = cut_through(of_layers(*wide), stages=2)
    assert cut.because == "the slowest piece is fastest, between layers"
    assert all(cut.layers)
    assert not set(cut.layers[0]) & set(cut.layers[1])


def test_cuts_are_inside_of_a_layer_where_that_is_faster() -> None:
    cut = cut_through(of_layers(L.Dense(256), Deep(name="deep")), stages=2)
    assert cut.because == "the slowest piece is fastest, also inside of layers"
    assert "deep" in cut.layers[0]
    assert "deep" in cut.layers[1]
    assert max(cut.shares) < 0.6


def test_more_stages_than_pieces_that_stand_alone_are_refused() -> None:
    staged = staged_function(lambda x: jnp.sin(x).sum(), ["data"], [np.ones(3)])
    cut = StageCut("mine", Plan(stages=3))
    assert refusal(StrategyError, lambda: cut.assign(staged)) == [
        "'mine' was to be cut into 3 pieces.",
        "Its training step has 2 that can stand alone: an operation is not cut, nor is "
        "what updates a state (BatchNorm, seeds).",
        "Use at most 2 stages x chunks.",
    ]
    found = StageCut("mine", Plan(stages=2)).assign(staged)
    assert [set(owner) for owner in found.owners] == [{0}, {1}]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("haed", "head"),
        ("frist", "first"),
        ("zzz", "first, drop, inner, deep, bend, head, compile_loss, mse"),
    ],
)
def test_an_unknown_layer_is_refused_with_near_misses(name: str, near: str) -> None:
    strategy = mw.Pipeline([name], microbatches=2, devices=CPUS[:2])
    assert fit_refusal(named(), strategy) == [
        f"A stage was to begin at {name!r}, which is no layer of 'mine'.",
        "Stages begin at layers that the training step computes.",
        f"Near misses: {near}.",
    ]


NO_CUT = (
    "There, the model cannot be cut: it is the beginning, or a state (that of "
    "BatchNorm, or of a dropout's seed) is read before and written after it."
)


def test_a_stage_cannot_begin_at_the_beginning() -> None:
    strategy = mw.Pipeline(["first"], microbatches=2, devices=CPUS[:2])
    assert fit_refusal(named(), strategy) == [
        "A stage was to begin at 'first' of 'mine'.",
        NO_CUT,
        "Begin the stage at another layer.",
    ]


def test_a_stage_cannot_begin_between_two_uses_of_one_seed() -> None:
    seeds = L.Dropout(0.5, name="drop")
    inputs = keras.Input((6,))
    hidden = L.Dense(8, name="middle")(seeds(L.Dense(8)(inputs)))
    model = keras.Model(inputs, L.Dense(4)(seeds(hidden)), name="twice")
    model.compile(optimizer="sgd", loss="mse")
    strategy = mw.Pipeline(["middle"], microbatches=2, devices=CPUS[:2])
    assert fit_refusal(model, strategy) == [
        "A stage was to begin at 'middle' of 'twice'.",
        NO_CUT,
        "Begin the stage at another layer.",
    ]


@pytest.mark.parametrize(
    ("names", "which", "change"),
    [
        (["head", "bend"], "'bend' does not begin after 'head'", "'bend', 'head'"),
        (["drop", "drop"], "'drop' does not begin after 'drop'", "'drop'"),
    ],
    ids=["wrong order", "twice"],
)
def test_pins_are_in_the_order_of_the_step(
    names: list[str], which: str, change: str
) -> None:
    strategy = mw.Pipeline(names, microbatches=2, devices=CPUS[:3])
    assert fit_refusal(named(), strategy) == [
        f"Stages of 'mine' were to begin at {', '.join(map(repr, names))}.",
        f"Each begins after the one before it in the training step, and {which}.",
        f"Name different layers in the order of the step: {change}.",
    ]


def test_a_step_that_writes_a_state_in_another_piece_is_refused() -> None:
    """The pieces are those of the training step; others may do something else."""
    args = [np.eye(3), np.eye(3), np.float64(1), np.ones((2, 3))]

    def early(first: Any, second: Any, state: Any, x: Any) -> Any:
        new = state * x.sum()
        return (jnp.sin(x @ first) @ second).sum(), new

    def late(first: Any, second: Any, state: Any, x: Any) -> Any:
        loss = (jnp.sin(x @ first) @ second).sum()
        return loss, state + loss

    roles: Any = ["weight", "weight", "state", "data"]
    training, other = (
        staged_function(each, roles, args, {1: 2}) for each in (early, late)
    )
    cut = StageCut("mine", Plan(stages=2))
    cut.assign(training)
    assert cut.stage(Input("weight", 1)) == 1
    assert cut.stage(Input("state", 0)) == 0
    assert refusal(StrategyError, lambda: cut.assign(other)) == [
        "A step of 'mine' updates a state in piece 1 that lives in piece 0.",
        "A state is read and written in one piece.",
        "Cut the model elsewhere, by the names of layers.",
    ]


def test_a_train_step_of_the_users_own_is_refused() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="mine")
            self.dense = L.Dense(4)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, state: Any, data: Any) -> Any:
            return super().train_step(state, data)

    model = Own()
    model.compile(optimizer="sgd", loss="mse")
    assert fit_refusal(model, mw.Pipeline(2)) == [
        "'mine', whose class Own has a train_step of its own, was to be trained in "
        "pieces on several devices.",
        "Pieces replace the training step, so it would not be called.",
        "Override compute_loss instead of train_step, or train the model whole: under "
        "Mirrored, FSDP or TensorParallel, or on one device.",
    ]


@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": False}])
def test_models_that_are_not_compiled_are_refused(option: Any) -> None:
    assert fit_refusal(named(**option), mw.Pipeline(2)) == [
        "'mine' was compiled with run_eagerly=True or jit_compile=False.",
        "A step over several devices is made of compiled programs.",
        "Compile the model without these, or train it on one device.",
    ]


def test_a_first_batch_with_fewer_samples_than_microbatches_is_refused() -> None:
    """Each time that it is tried; a tail may be small."""
    model = named()
    strategy = mw.Pipeline(2, microbatches=6, devices=CPUS[:2])
    for _ in range(2):
        assert fit_refusal(model, strategy, size=5) == [
            "A batch of 5 samples was to be cut into 6 microbatches.",
            "A microbatch has a sample at least.",
            "Use a batch size of at least 6, or microbatches=5.",
        ]
    x, y = table(5)
    assert len(refusal(StrategyError, lambda: model.fit(x, y, verbose=0))) == 3
    x, y = table(9)
    model.fit(x, y, batch_size=7, verbose=0)
    assert int(model.optimizer.iterations) == 2


def test_outputs_without_samples_are_refused_where_they_must_be_joined() -> None:
    class Summing(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.sum(x, axis=0)

    inputs = keras.Input((6,))
    model = keras.Model(inputs, Summing()(L.Dense(4)(inputs)), name="summing")
    model.compile(optimizer="sgd", loss=plain_sum)
    strategy = mw.Pipeline(2, microbatches=2, devices=CPUS[:2])
    assert fit_refusal(model, strategy, size=6) == [
        "microbatches was asked for 'summing', which has an output of shape (4,) for 3 "
        "samples.",
        "Outputs of microbatches are joined by sample, so each has one row per sample.",
        "Pass such values on with add_loss or a metric, or use microbatches=1.",
    ]


@pytest.mark.parametrize("strategy", [mw.Pipeline, mw.Layerwise])
@pytest.mark.parametrize(
    "stages", [1, 0, -2, True, 2.0, None, "head", [], ["head", 3], {"head"}], ids=repr
)
def test_stages_are_a_number_from_two_or_names(strategy: Any, stages: Any) -> None:
    assert refusal(PlanError, lambda: strategy(stages)) == [
        f"{strategy.__name__} received stages={stages!r}.",
        "It takes a number from 2, or a list of the names of the layers at which the "
        "second and later stages begin.",
        "Use, for example, stages=2 or stages=['head'].",
    ]


@pytest.mark.parametrize("strategy", [mw.Pipeline, mw.Layerwise])
@pytest.mark.parametrize("stages", [3, ("body", "head")], ids=str)
def test_stages_divide_the_devices(strategy: Any, stages: Any) -> None:
    assert refusal(PlanError, lambda: strategy(stages)) == [
        f"{strategy.__name__} received stages=3 for 8 devices.",
        "Spare devices become the data axis, so the degree divides their number: "
        "8 = 3 x 2 + 2.",
        "Use a degree that divides 8, or pass devices=[...].",
    ]


def test_names_of_layers_are_one_stage_fewer() -> None:
    plan = mw.Pipeline(("body", "mid", "head"), microbatches=8).plan
    assert (plan.stages, plan.data, plan.cuts) == (4, 2, ("body", "mid", "head"))
    alone = mw.Layerwise(["head"]).plan
    assert (alone.stages, alone.microbatches, alone.schedule) == (2, 1, "gpipe")
    assert mw.Hybrid(stages=2, data=4, cuts=["head"]).plan.cuts == ("head",)


def wide_in_front() -> keras.Model:
    """A table that takes memory and no time, then layers that take time."""
    layers = [L.Embedding(1000, 8, name="table"), L.Flatten(name="flat")]
    layers += [L.Dense(32, name=f"dense_{i}") for i in range(4)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers], name="wide")
    model.compile(optimizer="sgd", loss="mse")
    return model


def first_stage(room: Room | None, **plan: Any) -> tuple[list[str], str]:
    model = wide_in_front()
    data = np.zeros((8, 4), np.int32), np.zeros((8, 32), np.float32)
    cut = StageCut(model.name, Plan(**{"stages": 2, "microbatches": 1, **plan}))
    cut.assign(traced_training(model, *data).staged, room)
    return cut.layers[0], cut.because


def test_a_cut_keeps_stages_within_the_memory_of_a_device() -> None:
    """The table takes 32,000 bytes, and as much for its gradient; a layer 4,224."""
    fastest, because = first_stage(None)
    assert "dense_1" in fastest
    assert because == "the slowest piece is fastest, between layers"
    fitting, because = first_stage(Room(limit=70_000, copies=2))
    assert "dense_0" not in fitting
    assert because.startswith("the slowest piece is fastest, of those that fit, ")
    many = first_stage(Room(limit=70_000, copies=2), microbatches=8, schedule="gpipe")
    assert many == first_stage(None), "no estimate fits; the compiler will tell"


def test_an_operation_that_is_larger_than_a_device_is_refused() -> None:
    received, rule, change = refusal(
        MemoryLimitError, lambda: first_stage(Room(limit=40_000, copies=2))
    )
    assert received == (
        "jit in table of 'wide' needs 62.5 KiB for its weights, their gradients and "
        "optimizer state, and 0 B for what it makes of a microbatch; a device has "
        "39.1 KiB."
    )
    assert rule == "A stage has one operation at the least, so no cut helps."
    assert change == (
        "Split the stage's weights and batches over several devices with "
        "Hybrid(stages=, fsdp=) or Hybrid(stages=, tensor=), use more microbatches, or "
        "raise memory_limit."
    )


class Gate(keras.layers.Layer):
    """Python code that depends on data."""

    def call(self, x: Any) -> Any:
        if keras.ops.sum(x) > 0:
            return x
        return -x


class Converted(keras.layers.Layer):
    """NumPy code on data."""

    def call(self, x: Any) -> Any:
        return x * float(np.asarray(x).sum())


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        (Gate, "if keras.ops.sum(x) > 0:"),
        (Converted, "return x * float(np.asarray(x).sum())"),
    ],
)
@pytest.mark.parametrize(
    "make", [partial(mw.Pipeline, 2), mw.Mirrored], ids=["Pipeline", "Mirrored"]
)
def test_python_code_that_depends_on_data_is_refused_with_its_line(
    layer: Any, code: str, make: Any
) -> None:
    model = keras.Sequential([L.Dense(4), layer(), L.Dense(4)], name="mine")
    model.compile(optimizer="sgd", loss="mse")
    received, rule, change = fit_refusal(model, make(devices=CPUS[:2]))
    pattern = (
        r"'mine' asks for the values of a tensor while it is traced, in (.*), line "
    )
    found = re.fullmatch(pattern + r"\d+: '(.*)'\.", received)
    assert found is not None
    assert found[1] == __file__
    assert found[2] == code
    assert rule == (
        "A step is traced once and compiled for all batches, so if, while, int() and "
        "NumPy cannot depend on data."
    )
    assert change == (
        "Let the data choose by keras.ops.where, keras.ops.cond or "
        "keras.ops.while_loop."
    )
