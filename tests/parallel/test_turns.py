"""Programs over CPU devices that share a pool of threads do not block each other."""

from typing import Any

import meshwright as mw
from meshwright.parallel.turns import Call, needs_turns, run_together

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

MANY_LARGE_STEPS = """
import meshwright as mw
import keras, numpy as np

x = np.ones((256, 784), "float32")
y = np.zeros(256, "int32")
layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
with mw.Mirrored().scope():
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss)

def batches():
    while True:
        yield x, y

model.fit(batches(), steps_per_epoch=60, shuffle=False, verbose=0)
print("trained", model.optimizer.iterations.numpy())
"""


@pytest.mark.parametrize("number", ["2", "8"])
def test_many_steps_with_large_matrices_come_to_an_end(
    run_script: Any, number: str
) -> None:
    # In plain JAX this program stops for good after a few of its steps.
    done = run_script(MANY_LARGE_STEPS, MESHWRIGHT_VIRTUAL=number, JAX_PLATFORMS="cpu")
    assert done.stdout == "trained 60\n"


def test_only_cpu_devices_of_one_process_take_turns() -> None:
    assert needs_turns(mw.Mirrored(["CPU:0", "CPU:1"]).mesh)
    assert not needs_turns(mw.Single("CPU:1").mesh)


def call_on(device: str, function: Any, *args: Any) -> Call:
    place = NamedSharding(mw.Single(device).mesh, PartitionSpec())
    given = tuple(jax.device_put(each, place) for each in args)
    return Call(place.mesh, jax.jit(function), given)


def test_programs_on_several_devices_return_in_the_order_of_their_calls() -> None:
    numbers = np.arange(4.0, dtype=np.float32)
    calls = [call_on(f"CPU:{i}", lambda x, i=i: x + i, numbers) for i in range(8)]
    for _ in range(2):
        results = run_together(calls)
        for i, result in enumerate(results):
            assert {device.id for device in result.devices()} == {i}
            np.testing.assert_array_equal(result, numbers + i)
    assert run_together([]) == []


def test_programs_over_several_devices_take_turns_when_called_together() -> None:
    mesh = mw.Mirrored(["CPU:0", "CPU:1"]).mesh
    split = jax.device_put(
        np.arange(4.0), NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    )
    calls = [Call(mesh, jax.jit(lambda x, n=n: x.sum() + n), (split,)) for n in (1, 2)]
    assert [float(result) for result in run_together(calls)] == [7.0, 8.0]


def test_the_error_of_one_of_several_programs_is_raised() -> None:
    def fail(x: Any) -> Any:
        raise KeyError("no such thing")

    def called(x: Any) -> Any:
        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    numbers = np.ones(2, np.float32)
    calls = [call_on("CPU:0", lambda x: x, numbers), call_on("CPU:1", called, numbers)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"):
        jax.block_until_ready(run_together(calls))
