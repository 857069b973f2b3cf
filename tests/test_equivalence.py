"""The battery: every strategy trains every model to the weights of one device.

The reference is stock Keras' own `fit` on one device, which knows nothing of meshes.
A new strategy is a new row in STRATEGIES, a new kind of model one in MODELS. Every
model meets the strategies in EVERYWHERE and three axes at once, those in CORE meet all.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import meshwright as mw
from meshwright.train.mesh_step import MeshStep, training_state

import jax
import keras
import numpy as np
import pytest

from local_workers import Nesterov, agreed, train_by_hand

CPUS = [f"CPU:{i}" for i in range(8)]

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")

STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: mw.Single("CPU:3"),
    "mirrored-1": lambda: mw.Mirrored(CPUS[:1]),
    "mirrored-2": lambda: mw.Mirrored(CPUS[:2]),
    "mirrored-3": lambda: mw.Mirrored(CPUS[:3]),
    "mirrored-4": lambda: mw.Mirrored(CPUS[:4]),
    "mirrored-8": lambda: mw.Mirrored(),
    "fsdp-2": lambda: mw.FSDP(devices=CPUS[:2]),
    "fsdp-3": lambda: mw.FSDP(devices=CPUS[:3]),
    "fsdp-4": lambda: mw.FSDP(devices=CPUS[:4]),
    "fsdp-8": lambda: mw.FSDP(),
    "fsdp-2-on-8": lambda: mw.FSDP(2),
    "tensor-2": lambda: mw.TensorParallel(2, devices=CPUS[:2]),
    "tensor-4": lambda: mw.TensorParallel(4, devices=CPUS[:4]),
    "tensor-8": lambda: mw.TensorParallel(8),
    "tensor-4-on-8": lambda: mw.TensorParallel(4),
    "hybrid-2-2-2": lambda: mw.Hybrid(data=2, fsdp=2, tensor=2),
    "central-3": lambda: mw.CentralStorage("CPU:5", CPUS[:3]),
    "auto": lambda: mw.Auto(),
}
EVERYWHERE = ("mirrored-3", "fsdp-4", "tensor-2", "central-3")
IN_SHORT = ("mirrored-3", "fsdp-4")
"""Those that all models meet in `make test`; the rest is in `make soak`."""


def images(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return (
        rng.normal(size=(size, 6, 6, 3)).astype(np.float32),
        rng.integers(0, 4, size).astype(np.int32),
    )


def words(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.integers(1, 12, (size, 5)).astype(np.int32)
    x[:, 3:] *= rng.integers(0, 2, (size, 2))  # zeros are masked
    return x, rng.integers(0, 4, size).astype(np.int32)


def tagged_words(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return words(size)[0], rng.integers(0, 4, (size, 5)).astype(np.int32)


def table(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return (
        rng.normal(size=(size, 8)).astype(np.float32),
        rng.integers(0, 4, size).astype(np.int32),
    )


def masks(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 8, 8, 3)).astype(np.float32)
    return x, rng.integers(0, 4, (size, 8, 8)).astype(np.int32)


def features(size: int) -> tuple[Any, Any]:
    x, _ = table(size)
    return x, x


def encounters(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = {key: rng.integers(0, 12, (size, 2), np.int32) for key in ("user", "item")}
    return x, rng.integers(0, 2, size).astype(np.float32)


def pairs(size: int) -> tuple[Any, Any]:
    left, right = table(size)[0], table(size + 1)[0][:size]
    same = np.random.default_rng(size).integers(0, 2, size).astype(np.float32)
    return (left, right), same


def two_targets(size: int) -> tuple[Any, Any]:
    x, y = table(size)
    return x, {"kind": y, "size": x[:, :2].sum(axis=1, keepdims=True)}


L = keras.layers


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), L.Dense(16, activation="relu"), L.Dense(4)]
    )


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            # No bias in front of BatchNorm: its gradient is zero but for rounding,
            # which Adam would blow up on one device as on many.
            *(L.Conv2D(8, 3, padding="same", use_bias=False), L.BatchNormalization()),
            *(L.ReLU(), L.MaxPooling2D(), L.Conv2D(4, 3, use_bias=False)),
            *(L.BatchNormalization(), L.Flatten(), L.Dense(8, activation="relu")),
            L.Dense(4),
        ]
    )


def dropout() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8,)),
            *(L.Dense(16, kernel_regularizer="l2"), L.Dropout(0.4), L.Dense(4)),
        ]
    )


def lstm() -> keras.Model:
    return keras.Sequential(
        [keras.Input((5,)), L.Embedding(12, 8, mask_zero=True), L.LSTM(8), L.Dense(4)]
    )


def transformer() -> keras.Model:
    inputs = keras.Input((5,))
    x = L.Embedding(12, 8)(inputs)
    attended = L.MultiHeadAttention(4, 2)(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(x + attended)
    mixed = L.Dense(8)(L.Dense(16, activation="gelu")(x))
    x = L.LayerNormalization()(x + mixed)
    return keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)))


def joined() -> keras.Model:
    """A layer used twice, branches that are joined, a spectral norm."""
    inputs = keras.Input((8,))
    shared = L.Dense(8)
    left, right = shared(shared(inputs)), L.Dense(8)(inputs)
    x = L.Concatenate()([left, right])
    return keras.Model(inputs, L.Dense(4)(L.SpectralNormalization(L.Dense(8))(x)))


class Ordered(keras.layers.Layer):
    """Returns a dict whose order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = L.Dense(4), L.Dense(4)

    def call(self, x: Any) -> Any:
        return {"z": self.first(x), "m": self.second(x)}


class FirstOfDict(keras.Model):
    """Takes the first entry of a layer's dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Ordered()

    def call(self, x: Any) -> Any:
        return next(iter(self.inner(x).values()))


class Subclassed(keras.Model):
    """Shares a layer, adds a loss, and has no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = L.Dense(8, activation="tanh")
        self.head = L.Dense(4)

    def call(self, x: Any) -> Any:
        hidden = self.shared(self.shared(x))
        self.add_loss(keras.ops.mean(keras.ops.square(hidden)))
        return self.head(hidden)


def grouped() -> keras.Model:
    """Convolutions in groups, whose gradients XLA adds up too often if left alone."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            *(L.Conv2D(8, 3, padding="same"), L.DepthwiseConv2D(3, depth_multiplier=2)),
            *(L.ReLU(), L.Conv2D(8, 3, padding="same", groups=4), L.ReLU()),
            *(L.SeparableConv2D(8, 3, padding="same"), L.Flatten(), L.Dense(4)),
        ]
    )


def unet() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    wide = L.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    narrow = L.Conv2D(16, 3, padding="same", activation="relu")(L.MaxPooling2D()(wide))
    deep = L.Conv2D(16, 3, padding="same", activation="relu")(L.MaxPooling2D()(narrow))
    up = L.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu")(deep)
    up = L.Concatenate()([up, narrow])
    up = L.Conv2DTranspose(8, 2, strides=2, padding="same", activation="relu")(up)
    return keras.Model(inputs, L.Conv2D(4, 1)(L.Concatenate()([up, wide])))


def tagger() -> keras.Model:
    """One output per word, whose mask reaches the loss."""
    return keras.Sequential(
        [keras.Input((5,)), L.Embedding(12, 8, mask_zero=True), L.Dense(4)]
    )


def two_tower() -> keras.Model:
    """Two inputs that share a table, and meet in a dot product."""
    inputs = {key: keras.Input((2,), name=key) for key in ("user", "item")}
    shared = L.Embedding(12, 8)
    towers = [L.Dense(8)(L.Flatten()(shared(each))) for each in inputs.values()]
    return keras.Model(inputs, L.Dot(axes=1)(towers))


class Sampling(keras.layers.Layer):
    """Draws from a normal distribution, and charges for its distance from N(0, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        ops = keras.ops
        distance = ops.square(mean) + ops.exp(log_variance) - log_variance - 1.0
        self.add_loss(0.05 * ops.mean(ops.sum(distance, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


def vae() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = L.Dense(16, activation="tanh")(inputs)
    code = Sampling()([L.Dense(4)(hidden), L.Dense(4)(hidden)])
    return keras.Model(inputs, L.Dense(8)(L.Dense(16, activation="tanh")(code)))


def siamese() -> keras.Model:
    """One encoder, used for both inputs; the output is their distance."""
    encoder = keras.Sequential(
        [keras.Input((8,)), L.Dense(16, activation="relu"), L.Dense(8)]
    )
    inputs = keras.Input((8,)), keras.Input((8,))
    left, right = map(encoder, inputs)
    squares = keras.ops.sum(keras.ops.square(left - right), axis=-1)
    return keras.Model(inputs, keras.ops.sqrt(squares + 1e-3))


def contrastive(same: Any, distance: Any) -> Any:
    apart = keras.ops.square(keras.ops.maximum(1.0 - distance, 0.0))
    return same * keras.ops.square(distance) + (1.0 - same) * apart


def two_headed() -> keras.Model:
    inputs = keras.Input((8,))
    hidden = L.Dense(16, activation="relu")(inputs)
    heads = {"kind": L.Dense(4, name="kind")(hidden), "size": L.Dense(1)(hidden)}
    return keras.Model(inputs, heads)


def frozen() -> keras.Model:
    still = keras.Sequential([L.Dense(16), L.BatchNormalization()])
    still.trainable = False
    layers = [still, L.ReLU(), L.Dense(8), L.BatchNormalization(), L.Dense(4)]
    return keras.Sequential([keras.Input((8,)), *layers])


def nested() -> keras.Model:
    """Models as layers of models, one of them twice."""
    inner = keras.Sequential([keras.Input((8,)), L.Dense(8), L.Dropout(0.2)])
    inputs = keras.Input((8,))
    block = keras.Model(inputs, L.Dense(8, activation="relu")(inner(inputs)) + inputs)
    outer = keras.Input((8,))
    return keras.Model(outer, L.Dense(4)(block(block(outer))))


def gru() -> keras.Model:
    both = L.Bidirectional(L.GRU(4, dropout=0.2))
    layers = [L.Embedding(12, 8, mask_zero=True), both, L.Dense(4)]
    return keras.Sequential([keras.Input((5,)), *layers])


def grouped_query() -> keras.Model:
    inputs = keras.Input((5,))
    x = L.Embedding(12, 8)(inputs)
    attention = L.GroupQueryAttention(4, num_query_heads=4, num_key_value_heads=2)
    x = L.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    return keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)))


class OwnLoss(Subclassed):
    """Computes its loss by itself."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        usual = super().compute_loss(x, y, y_pred, sample_weight, training)
        return usual + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))


class OwnStep(Subclassed):
    """Trains by a step of its own, written for JAX: it halves the gradients."""

    def train_step(self, state: Any, data: Any) -> Any:
        weights, others, slots, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

        def loss(weights: Any) -> Any:
            y_pred, new = self.stateless_call(weights, others, x)
            return self.compute_loss(x, y, y_pred, sample_weight), (y_pred, new)

        computed = jax.value_and_grad(loss, has_aux=True)(weights)
        (value, (y_pred, others)), gradients = computed
        halves = [0.5 * gradient for gradient in gradients]
        weights, slots = self.optimizer.stateless_apply(slots, halves, weights)
        return {"loss": value, "largest": abs(y_pred).max()}, (
            *(weights, others, slots, metrics),
        )


def classified() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"optimizer": momentum(), "loss": loss, "metrics": ["accuracy"]}


def momentum(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def two_losses() -> dict[str, Any]:
    return {
        "optimizer": momentum(),
        "loss": {"kind": classified()["loss"], "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": "accuracy"},
        "weighted_metrics": {"size": ["mae"]},
    }


@dataclass(frozen=True)
class Case:
    """A model, what it learns from, and what it is compiled with."""

    make: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]]
    compiled: Callable[[], dict[str, Any]] = classified


def with_loss(loss: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": momentum(), "loss": loss}


def with_optimizer(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {**classified(), "optimizer": make()}


def scaled() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(
        momentum(), initial_scale=64.0, dynamic_growth_steps=2
    )


MODELS = {
    "mlp": Case(mlp, table),
    "cnn": Case(cnn, images),
    "dropout": Case(dropout, table),
    "lstm": Case(lstm, words),
    "transformer": Case(transformer, words),
    "subclassed": Case(Subclassed, table),
    "joined": Case(joined, table),
    "dict": Case(FirstOfDict, table),
    "grouped": Case(grouped, images),
    "unet": Case(unet, masks),
    "tagger": Case(tagger, tagged_words),
    "two-tower": Case(
        two_tower,
        encounters,
        with_loss(keras.losses.BinaryCrossentropy(from_logits=True)),
    ),
    "vae": Case(vae, features, with_loss("mse")),
    "siamese": Case(siamese, pairs, with_loss(contrastive)),
    "two-headed": Case(two_headed, two_targets, two_losses),
    "frozen": Case(frozen, table),
    "nested": Case(nested, table),
    "gru": Case(gru, words),
    "grouped-query": Case(grouped_query, words),
    "clipped": Case(mlp, table, with_optimizer(lambda: momentum(global_clipnorm=0.1))),
    "averaged": Case(
        mlp,
        table,
        with_optimizer(lambda: momentum(use_ema=True, ema_overwrite_frequency=3)),
    ),
    "scaled": Case(mlp, table, with_optimizer(scaled)),
    "own-loss": Case(OwnLoss, table),
    "own-step": Case(OwnStep, table),
}
ASYNC_IN_SHORT = ("cnn",)
CORE = ("mlp", "cnn", "dropout")
OF_OPTIMIZERS = ("clipped", "averaged", "scaled", "own-step")
"""Models that ask more of an update than a gradient for each weight."""
LOOPED = (*CORE, "lstm")
"""Models that train in loops of steps in `make test`; all do in `make soak`."""


def build(name: str, optimizer: Any = None) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = MODELS[name].make()
    options = MODELS[name].compiled()
    model.compile(**options | ({"optimizer": optimizer} if optimizer else {}))
    return model


def train(model: keras.Model, name: str, size: int = 34, **options: Any) -> Any:
    x, y = MODELS[name].data(size)
    keras.utils.set_random_seed(11)
    return model.fit(
        x, y, **{"batch_size": 24, "epochs": 2, "verbose": 0, **options}
    ).history


@cache
def trained_alone(name: str) -> tuple[keras.Model, Any]:
    """The reference: a model after its training on one device, and the history."""
    model = build(name)
    return model, train(model, name)


def assert_equal_weights(ours: keras.Model, theirs: keras.Model, rtol: float) -> None:
    """Compares all variables, and those of the optimizer."""
    found, wanted = (
        [*model.variables, *model.optimizer.variables] for model in (ours, theirs)
    )
    for variable, reference in zip(found, wanted, strict=True):
        expected = np.asarray(reference.value)
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        np.testing.assert_allclose(
            np.asarray(variable.value),
            expected,
            atol=rtol * scale,
            err_msg=variable.path,
        )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        pytest.param(
            strategy,
            name,
            marks=()
            if name in CORE
            or strategy in IN_SHORT
            or (strategy == "central-3" and name in OF_OPTIMIZERS)
            else pytest.mark.soak,
        )
        for strategy in STRATEGIES
        for name in MODELS
        if strategy in EVERYWHERE or name in CORE
    ],
)
def test_two_epochs_with_a_tail_equal_one_device(strategy: str, name: str) -> None:
    reference, expected = trained_alone(name)
    model = mw.distribute(build(name), STRATEGIES[strategy]())
    history = train(model, name)
    assert_equal_weights(model, reference, 2e-5)
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)


PACKED = ("cnn", "dropout", "lstm", "own-step")
"""Models that are packed in `make test`; all are in `make soak`."""


def member(name: str, rate: float) -> keras.Model:
    """A model as `trained_alone` has it at the rate 0.05, ready for its shuffles."""
    model = build(name)
    model.optimizer.learning_rate = rate
    keras.utils.set_random_seed(11)
    return model


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in PACKED else pytest.mark.soak)
        for name in MODELS
        if name != "averaged"  # refused
    ],
)
def test_a_packed_member_equals_its_solo_run(name: str) -> None:
    reference, expected = trained_alone(name)
    trials = mw.packed_trials(
        lambda rate: member(name, rate),
        [0.01, 0.05, 0.02],
        *MODELS[name].data(34),
        epochs=2,
        batch_size=24,
        devices=CPUS[:2],
    )
    for ours, theirs in zip(trials[1].weights, reference.get_weights(), strict=True):
        scale = max(1.0, float(np.abs(theirs).max(initial=0)))
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * scale)
    assert trials[1].history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(trials[1].history[key], values, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ASYNC_IN_SHORT else pytest.mark.soak)
        for name in MODELS
        if name not in ("scaled", "own-step")  # these are refused
    ],
)
def test_asynchronous_updates_without_staleness_equal_one_device(name: str) -> None:
    """One device is given the batches of the workers, one after the other."""
    x, y = MODELS[name].data(48)
    starts = range(0, 48, 12)
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i : i + 12], (x, y)) for i in starts]
    reference, options = build(name), {"epochs": 2, "verbose": 0, "shuffle": False}
    keras.utils.set_random_seed(11)
    batches = (part for _ in range(3) for part in parts)
    expected = reference.fit(batches, steps_per_epoch=4, **options).history

    model = mw.distribute(build(name), mw.AsyncServer(0, CPUS[:2]))
    history = train(model, name, 48, shuffle=False)
    assert_equal_weights(model, reference, 2e-6)
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)


LOOP = {"size": 38, "batch_size": 4, "epochs": 1}
"""Nine whole batches, so many that a loop over them is not unrolled, and a rest."""


@cache
def trained_in_many_steps(name: str) -> tuple[keras.Model, Any]:
    model = build(name)
    return model, train(model, name, **LOOP)


@pytest.mark.parametrize(
    ("strategy", "name", "is_resident"),
    [
        *(
            pytest.param(
                "hybrid-2-2-2",
                name,
                True,
                marks=() if name in LOOPED else pytest.mark.soak,
            )
            for name in MODELS
        ),
        *((strategy, "mlp", True) for strategy in ("mirrored-8", "fsdp-4")),
        *(("mirrored-3", name, False) for name in ("dropout", "two-headed", "dict")),
        *(("hybrid-2-2-2", name, False) for name in ("mlp", "transformer")),
    ],
)
def test_many_steps_in_a_loop_equal_one_device_on_arrays_and_on_streams(
    strategy: str, name: str, is_resident: bool
) -> None:
    reference, expected = trained_in_many_steps(name)
    chosen = STRATEGIES[strategy]()
    chosen.resident = is_resident
    model = mw.distribute(build(name), chosen)
    history = train(model, name, **LOOP)
    assert_equal_weights(model, reference, 2e-5)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
    # Convolutions in groups have no fast code inside of loops on CPUs.
    together = "one by one" if name == "grouped" else "9 at a time"
    assert (together if is_resident else "4 at a time") in str(chosen.pace["fit"])


@pytest.mark.parametrize(("size", "most"), [(38, 3), (46, 4)], ids=["3+3+3", "4+4+3"])
def test_several_loops_in_an_epoch_go_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    reference = build("mlp")
    expected = train(reference, "mlp", **LOOP | {"size": size})
    monkeypatch.setattr("meshwright.train.pace.MOST_STEPS", most)
    strategy = mw.Mirrored(CPUS[:2])
    model = mw.distribute(build("mlp"), strategy)
    history = train(model, "mlp", **LOOP | {"size": size})
    assert f"{most} at a time" in str(strategy.pace["fit"])
    assert_equal_weights(model, reference, 2e-5)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("name", ["joined", "transformer", "lstm"])
def test_one_step_over_three_axes_equals_one_device(name: str, size: int) -> None:
    x, y = MODELS[name].data(size)
    reference = build(name)
    reference.train_on_batch(x, y)
    model = mw.distribute(build(name), STRATEGIES["hybrid-2-2-2"]())
    model.train_on_batch(x, y)
    assert_equal_weights(model, reference, 1e-6)


@pytest.mark.parametrize("strategy", ["mirrored-3", "fsdp-4", "tensor-4-on-8"])
def test_adam_equals_one_device(strategy: str) -> None:
    reference = build("cnn", keras.optimizers.Adam(0.01))
    train(reference, "cnn")
    adam = keras.optimizers.Adam(0.01)
    model = mw.distribute(build("cnn", adam), STRATEGIES[strategy]())
    train(model, "cnn")
    assert_equal_weights(model, reference, 1e-4)


MEMBERS = ("mlp", "dropout", "clipped", "joined")
"""Models of the same inputs and outputs, which differ in all else."""


def test_members_of_an_ensemble_equal_one_device() -> None:
    ensemble = mw.Ensemble([build(name) for name in MEMBERS], CPUS[2:6])
    histories = train_ensemble(ensemble, MEMBERS[0])
    for name, member, found in zip(MEMBERS, ensemble.members, histories, strict=True):
        reference, expected = trained_alone(name)
        assert_equal_weights(member, reference, 2e-5)
        assert found.history.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found.history[key], values, rtol=1e-4)


def train_ensemble(ensemble: mw.Ensemble, name: str) -> list[Any]:
    x, y = MODELS[name].data(34)
    keras.utils.set_random_seed(11)
    return ensemble.fit(x, y, batch_size=24, epochs=2, verbose=0)


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("strategy", ["mirrored-8", "hybrid-2-2-2"])
def test_gradients_of_one_step_for_every_remainder(strategy: str, size: int) -> None:
    def one_step(model: keras.Model) -> list[Any]:
        before = [np.asarray(w) for w in model.get_weights()]
        x, y = images(size)
        model.train_on_batch(x[:, 0, 0, :], y)
        after = model.get_weights()
        return [b - a for a, b in zip(before, after, strict=True)]

    def make() -> keras.Model:
        keras.utils.set_random_seed(5)
        # The epsilon keeps two samples from being divided by almost nothing.
        normal = L.BatchNormalization(epsilon=0.1)
        layers = [L.Dense(8, use_bias=False), normal, L.Dense(4)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(1.0), loss=loss)
        return model

    expected = one_step(make())
    found = one_step(mw.distribute(make(), STRATEGIES[strategy]()))
    largest = max(float(np.abs(g).max()) for g in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-6 * max(largest, 1.0)


@pytest.mark.parametrize("strategy", ["mirrored-8", "fsdp-2-on-8", "tensor-2"])
def test_evaluate_and_predict_are_exact_on_any_number_of_samples(strategy: str) -> None:
    model = build("cnn")
    train(model, "cnn", epochs=1)
    x, y = images(11)
    scores = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    outputs = model.predict(x, batch_size=4, verbose=0)
    mw.distribute(model, STRATEGIES[strategy]())
    ours = model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    assert ours == pytest.approx(scores, rel=1e-5)
    predicted = model.predict(x, batch_size=4, verbose=0)
    assert predicted.shape == (11, 4)
    np.testing.assert_allclose(predicted, outputs, atol=1e-5)


def test_sample_weights_class_weights_and_validation_are_exact() -> None:
    x, y = table(13)
    weights = np.linspace(0.1, 2.0, 13)
    options: dict[str, Any] = {"batch_size": 5, "epochs": 2, "verbose": 0}
    options |= {"validation_data": (x[:7], y[:7]), "shuffle": False}
    for extra in (
        {"sample_weight": weights},
        {"class_weight": {0: 2.0, 1: 1.0, 2: 0.5, 3: 1.0}},
    ):
        reference = build("mlp")
        expected = reference.fit(x, y, **options, **extra).history
        model = mw.distribute(build("mlp"), mw.Mirrored(CPUS[:3]))
        history = model.fit(x, y, **options, **extra).history
        assert_equal_weights(model, reference, 2e-5)
        np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-5)


def test_schedules_advance_once_per_step_whatever_the_device_count() -> None:
    def make() -> keras.Model:
        model = build("mlp")
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(decay), loss=loss)
        return model

    reference = make()
    train(reference, "mlp")
    model = mw.distribute(make(), mw.Mirrored())
    train(model, "mlp")
    assert int(model.optimizer.iterations) == int(reference.optimizer.iterations) == 4
    assert_equal_weights(model, reference, 2e-5)


LOCAL_MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mlp": ("mlp", momentum),
    "cnn": ("cnn", momentum),
    "dropout": ("dropout", momentum),
    "lstm": ("lstm", momentum),
    "adam": ("mlp", lambda: keras.optimizers.Adam(0.01)),
}
"""Optimizers keep a state of their own on each worker; BatchNorm sees its share."""


@pytest.mark.parametrize(
    ("name", "outer"),
    [
        *(("mlp", "average"), ("cnn", "diloco")),
        *(("dropout", "average"), ("adam", "diloco")),
        *(
            pytest.param(name, outer, marks=pytest.mark.soak)
            for name, outer in [
                *(("lstm", "average"), ("lstm", "diloco"), ("cnn", "average")),
                *(("adam", "average"), ("mlp", "diloco"), ("dropout", "diloco")),
            ]
        ),
    ],
)
def test_local_sgd_equals_workers_by_hand(name: str, outer: str) -> None:
    """Two epochs of 24 + 10 samples: 8, 8, 8 and then 4, 3, 3 on three workers."""
    model_name, make_optimizer = LOCAL_MODELS[name]
    x, y = MODELS[model_name].data(34)
    by_outer: dict[str, Any] = {
        "average": (None, None),
        "diloco": (
            keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True),
            Nesterov(0.7, 0.9),
        ),
    }
    optimizer, by_hand = by_outer[outer]
    expected = train_by_hand(
        lambda: build(model_name, make_optimizer()),
        *(x, y),
        num_workers=3,
        sync_every=3,
        batch_size=24,
        epochs=2,
        outer=by_hand,
    )
    strategy = mw.LocalSGD(3, optimizer, devices=CPUS[:3])
    model = mw.distribute(build(model_name, make_optimizer()), strategy)
    model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    for variable, value in zip(agreed(model), expected, strict=True):
        # Adam divides gradients near zero by their size, which makes rounding large.
        tolerance = 2e-4 if name == "adam" else 2e-5
        np.testing.assert_allclose(
            np.asarray(variable), value, atol=tolerance, err_msg=variable.path
        )


@pytest.mark.parametrize(
    ("size", "batch_size", "rest", "is_resident"),
    [(34, 4, 0.0, True), (25, 4, 0.0, False), (24, 6, 0.9, True)],
    ids=["arrays", "streams", "momentum"],
)
def test_local_sgd_that_agrees_after_every_step_equals_one_device(
    size: int, batch_size: int, rest: float, is_resident: bool
) -> None:
    """SGD is linear, with equal shares its momentum too: steps can be averaged."""
    options = {"size": size, "batch_size": batch_size, "epochs": 2}
    reference = build("mlp", keras.optimizers.SGD(0.05, momentum=rest))
    expected = train(reference, "mlp", **options)
    strategy = mw.LocalSGD(1, devices=CPUS[:3])
    strategy.resident = is_resident
    optimizer = keras.optimizers.SGD(0.05, momentum=rest)
    model = mw.distribute(build("mlp", optimizer), strategy)
    history = train(model, "mlp", **options)
    assert_equal_weights(model, reference, 1e-5)
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)


LEVERS: dict[str, Callable[..., Any]] = {
    "mirrored-3": lambda **levers: mw.Mirrored(CPUS[:3], **levers),
    "fsdp-4": lambda **levers: mw.FSDP(devices=CPUS[:4], **levers),
    "tensor-2": lambda **levers: mw.TensorParallel(2, devices=CPUS[:2], **levers),
    "hybrid-2-2-2": lambda **levers: mw.Hybrid(data=2, fsdp=2, tensor=2, **levers),
}


@pytest.mark.parametrize(
    "name",
    ["mlp", "cnn", pytest.param("dropout", marks=pytest.mark.soak), "transformer"],
)
@pytest.mark.parametrize("strategy", LEVERS)
def test_rematerialised_training_equals_one_device(strategy: str, name: str) -> None:
    reference, _ = trained_alone(name)
    model = mw.distribute(build(name), LEVERS[strategy](remat=True))
    train(model, name)
    assert_equal_weights(model, reference, 2e-5)


@pytest.mark.parametrize("name", ["mlp", "lstm"])
@pytest.mark.parametrize("strategy", LEVERS)
def test_accumulated_training_equals_one_device(strategy: str, name: str) -> None:
    """Models whose samples do not meet; see tests/train/test_accumulation.py."""
    reference, _ = trained_alone(name)
    model = mw.distribute(build(name), LEVERS[strategy](accumulate=3))
    train(model, name)
    assert_equal_weights(model, reference, 2e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("strategy", ["fsdp-4", "hybrid-2-2-2"])
def test_training_with_offloaded_state_equals_one_device(
    strategy: str, name: str
) -> None:
    reference, _ = trained_alone(name)
    model = mw.distribute(build(name), LEVERS[strategy](offload=True))
    train(model, name)
    assert_equal_weights(model, reference, 2e-5)
    slots = {v.value.sharding.memory_kind for v in model.optimizer.variables if v.ndim}
    weights = {v.value.sharding.memory_kind for v in model.trainable_variables}
    assert (slots, weights) == ({"pinned_host"}, {"device"})


@cache
def trained_in_microbatches(name: str) -> keras.Model:
    model = mw.distribute(build(name), mw.Single(accumulate=3))
    train(model, name)
    return model


@pytest.mark.parametrize("name", ["cnn", "dropout"])
@pytest.mark.parametrize("strategy", LEVERS)
def test_accumulated_batchnorm_and_dropout_equal_one_device_in_microbatches(
    strategy: str, name: str
) -> None:
    reference = trained_in_microbatches(name)
    model = mw.distribute(build(name), LEVERS[strategy](accumulate=3, remat=True))
    train(model, name)
    assert_equal_weights(model, reference, 2e-5)


# Mixed precision. Rounding depends on the order of sums, so on the split. How much it
# may matter is measured beside: the same training by stock Keras in float32. Runs that
# round differently are each about as far from it as the other, hence at most twice
# that from each other (measured: 0.3 to 1.05 times, 2.1 for single variables). A run
# left in float32 would be near too, so the dtypes of layers and programs are looked at.
# The models are smooth: a ReLU rounded across zero would move weights at once.


def smooth_mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), L.Dense(16, activation="gelu"), L.Dense(4)]
    )


def smooth_cnn() -> keras.Model:
    convolution = L.Conv2D(8, 3, use_bias=False)
    layers = [convolution, L.BatchNormalization(), L.Activation("gelu"), L.Flatten()]
    return keras.Sequential([keras.Input((6, 6, 3)), *layers, L.Dense(4)])


def small_transformer() -> keras.Model:
    """With dropout: Keras' fused attention knows no float16 on CPUs.

    Words are large, so that gradients are small and no step of float16 is skipped.
    """
    inputs = keras.Input((5,))
    normal = keras.initializers.RandomNormal(stddev=1.0)
    x = L.Embedding(12, 8, embeddings_initializer=normal)(inputs)
    attended = L.MultiHeadAttention(4, 2, dropout=0.2)(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(x + attended)
    return keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)))


MIXED_MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[int], Any]]] = {
    "mlp": (smooth_mlp, table),
    "cnn": (smooth_cnn, images),
    "transformer": (small_transformer, words),
}
MIXED_STRATEGIES: dict[str, Callable[..., Any]] = {
    "mirrored-3": lambda precision: mw.Mirrored(CPUS[:3], precision=precision),
    "fsdp-4": lambda precision: mw.FSDP(devices=CPUS[:4], precision=precision),
    "tensor-2": lambda precision: mw.TensorParallel(
        2, devices=CPUS[:2], precision=precision
    ),
    "hybrid-2-2-2": lambda precision: mw.Hybrid(2, 2, 2, precision=precision),
}


def build_mixed(name: str, rate: float = 0.05) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = MIXED_MODELS[name][0]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(rate, momentum=0.9), loss=loss)
    return model


def train_mixed(model: keras.Model, name: str) -> tuple[list[Any], Any]:
    """The weights and moving statistics after two epochs, and the history."""
    x, y = MIXED_MODELS[name][1](48)
    history = model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    return floats_of(model), history.history["loss"]


def floats_of(model: keras.Model) -> list[Any]:
    return [np.asarray(v) for v in model.variables if "float" in str(v.dtype)]


@cache
def stock_mixed(name: str, policy: str, rate: float = 0.05) -> tuple[list[Any], Any]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return train_mixed(build_mixed(name, rate), name)
    finally:
        keras.config.set_dtype_policy(before)


def distance(ours: list[Any], theirs: list[Any]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs)))


@pytest.mark.parametrize(
    ("strategy", "name", "precision"),
    [
        pytest.param(
            strategy,
            name,
            precision,
            marks=pytest.mark.soak
            if precision == "float16"
            and (strategy in ("fsdp-4", "tensor-2") or name == "transformer")
            else (),
        )
        for strategy in MIXED_STRATEGIES
        for name in MIXED_MODELS
        for precision in ("bfloat16", "float16")
    ],
)
def test_mixed_precision_equals_one_device_in_the_same_precision(
    strategy: str, name: str, precision: str
) -> None:
    exact, _ = stock_mixed(name, "float32")
    expected, losses = stock_mixed(name, f"mixed_{precision}")
    moved = distance(expected, floats_of(build_mixed(name)))
    lost = distance(expected, exact)
    model = mw.distribute(build_mixed(name), MIXED_STRATEGIES[strategy](precision))
    found, history = train_mixed(model, name)
    assert distance(found, expected) <= 2 * lost
    for ours, theirs, wide, first in zip(
        found, expected, exact, floats_of(build_mixed(name)), strict=True
    ):
        own = np.abs(theirs - wide).max()
        usual = lost / moved * np.abs(theirs - first).max()
        assert np.abs(ours - theirs).max() <= 5 * max(own, usual)
    epsilon = {"bfloat16": 2**-8, "float16": 2**-11}[precision]
    np.testing.assert_allclose(history, losses, rtol=epsilon)
    dtypes = {x.compute_dtype for x in model.layers if not isinstance(x, L.InputLayer)}
    assert dtypes == {precision}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MIXED_MODELS)
def test_the_bounds_of_mixed_precision_would_see_a_wrong_learning_rate(
    name: str, precision: str
) -> None:
    exact, _ = stock_mixed(name, "float32")
    expected, _ = stock_mixed(name, f"mixed_{precision}")
    slower, _ = stock_mixed(name, f"mixed_{precision}", rate=0.04)
    assert distance(slower, expected) > 2 * distance(expected, exact)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MIXED_MODELS)
def test_programs_of_mixed_precision_multiply_in_low_precision_only(
    name: str, precision: str
) -> None:
    strategy = MIXED_STRATEGIES["hybrid-2-2-2"](precision)
    model = mw.distribute(build_mixed(name), strategy)
    batch = MIXED_MODELS[name][1](8)
    train_step = jax.jit(model.train_step)
    step = MeshStep(model, train_step, strategy.plan, strategy.mesh)
    program = step.lower(training_state(model, batch), batch).as_text()
    products = re.findall(r"(?:dot_general|convolution)\(?.*", program)
    found = {t for line in products for t in re.findall(r"x(b?f\d+)>", line)}
    assert found == {{"bfloat16": "bf16", "float16": "f16"}[precision]}


# Keras' spectral norm does not know float16.
@pytest.mark.parametrize(
    ("name", "precision"),
    [("joined", "bfloat16"), ("lstm", "bfloat16"), ("lstm", "float16")],
)
def test_gradients_over_three_axes_in_mixed_precision(
    name: str, precision: Any
) -> None:
    def updates(strategy: Any) -> list[Any]:
        model = mw.distribute(build(name), strategy)
        before = [np.asarray(v) for v in model.trainable_variables]
        model.train_on_batch(*MODELS[name].data(8))
        after = [np.asarray(v) for v in model.trainable_variables]
        return [b - a for a, b in zip(before, after, strict=True)]

    expected = updates(mw.Single(precision=precision))
    found = updates(MIXED_STRATEGIES["hybrid-2-2-2"](precision))
    epsilon = {"bfloat16": 2**-8, "float16": 2**-11}[precision]
    largest = max(float(np.abs(update).max()) for update in expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours - theirs).max() <= 8 * epsilon * largest
