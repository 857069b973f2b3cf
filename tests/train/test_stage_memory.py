"""What stages hold in memory, against what can be counted by hand."""

from typing import Any

import meshwright as mw
from meshwright.devices.runtime import usable_memory
from meshwright.errors import MemoryLimitError
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
    model = keras.Sequential([keras.Input((WIDTH,)), *dense], name="stack")
    model.compile(optimizer="adam", loss="mse")
    return model


def memory(strategy: Any, model: Any = None) -> Any:
    model, batch = model or stack(), (np.zeros((BATCH, WIDTH), np.float32),) * 2
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


def refusal(strategy: Any, verb: str = "fit", **options: Any) -> MemoryLimitError:
    model, x = mw.distribute(stack(), strategy), np.zeros((BATCH, WIDTH), np.float32)
    data = (x,) if verb == "predict" else (x, x)
    with pytest.raises(MemoryLimitError) as caught:
        getattr(model, verb)(*data, batch_size=BATCH, verbose=0, **options)
    return caught.value


def test_a_stage_over_the_limit_is_refused_before_it_runs() -> None:
    strategy = mw.Pipeline(4, 8, devices=CPUS[:4])
    most = max(memory(strategy), key=lambda stage: stage.total)
    mw.configure(memory_limit=40_000)
    error = refusal(strategy)
    received, rule, change = str(error).split("\n")
    assert received.startswith(
        "train_step of 'stack' with a batch of 64 in 8 microbatches needs "
    )
    assert "of stage 0 (variables 24.0 KiB, gradients 8.0 KiB, kept for " in received
    assert received.endswith("; the limit is 39.1 KiB.")
    assert rule == (
        "What a device keeps, and what its largest program needs, must fit its memory "
        "limit."
    )
    assert change == (
        "Use remat=True, more microbatches, or a smaller batch_size, or set "
        f"memory_limit to at least {error.needed} bytes."
    )
    assert error.needed == most.total == sum(error.by_kind.values())


def test_the_advice_fits_what_takes_the_memory() -> None:
    mw.configure(memory_limit=30_000)
    change = str(refusal(mw.Pipeline(4, 8, devices=CPUS[:4]))).split("\n")[2]
    assert change.startswith(
        "No batch size helps: use more stages, or fsdp or tensor devices in each, or "
    )
    mw.configure(memory_limit=36_000)
    remat = mw.Pipeline(4, 2, remat=True, devices=CPUS[:4])
    change = str(refusal(remat)).split("\n")[2]
    assert change.startswith("Use more microbatches, or a smaller batch_size, or set ")


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_steps_that_only_go_forward_are_weighed_too(verb: str) -> None:
    mw.configure(memory_limit=12_000)
    error = refusal(mw.Layerwise(4, devices=CPUS[:4]), verb)
    step = {"evaluate": "test_step", "predict": "predict_step"}[verb]
    assert str(error).startswith(f"{step} of 'stack' with a batch of 64 needs ")
    assert error.by_kind["gradients"] == 0


def test_what_fits_the_limit_trains() -> None:
    strategy = mw.Pipeline(4, 8, devices=CPUS[:4])
    mw.configure(memory_limit=max(stage.total for stage in memory(strategy)))
    model, x = mw.distribute(stack(), strategy), np.zeros((BATCH, WIDTH), np.float32)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    model.predict(x, batch_size=BATCH, verbose=0)


def test_layers_that_were_put_on_devices_by_hand_are_weighed_too() -> None:
    inputs = keras.Input((WIDTH,))
    with mw.device("CPU:1"):
        hidden = keras.layers.Dense(WIDTH, name="small")(inputs)
    with mw.device("CPU:2"):
        outputs = keras.layers.Dense(4 * WIDTH, name="large")(hidden)
    model = keras.Model(inputs, outputs, name="placed")
    model.compile(optimizer="adam", loss="mse")
    mw.configure(memory_limit=40_000)
    x, y = np.zeros((8, WIDTH), np.float32), np.zeros((8, 4 * WIDTH), np.float32)
    with pytest.raises(MemoryLimitError) as caught:
        model.fit(x, y, verbose=0)
    received, _, change = str(caught.value).split("\n")
    assert " on /device:CPU:2 (variables " in received
    assert change.startswith(
        "No batch size helps: put layers on other devices, or set memory_limit to "
    )
    mw.configure(memory_limit=68_000)
    with pytest.raises(MemoryLimitError) as caught:
        model.fit(x, y, verbose=0)
    _, _, change = str(caught.value).split("\n")
    assert change.startswith("Use a smaller batch_size, put layers on other devices, ")
    mw.configure(memory_limit=200_000)
    model.fit(x, y, verbose=0)


def test_every_new_shape_is_weighed() -> None:
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.Dense(8)])
    model.compile(optimizer="sgd", loss="mse")
    mw.distribute(model, mw.Layerwise(2, devices=CPUS[:2]))
    mw.configure(memory_limit=200_000)
    short, long = (np.zeros((4, n, 8), np.float32) for n in (2, 4000))
    model.fit(short, short, verbose=0)
    with pytest.raises(MemoryLimitError):
        model.fit(long, long, verbose=0)


def test_a_weight_that_two_stages_read_takes_memory_on_both() -> None:
    shared = keras.layers.Dense(WIDTH, use_bias=False)
    inputs = keras.Input((WIDTH,))
    outputs = shared(keras.layers.Dense(WIDTH, use_bias=False)(shared(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer="sgd", loss="mse")
    first, second = memory(mw.Layerwise(2, devices=CPUS[:2]), model)
    both = 2 * WIDTH * WIDTH * 4
    assert 0 <= first.variables + second.variables - both - WIDTH * WIDTH * 4 < 100


def test_the_placement_log_names_the_stages_of_layers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mw.distribute(stack(), mw.Pipeline(4, 8, devices=CPUS[:4]))
    x = np.zeros((BATCH, WIDTH), np.float32)
    mw.set_placement_log(True)
    model.fit(x, x, batch_size=BATCH, epochs=2, verbose=0)
    lines = [m for m in caplog.messages if m.startswith("Running train_step")]
    assert len(lines) == LAYERS, "once for a size of batches"
    assert [line.split("CPU:")[1][0] for line in lines] == list("00112233")


def test_devices_have_the_memory_that_they_are_given() -> None:
    """A GPU has its own, too; CPU devices share that of the host."""
    assert usable_memory(jax.devices()[3]) is None
    mw.configure(memory_limit="24MiB")
    assert usable_memory(jax.devices()[3]) == 24 * 2**20
