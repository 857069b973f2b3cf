"""Programs over CPU devices that share a pool of threads do not block each other."""

from typing import Any

import meshwright as mw
from meshwright.parallel.turns import needs_turns

import pytest

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
