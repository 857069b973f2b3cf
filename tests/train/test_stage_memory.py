"""What stages hold in memory, against what can be counted by hand."""

from typing import Any

import meshwright as mw
from meshwright.strategies.attach import place, step_over_mesh
from meshwright.train.mesh_step import training_state
from meshwright.train.stage_cut import StageCut

import jax
import keras
import numpy as np
import pytest

CPUS = [f"CPU:{i}" for i in range(8)]
WIDTH, LAYERS, BATCH = 32, 8, 64


def stack() -> keras.Model:
    """Equal layers without biases: 4 KiB each."""
    dense = [
        keras.layers.Dense(WIDTH, activation="tanh", use_bias=False)
        for _ in range(LAYERS)
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *dense])
    model.compile(optimizer="adam", loss="mse")
    return model


def memory(strategy: Any) -> Any:
    model, batch = stack(), (np.zeros((BATCH, WIDTH), np.float32),) * 2
    place(model, strategy)
    cut = StageCut(model.name, strategy.plan)
    step: Any = step_over_mesh(model, jax.jit(model.train_step), strategy, cut)
    return step.memory(training_state(model, batch), batch)


def test_variables_and_gradients_are_those_of_the_layers_of_a_stage() -> None:
    found = memory(mw.Pipeline(4, 8, devices=CPUS[:4]))
    of_two_layers = 2 * WIDTH * WIDTH * 4
    assert [stage.gradients for stage in found] == [of_two_layers] * 4
    for stage in found:
        # Adam has two slots for each weight; counters and metrics are a few numbers.
        assert 0 <= stage.variables - 3 * of_two_layers < 100


@pytest.mark.parametrize(
    ("schedule", "alive"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])]
)
def test_what_is_kept_grows_with_the_microbatches_under_way(
    schedule: str, alive: list[int]
) -> None:
    found = memory(mw.Pipeline(4, 8, schedule, devices=CPUS[:4]))
    one_activation = BATCH // 8 * WIDTH * 4
    pairs = zip(found, alive, strict=True)
    kept = [stage.kept / (each * one_activation) for stage, each in pairs]
    # The inputs, and for each layer its output; what the gradient of tanh wants depends
    # on the version of JAX. The last stage has targets too.
    assert kept[0] == kept[1] == kept[2]
    assert 3 <= kept[0] <= 5
    assert kept[0] + 1 <= kept[3] <= kept[0] + 3


def test_with_remat_only_what_arrives_is_kept() -> None:
    found = memory(mw.Pipeline(4, 8, devices=CPUS[:4], remat=True))
    one_activation = BATCH // 8 * WIDTH * 4
    for stage, alive in zip(found[:3], (4, 3, 2), strict=True):
        assert stage.kept == alive * one_activation
    # The last stage gets the targets too.
    assert found[3].kept == 2 * one_activation


def test_a_stage_split_over_devices_holds_its_share() -> None:
    whole = memory(mw.Pipeline(2, 4, devices=CPUS[:2]))
    split = memory(mw.Hybrid(fsdp=2, stages=2, microbatches=4, devices=CPUS[:4]))
    for one, two in zip(whole, split, strict=True):
        assert two.gradients == one.gradients / 2
        assert two.variables < 0.51 * one.variables + 100
