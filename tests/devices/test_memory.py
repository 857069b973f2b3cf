"""Memory limits: a step that does not fit is refused before it runs."""

from collections.abc import Iterator
from typing import Any

import meshwright as mw
from meshwright.devices.memory import (
    StepMemory,
    explaining_exhaustion,
    layer_path,
    refuse_over_limit,
)
from meshwright.devices.step import refusal_of_batches_over_limit
from meshwright.errors import MemoryLimitError

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from conftest import Run

X = np.ones((64, 256), np.float32)
Y = np.ones((64, 128), np.float32)


def make_model(optimizer: str = "adam") -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((256,)),
            keras.layers.Dense(1024, activation="relu", name="wide"),
            keras.layers.Dense(128, name="narrow"),
        ],
        name="net",
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


def test_a_training_step_over_the_limit_is_refused_with_everything_to_know() -> None:
    mw.configure(memory_limit="1MiB")
    model = make_model()
    with pytest.raises(MemoryLimitError) as caught:
        model.fit(X, Y, batch_size=64, verbose=0)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.limit == 2**20
    # Closed forms: (256 + 1) * 1024 + (1024 + 1) * 128 parameters of four bytes; Adam
    # keeps two more of each, a step counter and a rate; batch x and y; loss tracker.
    parameters = 4 * (257 * 1024 + 1025 * 128)
    assert error.by_kind["parameters"] == parameters
    assert error.by_kind["optimizer state"] == 2 * parameters + 8
    assert error.by_kind["batch"] == X.nbytes + Y.nbytes
    assert sum(error.by_kind.values()) == error.needed
    assert error.largest[0] == "net/wide/kernel"
    assert len(error.largest) == 3
    received, rule, change = str(error).split("\n")
    assert received.startswith("train_step of 'net' with a batch of 64 needs ")
    assert "parameters 1.5 MiB, optimizer state 3.0 MiB" in received
    assert (
        "the limit is 1.0 MiB. Largest tensors: net/wide/kernel f32[256,1024]"
        in received
    )
    assert rule.startswith("Arguments + temporaries + outputs - aliases")
    assert change.startswith("No batch size helps, because ")
    assert change.endswith(f"or set memory_limit to at least {error.needed} bytes.")


def test_under_a_strategy_the_kinds_are_those_of_each_device() -> None:
    mw.configure(memory_limit="1MiB")
    strategy = mw.FSDP(devices=[f"CPU:{i}" for i in range(4)])
    with pytest.raises(MemoryLimitError) as caught:
        mw.distribute(make_model(), strategy).fit(X, Y, batch_size=64, verbose=0)
    kinds = caught.value.by_kind
    parameters = (257 * 1024 + 1025 * 128) * 4 // 4
    assert kinds["parameters"] == parameters
    assert kinds["optimizer state"] == 2 * parameters + 8
    assert kinds["batch"] == (X.nbytes + Y.nbytes) // 4
    assert sum(kinds.values()) == caught.value.needed


def test_the_need_is_what_the_compiler_says() -> None:
    def step(state: list[list[jax.Array]], data: jax.Array) -> list[list[jax.Array]]:
        return [[state[0][0] + data.sum()]]

    state = [[jnp.ones((100, 10))]]
    lowered = jax.jit(step, donate_argnums=0).lower(state, jnp.ones((50,)))
    compiled = lowered.compile()
    memory = StepMemory.of(compiled, {"state[0][0]": ("parameters", "w")})
    assert memory.arguments == 4 * (1000 + 50)
    assert memory.aliased == 4 * 1000, "the donated argument is written in place"
    assert memory.argument_kinds == {"parameters": 4000, "batch": 200}
    analysis = compiled.memory_analysis()
    assert memory.needed == (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def test_the_model_keeps_its_weights_after_a_refusal_and_can_go_on() -> None:
    model = make_model()
    before = model.get_weights()
    mw.configure(memory_limit="1MiB")
    with pytest.raises(MemoryLimitError):
        model.fit(X, Y, verbose=0)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    mw.configure(memory_limit="64MiB")
    model.fit(X, Y, verbose=0)


def test_a_refused_step_has_not_run() -> None:
    ran: list[int] = []

    class Net(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            jax.debug.callback(lambda: ran.append(1))
            return super().train_step(state, data)

    model = Net([keras.Input((256,)), keras.layers.Dense(128)])
    model.compile(optimizer="sgd", loss="mse")
    mw.configure(memory_limit="1KiB")
    with pytest.raises(MemoryLimitError):
        model.fit(X, Y, verbose=0)
    jax.effects_barrier()
    assert not ran
    mw.configure(memory_limit="1GiB")
    model.fit(X, Y, batch_size=64, verbose=0)
    jax.effects_barrier()
    assert ran == [1]


def test_a_later_and_larger_batch_is_checked_too() -> None:
    mw.configure(memory_limit="8MiB")
    model = make_model("sgd")

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(3):
            yield X, Y
        yield np.ones((8192, 256), np.float32), np.ones((8192, 128), np.float32)

    with pytest.raises(MemoryLimitError, match="with a batch of 8192"):
        model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0)


def test_batches_on_their_way_to_a_device_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    mw.configure(memory_limit="64MiB")
    model = make_model()
    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(MemoryLimitError, match="A batch of 64"):
        model.train_on_batch(X, Y)


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_come_back_when_a_batch_finds_no_room_on_its_way(steps: int) -> None:
    mw.configure(memory_limit="64MiB")
    model = make_model()
    model.compile(optimizer="sgd", loss="mse", steps_per_execution=steps)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(4):
            yield X, Y
        with refusal_of_batches_over_limit(X):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with pytest.raises(MemoryLimitError):
        model.fit(batches(), steps_per_epoch=9, shuffle=False, verbose=0)
    reference = make_model("sgd")
    reference.fit(X, Y, batch_size=64, epochs=4, verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs, "as after the steps that ran")


def test_the_suggested_batch_size_fits_and_the_refused_one_does_not() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4096, 256)).astype(np.float32)
    y = np.zeros((4096, 128), np.float32)
    mw.configure(memory_limit="16MiB")
    model = make_model()
    with pytest.raises(MemoryLimitError) as caught:
        model.fit(x, y, batch_size=4096, verbose=0)
    change = str(caught.value).split("\n")[2]
    assert change.startswith("Use batch_size=")
    batch_size = int(change.split("=")[1].split()[0])
    assert 64 < batch_size < 4096, "neither timid nor useless"
    model.fit(x, y, batch_size=batch_size, epochs=1, verbose=0)


def test_a_step_within_the_limit_runs_as_ever() -> None:
    reference = make_model()
    reference.fit(X, Y, batch_size=16, verbose=0)
    mw.configure(memory_limit="256MiB")
    model = make_model()
    model.fit(X, Y, batch_size=16, verbose=0)
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_evaluate_and_predict_keep_the_limit_too() -> None:
    model = make_model()
    mw.configure(memory_limit="100KiB")
    with pytest.raises(MemoryLimitError, match=r"^test_step of 'net'"):
        model.evaluate(X, Y, verbose=0)
    with pytest.raises(MemoryLimitError, match=r"^predict_step of 'net'"):
        model.predict(X, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


def test_a_limit_that_tightens_between_two_fits_counts() -> None:
    model = make_model()
    mw.configure(memory_limit="64MiB")
    model.fit(X, Y, verbose=0)
    mw.configure(memory_limit="1MiB")
    with pytest.raises(MemoryLimitError):
        model.fit(X, Y, verbose=0)


def test_a_step_over_several_devices_counts_the_bytes_of_one() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = jax.ShapeDtypeStruct((8, 1000), jnp.float32, sharding=split)
    lowered = jax.jit(lambda data: data * 2).lower(whole)
    memory = StepMemory.of(lowered.compile(), {})
    assert memory.arguments == memory.outputs == 4 * 1000
    refuse_over_limit(lowered, {}, 8000, "step", 8)
    with pytest.raises(MemoryLimitError):
        refuse_over_limit(lowered, {}, 7999, "step", 8)


class GpuCompiler:
    """A lowered step whose compiler has no room for trials, as on a limited GPU."""

    def __init__(self, lowered: Any) -> None:
        self.lowered = lowered

    def compile(self, compiler_options: dict[str, int] | None = None) -> Any:
        if compiler_options == {"xla_gpu_autotune_level": 0}:
            return self.lowered.compile()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to get configs")


def test_a_gpu_compiler_without_room_for_its_trials_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowered = jax.jit(lambda data: data * 2).lower(jnp.ones((8, 1000)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(MemoryLimitError, match=r"Arguments \+ temporaries"):
        refuse_over_limit(GpuCompiler(lowered), {}, 100, "step", 8)
    with pytest.raises(MemoryLimitError) as caught:
        refuse_over_limit(GpuCompiler(lowered), {}, 10**6, "step", 8)
    received, rule, change = str(caught.value).split("\n")
    assert received.startswith("step with a batch of 8 needs 62.5 KiB per device")
    assert rule == (
        "The step would fit, but the compiler found no room beside the model to try "
        "out kernels for it."
    )
    assert change == "Use a batch_size well below 8, or raise memory_limit."


def test_a_large_activation_is_named_by_its_layer() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(4096, activation="tanh", name="fat"),
            keras.layers.Dense(1, name="head"),
        ],
        name="net",
    )
    model.compile(optimizer="sgd", loss="mse")
    mw.configure(memory_limit="2MiB")
    with pytest.raises(MemoryLimitError) as caught:
        model.fit(np.ones((512, 8)), np.ones((512, 1)), batch_size=512, verbose=0)
    assert caught.value.largest[0] == "fat"
    assert "f32[512,4096] 8.0 MiB (temporary)" in str(caught.value)


def test_a_batch_that_finds_no_room_on_its_device_is_refused_in_our_words() -> None:
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    data = (np.zeros((8, 1024), np.float32), np.zeros(8, np.float32))
    mw.configure(memory_limit="16KiB")
    with pytest.raises(MemoryLimitError) as caught, refusal_of_batches_over_limit(data):
        raise full
    assert str(caught.value).split("\n") == [
        "A batch of 8 (32.0 KiB) found no room on its device; the limit is 16.0 KiB.",
        "A batch, the next one and the model must fit the memory limit of a device.",
        "Use a batch_size well below 8, or raise memory_limit.",
    ]
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError), refusal_of_batches_over_limit(data):
        raise other


def test_without_a_limit_the_allocator_s_own_error_passes() -> None:
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError), refusal_of_batches_over_limit(X):
        raise full


def test_a_device_that_is_full_is_explained_with_a_way_out() -> None:
    # faults.md row 12
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore of it")
    with (
        pytest.raises(MemoryLimitError) as caught,
        explaining_exhaustion("train_step of 'm'", 64, 2),
    ):
        raise full
    assert caught.value.exit_code == 3
    assert str(caught.value).split("\n") == [
        "train_step of 'm' with a batch of 64 in 2 microbatches found no room on its "
        "device: RESOURCE_EXHAUSTED: Out of memory",
        "The weights, the state of the optimizer, what is kept for the gradients and "
        "the batches must fit the memory of each device.",
        "Use accumulate=4 or remat=True in the strategy, or a smaller batch_size; "
        "mw.preflight(model, batch_size=64) says what a step needs and the smallest "
        "change that fits.",
    ]
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        explaining_exhaustion("train_step of 'm'", 64, 1),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("jit(train_step)/jvp(wide)/dot_general", "wide"),
        ("jit(train_step)/transpose(jvp(a))/b/jit(relu)/max", "a/b"),
        ("jit(train_step)/adam/add", "adam"),
        ("jit(train_step)/add", "train_step"),
        ("", "step"),
    ],
)
def test_layers_are_found_in_the_names_of_operations(name: str, path: str) -> None:
    assert layer_path(name) == path


def test_limits_hold_on_stand_in_gpus(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw, keras, numpy as np\n"
        "mw.configure(virtual='GPU:2', memory_limit='24KiB', memory_growth=True)\n"
        "assert {d.memory_limit for d in mw.devices()} == {24 * 1024}\n"
        "with mw.device('GPU:1'):\n"
        "    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])\n"
        "model.compile('sgd', 'mse')\n"
        "try:\n"
        "    model.fit(np.ones((8, 64)), np.ones((8, 64)), verbose=0)\n"
        "except mw.errors.MemoryLimitError as error:\n"
        "    print('refused', error.limit)\n"
    )
    assert done.stdout == "refused 24576\n"
