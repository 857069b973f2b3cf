"""The battery for layers that were put on devices by hand: they train as on one.

Every model of the battery is built with its layers on three devices in turn; layers of
its own classes are placed nowhere, and so are on the default device.
"""

import threading
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import meshwright as mw
from meshwright.devices.runtime import names_of
from meshwright.errors import PlacementError, StrategyError
from meshwright.train import placed_step

import jax
import keras
import numpy as np
import pytest

import test_equivalence as battery

L = keras.layers
DEVICES = ("CPU:1", "CPU:2", "CPU:3")

pytestmark = pytest.mark.usefixtures("small_programs_are_cached")


class LayersInTurn:
    """The layers of Keras, each made on the next device."""

    def __init__(self) -> None:
        self._next = cycle(DEVICES)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def make(*args: Any, **options: Any) -> Any:
            with mw.device(next(self._next)):
                return getattr(L, name)(*args, **options)

        return make


def build_scattered(name: str, monkeypatch: pytest.MonkeyPatch) -> keras.Model:
    monkeypatch.setattr(battery, "L", LayersInTurn())
    model = battery.build(name)
    monkeypatch.undo()
    return model


def where(thing: Any) -> str:
    (name,) = names_of(thing.value.sharding)
    return name.removeprefix("/device:")


def homes(model: keras.Model) -> dict[str, str]:
    return {variable.path: where(variable) for variable in model.variables}


IN_SHORT = (
    *("cnn", "dropout", "transformer", "subclassed", "two-tower", "vae"),
    *("siamese", "two-headed", "frozen", "clipped"),
)
ALL = [
    pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.soak)
    for name in battery.MODELS
    if name != "own-step"
]


@pytest.mark.parametrize("name", ALL)
def test_training_equals_one_device_and_moves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"size": 7 if name in battery.CORE else 8, "batch_size": 4}
    expected = battery.build(name)
    wanted = battery.train(expected, name, **sizes)
    model = build_scattered(name, monkeypatch)
    before = homes(model)
    history = battery.train(model, name, **sizes)
    battery.assert_equal_weights(model, expected, 2e-5)
    assert list(history) == list(wanted)
    for key, values in wanted.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
    after = homes(model)
    assert {path: after[path] for path in before} == before
    assert len(set(after.values())) > 1
    x, y = battery.MODELS[name].data(4)
    found = model.evaluate(x, y, batch_size=4, verbose=0)
    wanted = expected.evaluate(x, y, batch_size=4, verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    predicted = model.predict(x, verbose=0)
    wanted = expected.predict(x, verbose=0)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), predicted, wanted)


def split_model(name: str = "split", **options: Any) -> keras.Model:
    """Two layers on two devices, joined by one that is nowhere in particular."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    with mw.device("CPU:1"):
        first = L.Dense(4, name="first")(inputs)
    with mw.device("CPU:2"):
        second = L.Dense(4, name="second")(inputs)
    outputs = L.Dense(1, name="head")(L.Add(name="add")([first, second]))
    model = keras.Model(inputs, outputs, name=name)
    model.compile(optimizer="adam", loss="mse", **options)
    return model


X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)
Y = X[:, :1]


def test_a_trained_model_can_be_called_and_changed_as_before() -> None:
    """Steps fix arrays to their devices; eager work outside of scopes mixes them."""
    model = split_model()
    model.fit(X, Y, verbose=0)
    first, second, head = (model.get_layer(n) for n in ("first", "second", "head"))
    by_hand = X @ (first.kernel.numpy() + second.kernel.numpy()) @ head.kernel.numpy()
    np.testing.assert_allclose(model(X), by_hand, atol=0.02)
    np.testing.assert_allclose(model(X), model.predict(X, verbose=0), atol=1e-6)
    (name,) = names_of((first.kernel + second.kernel.value).sharding)
    assert name == "/device:CPU:0"
    second.kernel.assign(10 * first.kernel)
    assert where(second.kernel) == "CPU:2"
    assigned = second.kernel.numpy()
    model.fit(X, Y, verbose=0)
    assert not np.array_equal(second.kernel.numpy(), assigned)
    np.testing.assert_allclose(second.kernel.numpy(), assigned, atol=0.1)


def frozen_on_the_way(model: keras.Model) -> keras.Model:
    model.fit(X, Y, shuffle=False, verbose=0)
    model.get_layer("second").trainable = False
    model.compile(optimizer="adam", loss="mse")
    model.fit(X, Y, shuffle=False, verbose=0)
    return model


def unplaced() -> keras.Model:
    """The same model on one device."""
    model = keras.models.clone_model(split_model())
    model.set_weights(split_model().get_weights())
    model.compile(optimizer="adam", loss="mse")
    return model


def test_layers_can_be_frozen_and_models_compiled_again() -> None:
    ours, theirs = frozen_on_the_way(split_model()), frozen_on_the_way(unplaced())
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_what_is_frozen_without_compiling_again_is_still_evaluated_right() -> None:
    model = split_model()
    model.get_layer("first").trainable = False
    model.compile(optimizer="sgd", loss="mse")
    before = model.evaluate(X, Y, verbose=0)
    model.get_layer("first").trainable = True
    model.get_layer("second").trainable = False
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(before, rel=1e-6)


def test_a_trained_model_can_be_part_of_another() -> None:
    inner = split_model()
    inner.fit(X, Y, verbose=0)
    outer = keras.Sequential([keras.Input((6,)), inner, L.Dense(1)])
    outer.compile(optimizer="sgd", loss="mse")
    before = inner.get_weights()
    outer.fit(X, Y, verbose=0)
    assert not np.array_equal(inner.get_weights()[0], before[0])
    assert where(inner.get_layer("second").kernel) == "CPU:2"


def test_predicting_again_traces_nothing() -> None:
    model = split_model()
    model.predict(X, verbose=0)
    step = model.predict_function.guarded
    model.fit(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert model.predict_function.guarded is step
    assert model.train_function.guarded is not step


def test_in_a_run_of_several_processes_placed_models_are_only_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = split_model().evaluate(X, Y, verbose=0)
    model = split_model()
    monkeypatch.setattr(placed_step, "process_count", lambda: 2)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(PlacementError) as caught:
        model.fit(X, Y, verbose=0)
    assert str(caught.value).split("\n") == [
        "fit was called on 'split', whose layers live on several devices, in one of 2 "
        "processes.",
        "Layers that were put on devices by hand are the business of one process.",
        "Build the model in the scope of meshwright.Pipeline, which spans them.",
    ]


def test_callbacks_can_call_a_model_while_it_trains() -> None:
    model = split_model()
    seen = []
    call = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(np.asarray(model(X)))
    )
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[call])
    first, last = seen
    assert not np.array_equal(first, last)
    np.testing.assert_allclose(last, model.predict(X, verbose=0), atol=1e-6)


class Counting(keras.layers.Layer):
    """Multiplies what comes late by what it knew before it saw what came early."""

    def build(self, *shapes: Any) -> None:
        self.seen = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        early, late = inputs
        before = self.seen.value
        self.seen.assign(before + keras.ops.mean(keras.ops.abs(early)))
        return late * before


def build_counting(first: str | None, second: str | None) -> keras.Model:
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    with mw.device(first):
        early = L.Dense(4)(inputs)
    with mw.device(second):
        late = L.Dense(4)(early)
    with mw.device(first):
        outputs = L.Dense(1)(Counting()([early, late]))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_a_state_that_is_read_after_its_update_is_the_one_before() -> None:
    """The layer reads it when the late input arrives, and updates it much earlier."""
    expected, model = build_counting(None, None), build_counting("CPU:1", "CPU:2")
    for each in (expected, model):
        each.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    battery.assert_equal_weights(model, expected, 2e-5)


def test_optimizer_state_lies_with_its_weights() -> None:
    model = split_model()
    model.fit(X, Y, verbose=0)
    momenta = {v.path: where(v) for v in model.optimizer.variables if v.shape == (6, 4)}
    assert sorted(momenta.values()) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


class Meeting(keras.layers.Layer):
    """Lets batches pass when the other party has arrived too."""

    def __init__(self, party: threading.Barrier, **options: Any) -> None:
        super().__init__(**options)
        self._party = party

    def call(self, x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

        @jax.custom_vjp  # type: ignore[untyped-decorator]
        def meet(x: Any) -> Any:
            return jax.pure_callback(self._meet, shape, x)

        meet.defvjp(
            lambda x: (meet(x), None),
            lambda _, g: (jax.pure_callback(self._meet, shape, g),),
        )
        return meet(x)

    def _meet(self, x: Any) -> Any:
        self._party.wait(timeout=60)
        return np.asarray(x)


def test_towers_compute_at_the_same_time_forward_and_back() -> None:
    """Each waits for the other, in every pass; alone, neither would ever finish."""
    party = threading.Barrier(2)
    left, right = keras.Input((6,)), keras.Input((6,))
    towers = []
    for device, given in (("CPU:1", left), ("CPU:2", right)):
        with mw.device(device):
            towers.append(Meeting(party)(L.Dense(4)(given)))
    with mw.device("CPU:0"):
        outputs = L.Dense(1)(L.Concatenate()(towers))
    model = keras.Model([left, right], outputs)
    model.compile(optimizer="sgd", loss="mse")
    history = model.fit([X, X], Y, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_layers_on_several_devices_say_what_they_cannot_do() -> None:
    with pytest.raises(StrategyError) as caught:
        split_model(run_eagerly=True).fit(X, Y, verbose=0)
    assert str(caught.value).split("\n") == [
        "'split' was compiled with run_eagerly=True or jit_compile=False.",
        "A step over several devices is made of compiled programs.",
        "Compile the model without these, or train it on one device.",
    ]


@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": False}])
def test_what_is_not_to_be_compiled_is_evaluated_layer_by_layer(option: Any) -> None:
    expected = split_model()
    model = split_model(**option)
    found, wanted = (m.evaluate(X, Y, verbose=0) for m in (model, expected))
    assert found == pytest.approx(wanted, rel=1e-6)
    predicted, wanted = (m.predict(X, verbose=0) for m in (model, expected))
    np.testing.assert_allclose(predicted, wanted, atol=1e-6)


def test_several_steps_at_once_and_single_batches_train_too() -> None:
    expected = split_model()
    expected.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    model = split_model(steps_per_execution=2)
    model.fit(X, Y, batch_size=2, shuffle=False, verbose=0)
    one_by_one = split_model()
    for start in range(0, 8, 2):
        one_by_one.train_on_batch(X[start : start + 2], Y[start : start + 2])
    for ours in (model, one_by_one):
        for a, b in zip(ours.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
