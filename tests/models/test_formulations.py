"""Steps use the operations that suit the devices."""

import re
from typing import Any

import meshwright as mw
from meshwright.models import formulations
from meshwright.models.formulations import compiler_options
from meshwright.train.mesh_step import MeshStep, training_state

import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(8, 12, 12, 1)).astype("float32")
Y = np.zeros(8, "int32")


def lowered_step(strategy: Any) -> str:
    """The training step of a small CNN, before XLA sees it."""
    layers = [keras.layers.Conv2D(n, 3, activation="relu") for n in (4, 6)]
    pool, flat = keras.layers.MaxPooling2D(), keras.layers.Flatten()
    network = [keras.Input((12, 12, 1)), *layers, pool, flat, keras.layers.Dense(3)]
    model = keras.Sequential(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    mw.distribute(model, strategy)
    state = training_state(model, (X, Y))
    model.make_train_function()
    step = model.train_function.guarded
    assert isinstance(step, MeshStep)
    return str(step.lower(state, (X, Y)).as_text())


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]])
def test_convolutions_of_a_step_are_in_order_and_pooling_is_slices(
    devices: list[str],
) -> None:
    text = lowered_step(mw.Mirrored(devices))
    orders = re.findall(r"dim_numbers = (\S+ .*?),\s+window", text)
    assert set(orders) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    # Two forward, one gradient of inputs, one of a kernel with several channels.
    assert len(orders) == 4
    assert "select_and_scatter" not in text
    assert "reduce_window" not in text


def test_the_compiler_is_told_to_leave_convolutions_to_itself_if_it_knows_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = mw.Single("CPU:0").mesh
    options = compiler_options(mesh)
    assert options is not None
    assert "CONV" not in str(options).upper()
    unknown = {"xla_cpu_of_another_time": "1"}
    monkeypatch.setattr(formulations, "YNNPACK_WITHOUT_CONVOLUTIONS", unknown)
    formulations._knows_ynnpack.cache_clear()
    assert compiler_options(mesh) is None
    monkeypatch.undo()
    formulations._knows_ynnpack.cache_clear()
    assert compiler_options(mesh) == options
