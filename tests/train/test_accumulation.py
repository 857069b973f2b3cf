"""One update from many microbatches."""

from collections.abc import Callable
from typing import Any

import meshwright as mw
from meshwright.errors import BatchWarning, StrategyError

import jax
import keras
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")

CPUS = [f"CPU:{i}" for i in range(8)]
L = keras.layers


class Paired(keras.losses.Loss):
    """A loss in which every sample meets every other."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        likeness = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        return keras.ops.mean(keras.ops.logsumexp(likeness, axis=1))


def plain_mean(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_pred), axis=-1)


class WithOwnLoss(keras.Model):
    """Computes its loss by itself, with a weight of its own in it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = L.Dense(4)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)) * self.scale)
        return self.dense(x)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        spread = keras.ops.max(keras.ops.abs(y_pred - y))
        return self.scale * spread + sum(self.losses)


def dense() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), L.Dense(8, kernel_regularizer="l2"), L.Dense(4)]
    )


def tagger() -> keras.Model:
    """One output per step of time, some of which are masked."""
    return keras.Sequential(
        [keras.Input((6,)), L.Embedding(9, 4, mask_zero=True), L.Dense(4)]
    )


def table(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 6)).astype(np.float32)
    return x, rng.normal(size=(size, 4)).astype(np.float32)


def tagged(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    x = rng.integers(0, 9, (size, 6)) * rng.integers(0, 2, (size, 6))
    x[:, 0] = 1
    return x.astype(np.int32), rng.integers(0, 4, (size, 6)).astype(np.int32)


Case = tuple[Callable[[], Any], Callable[[int], Any], Any]

SPARSE = keras.losses.SparseCategoricalCrossentropy
CASES: dict[str, Case] = {
    "mean": (dense, table, "mse"),
    "sum": (dense, table, keras.losses.MeanSquaredError(reduction="sum")),
    "own function": (dense, table, plain_mean),
    "pairs": (dense, table, Paired()),
    "own compute_loss": (WithOwnLoss, table, None),
    "masked outputs": (tagger, tagged, SPARSE(from_logits=True)),
    "ignored class": (tagger, tagged, SPARSE(from_logits=True, ignore_class=2)),
    "weighted mean": (
        dense,
        table,
        keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    ),
}


def build(name: str) -> keras.Model:
    keras.utils.set_random_seed(3)
    make, data, loss = CASES[name]
    model = make()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=loss)
    model(data(1)[0])
    return model


def train(model: keras.Model, name: str) -> Any:
    x, y = CASES[name][1](22)
    weights = np.linspace(0.2, 2.0, 22)
    if CASES[name][0] is tagger:
        weights = np.repeat(weights[:, None], 6, axis=1)
    keras.utils.set_random_seed(4)
    return model.fit(
        x, y, sample_weight=weights, batch_size=16, epochs=2, verbose=0
    ).history


def assert_equal(ours: keras.Model, theirs: keras.Model) -> None:
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=2e-5, err_msg=a.path)


@pytest.mark.parametrize("name", CASES)
def test_microbatches_give_the_update_of_the_whole_batch(name: str) -> None:
    reference = build(name)
    expected = train(reference, name)
    strategies = [mw.Single(accumulate=4), mw.Mirrored(CPUS[:3], accumulate=3)]
    for strategy in strategies:
        model = mw.distribute(build(name), strategy)
        history = train(model, name)
        assert_equal(model, reference)
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def by_hand(model: keras.Model, batches: list[Any], parts: int, rate: float) -> Any:
    """Gradient accumulation written out for one device, and plain gradient descent."""

    def loss(weights: Any, others: Any, x: Any, y: Any) -> Any:
        outputs, others = model.stateless_call(weights, others, x, training=True)
        return keras.ops.mean((outputs - y) ** 2), others

    weights = [w.value for w in model.trainable_variables]
    others = [w.value for w in model.non_trainable_variables]
    for x, y in batches:
        sums = [np.zeros(w.shape, np.float32) for w in weights]
        for part in np.array_split(np.arange(len(x)), min(parts, len(x))):
            gradients_of = jax.grad(loss, has_aux=True)
            gradients, others = gradients_of(weights, others, x[part], y[part])
            share = len(part) / len(x)
            sums = [s + share * g for s, g in zip(sums, gradients, strict=True)]
        weights = [w - rate * g for w, g in zip(weights, sums, strict=True)]
    return [*weights, *others]


def test_batchnorm_and_dropout_see_microbatches_as_on_one_device() -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(5)
        normal = [L.Dense(8, use_bias=False), L.BatchNormalization()]
        model = keras.Sequential(
            [keras.Input((6,)), *normal, L.Dropout(0.3), L.Dense(4)]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        return model

    x, y = table(22)  # the last batch has fewer samples than there are microbatches
    batches = [(x[at : at + 10], y[at : at + 10]) for at in (0, 10, 20)]
    expected = by_hand(make(), batches, parts=3, rate=0.1)
    for strategy in (
        mw.Single(accumulate=3),
        mw.Mirrored(accumulate=3),
        mw.Hybrid(data=2, fsdp=2, tensor=2, accumulate=3, remat=True),
    ):
        model = mw.distribute(make(), strategy)
        model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
        found = [*model.trainable_variables, *model.non_trainable_variables]
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                ours.numpy(), theirs, atol=1e-5, err_msg=ours.path
            )


@pytest.mark.parametrize("loss", ["mse", plain_mean])
def test_moving_statistics_are_those_of_a_layer_that_sees_each_microbatch(
    loss: Any,
) -> None:
    """For both ways to a loss: a mean over samples, and one of the whole batch."""
    layers = [L.BatchNormalization(momentum=0.7), L.Dense(4)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer="sgd", loss=loss)
    mw.distribute(model, mw.Mirrored(CPUS[:2], accumulate=4))
    reference = L.BatchNormalization(momentum=0.7)
    for sizes in [(3, 3, 2, 2), (2, 2, 2, 2), (1, 1, 1)]:
        x, y = table(sum(sizes))
        model.train_on_batch(x, y)
        for part in np.split(x, np.cumsum(sizes)[:-1]):
            reference(part, training=True)
    for name in ("moving_mean", "moving_variance"):
        ours, theirs = getattr(layers[0], name), getattr(reference, name)
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-6)


def test_metrics_count_every_sample_once() -> None:
    x, y = table(26)
    model, reference = (dense() for _ in range(2))
    reference.set_weights(model.get_weights())
    for each in (model, reference):
        each.compile(optimizer="sgd", loss="mse", metrics=["mae", "cosine_similarity"])
    mw.distribute(model, mw.Mirrored(CPUS[:2], accumulate=4))
    options: dict[str, Any] = {"batch_size": 16, "shuffle": False, "verbose": 0}
    found = model.fit(x, y, **options).history
    expected = reference.fit(x, y, **options).history
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)
    batch = x[:10], y[:10]
    logs = model.train_on_batch(*batch, return_dict=True)
    for key, value in reference.train_on_batch(*batch, return_dict=True).items():
        np.testing.assert_allclose(logs[key], value, rtol=1e-5, err_msg=key)


def test_metrics_of_masked_outputs_are_those_of_keras() -> None:
    x, y = tagged(6)
    model, reference = tagger(), tagger()
    reference.set_weights(model.get_weights())
    for each in (model, reference):
        loss = SPARSE(from_logits=True)
        each.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
    mw.distribute(model, mw.Single(CPUS[0], accumulate=2))
    found = model.train_on_batch(x, y, return_dict=True)
    expected = reference.train_on_batch(x, y, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-5)


def test_verify_compares_with_one_device_in_the_same_microbatches() -> None:
    model = keras.Sequential(
        [keras.Input((6,)), L.Dense(8), L.BatchNormalization(), L.Dense(4)]
    )
    model.compile(optimizer="sgd", loss="mse")
    x, y = table(16)
    assert mw.verify(model, x, y, mw.FSDP(8, accumulate=4), batch_size=10).ok


def test_explain_says_how_microbatches_are_computed() -> None:
    x, y = table(16)
    strategy = mw.Mirrored(CPUS[:2], accumulate=2)
    assert strategy.explain(build("mean"), x, y).notes == (
        "accumulate=2: each microbatch adds the gradients of its own loss, "
        "which is a mean over samples",
    )
    assert strategy.explain(build("sum"), x, y).notes == (
        "accumulate=2: every forward pass of a microbatch runs twice, first for the "
        "loss of the whole batch, because mean_squared_error is reduced by 'sum'",
    )
    text = str(mw.Mirrored(CPUS[:2], remat=True).explain(build("mean"), x, y))
    assert text.splitlines()[-1] == (
        "remat: activations inside of blocks are computed again for the gradients, "
        "because only what passes between blocks is kept"
    )


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
    mw.distribute(model, mw.Mirrored(accumulate=2))
    with pytest.raises(StrategyError) as caught:
        model.fit(*table(8), verbose=0)
    assert str(caught.value).split("\n") == [
        "accumulate was asked for 'mine', whose class Own has a train_step of its own.",
        "Accumulation replaces the training step, so it would not be called.",
        "Override compute_loss instead of train_step, or use accumulate=1.",
    ]


def test_outputs_without_samples_are_refused_where_they_must_be_joined() -> None:
    class Summing(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return keras.ops.sum(x, axis=0)

    inputs = keras.Input((6,))
    model = keras.Model(inputs, Summing()(L.Dense(4)(inputs)), name="summing")
    model.compile(optimizer="sgd", loss=plain_mean)
    mw.distribute(model, mw.Single(accumulate=2))
    with pytest.raises(StrategyError) as caught:
        model.train_on_batch(*table(6))
    assert str(caught.value).split("\n") == [
        "accumulate was asked for 'summing', which has an output of shape (4,) for 3 "
        "samples.",
        "Outputs of microbatches are joined by sample, so each has one row per sample.",
        "Pass such values on with add_loss or a metric, or use accumulate=1.",
    ]


@pytest.mark.parametrize(
    ("devices", "size", "words"),
    [
        (4, 12, "6 is split into 2 equal pieces, although the mesh could compute 4"),
        (
            2,
            7,
            "3 cannot be split into equal pieces, although the mesh could compute 2",
        ),
    ],
    ids=["all", "the smaller ones"],
)
@pytest.mark.filterwarnings("default::meshwright.errors.BatchWarning")
def test_microbatches_that_leave_devices_idle_are_warned_of(
    devices: int, size: int, words: str
) -> None:
    model = mw.distribute(build("mean"), mw.Mirrored(CPUS[:devices], accumulate=2))
    with pytest.warns(BatchWarning) as caught:
        model.train_on_batch(*table(size))
    assert [str(warning.message) for warning in caught] == [
        f"A microbatch of {words} at a time. The result is exact; a global batch of "
        f"{2 * devices} or {4 * devices} would use every device."
    ]
