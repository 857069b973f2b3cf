"""Scaling rules and warm-up, against closed forms in NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import LearningRateError

import keras
import numpy as np
import pytest

from conftest import Run

CPUS = [f"CPU:{i}" for i in range(8)]
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32)


def test_the_linear_rule_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert mw.scaled_lr(0.1, 1024, 256) == pytest.approx(0.4)
    assert mw.scaled_lr(0.1, batch_size=64, base_batch_size=256) == 0.025
    assert capsys.readouterr().out.splitlines() == [
        "learning rate 0.1 -> 0.4: linear rule, global batch 1024 is 4 x 256",
        "learning rate 0.1 -> 0.025: linear rule, global batch 64 is 0.25 x 256",
    ]


def test_the_square_root_rule_says_what_it_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert mw.scaled_lr(0.001, 512, 256, "sqrt") == pytest.approx(0.001 * np.sqrt(2))
    assert capsys.readouterr().out == (
        "learning rate 0.001 -> 0.00141421: square root rule, global batch 512 is "
        "2 x 256\n"
    )


def test_the_number_of_replicas_stands_for_the_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replicas = mw.Mirrored().num_replicas
    assert mw.scaled_lr(0.5, num_replicas=replicas) == 4.0
    assert capsys.readouterr().out == (
        "learning rate 0.5 -> 4: linear rule, global batch is 8 x one replica's\n"
    )
    rate: Any = np.float32(1.0)
    number: Any = np.int64(4)
    found = mw.scaled_lr(rate, num_replicas=number, rule="sqrt", verbose=False)
    assert found == 2.0
    assert type(found) is float
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rate", [-0.1, 0, float("nan"), float("inf"), "0.1", True])
def test_the_base_is_a_learning_rate(rate: Any) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.scaled_lr(rate, 512, 256)
    assert str(caught.value).split("\n") == [
        f"scaled_lr received base_lr={rate!r} (a {type(rate).__name__}).",
        "A learning rate is a finite number above 0.",
        "Use, for example, base_lr=0.1.",
    ]
    assert isinstance(caught.value, ValueError)


def test_there_are_two_rules() -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.scaled_lr(0.1, 512, 256, rule="cubic")
    assert str(caught.value).split("\n") == [
        "scaled_lr received rule='cubic'.",
        "The rules are 'linear' and 'sqrt'.",
        "Use 'linear' with SGD, and 'sqrt' with Adam and its like.",
    ]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("batch_size", {"base_batch_size": 8}),
        ("base_batch_size", {"batch_size": 8}),
        ("num_replicas", {}),
    ],
)
@pytest.mark.parametrize("value", [0, -8, 8.0, "8", True])
def test_sizes_are_counts(name: str, sizes: dict[str, int], value: Any) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.scaled_lr(0.1, **{name: value, **sizes})
    assert str(caught.value).split("\n") == [
        f"scaled_lr received {name}={value!r} (a {type(value).__name__}).",
        "Samples and replicas are counted in whole numbers from 1.",
        f"Use, for example, {name}=8.",
    ]


@pytest.mark.parametrize(
    "sizes",
    [{}, {"batch_size": 8}, {"batch_size": 8, "base_batch_size": 8, "num_replicas": 8}],
)
def test_sizes_come_in_pairs_or_as_a_number_of_replicas(sizes: dict[str, int]) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.scaled_lr(0.1, **sizes)  # type: ignore[arg-type]
    assert str(caught.value).split("\n") == [
        f"scaled_lr received batch_size={sizes.get('batch_size')}, base_batch_size="
        f"{sizes.get('base_batch_size')} and num_replicas={sizes.get('num_replicas')}.",
        "How much larger the batch is follows from the two batch sizes or from the "
        "number of replicas.",
        "Pass batch_size and base_batch_size, or only num_replicas.",
    ]


def decay() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.8, 4, 0.5)


CLOSED_FORMS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "constant": (lambda: 0.8, lambda step: np.full_like(step, 0.8)),
    "decay": (decay, lambda step: 0.8 * 0.5 ** (step / 4)),
    "cosine": (
        lambda: keras.optimizers.schedules.CosineDecay(0.8, 10),
        lambda step: 0.4 * (1 + np.cos(np.pi * np.minimum(step, 10) / 10)),
    ),
}


def ramp(schedule: Callable[[Any], Any], steps: int, start: float) -> Any:
    step = np.arange(20.0)
    peak = schedule(np.zeros(1))[0]
    rising = start + (peak - start) * step / steps
    return np.where(step < steps, rising, schedule(np.maximum(step - steps, 0)))


@pytest.mark.parametrize("start", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_every_step_of_a_warmup_is_the_closed_form(
    name: str, steps: int, start: float
) -> None:
    make, closed_form = CLOSED_FORMS[name]
    warmup = mw.Warmup(make(), steps, start=start)
    assert isinstance(warmup, keras.optimizers.schedules.LearningRateSchedule)
    found = [float(warmup(step)) for step in range(20)]
    np.testing.assert_allclose(found, ramp(closed_form, steps, start), rtol=1e-6)
    again = mw.Warmup.from_config(warmup.get_config())
    assert [float(again(step)) for step in range(20)] == found


def make_model(rate: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(optimizer=keras.optimizers.SGD(rate), loss="mse")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: mw.Mirrored(CPUS[:3]),
        lambda: mw.FSDP(8),
        lambda: mw.Mirrored(precision="float16"),
    ],
    ids=["mirrored-3", "fsdp-8", "float16"],
)
@pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning")
def test_a_warmup_advances_once_per_step_on_every_mesh(make: Any) -> None:
    model = mw.distribute(make_model(mw.Warmup(decay(), 3)), make())
    expected = ramp(CLOSED_FORMS["decay"][1], 3, 0.0)
    rates = []
    for step in range(8):
        rates.append(float(model.optimizer.learning_rate))
        at = step % 4 * 4
        model.train_on_batch(X[at : at + 4], Y[at : at + 4])
    np.testing.assert_allclose(rates, expected[:8], rtol=1e-6)
    # By hand: one step of plain SGD after the other, each with its rate.
    reference = make_model(0.1)
    for step in range(8):
        reference.optimizer.learning_rate = expected[step]
        at = step % 4 * 4
        reference.train_on_batch(X[at : at + 4], Y[at : at + 4])
    tolerance = 2e-3 if model.dtype_policy.name == "mixed_float16" else 1e-6
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerance)


def test_a_model_with_a_warmup_is_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model(mw.Warmup(decay(), 3, start=0.1))
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for _ in range(2):
        rates = [float(m.optimizer.learning_rate) for m in (model, loaded)]
        assert rates[0] == rates[1]
        for each in (model, loaded):
            each.fit(X, Y, verbose=0)


def test_another_process_loads_it_inside_of_a_scope(
    tmp_path: Path, run_script: Run
) -> None:
    make_model(mw.Warmup(0.5, 4)).save(tmp_path / "model.keras")
    run_script(
        "import sys, meshwright as mw\n"
        "assert 'Warmup' in dir(mw) and 'keras' not in sys.modules\n"
        "import keras\n"
        "with mw.Single().scope():\n"
        "    model = keras.saving.load_model('model.keras')\n"
        "rate = model.optimizer.get_config()['learning_rate']\n"
        "assert rate['config'] == {'learning_rate': 0.5, 'steps': 4, 'start': 0.0}\n"
    )


@pytest.mark.parametrize("steps", [0, -1, 2.5, "3", True, None])
def test_a_ramp_is_a_count_of_updates(steps: Any) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.Warmup(0.1, steps)
    assert str(caught.value).split("\n") == [
        f"Warmup received steps={steps!r} (a {type(steps).__name__}).",
        "The ramp is a whole number of updates from 1.",
        "Use, for example, steps=500, or the learning rate without a Warmup.",
    ]


@pytest.mark.parametrize("rate", [-0.1, 0.0, float("nan"), "fast", None])
def test_a_warmup_leads_to_a_learning_rate(rate: Any) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.Warmup(rate, 5)
    assert str(caught.value).split("\n") == [
        f"Warmup received learning_rate={rate!r} (a {type(rate).__name__}).",
        "A learning rate is a finite number above 0, or one of Keras' schedules.",
        "Use, for example, learning_rate=0.1.",
    ]


@pytest.mark.parametrize("start", [-0.1, float("inf"), "0", True])
def test_a_warmup_starts_from_a_rate_or_from_nothing(start: Any) -> None:
    with pytest.raises(LearningRateError) as caught:
        mw.Warmup(0.1, 5, start=start)
    assert str(caught.value).split("\n") == [
        f"Warmup received start={start!r} (a {type(start).__name__}).",
        "A warm-up starts from a finite number from 0.",
        "Use, for example, start=0.0.",
    ]
