"""What a step over a mesh does while its program is compiled."""

import threading
from typing import Any

import meshwright as mw
from meshwright.train.mesh_step import MeshStep

import keras
import numpy as np
import pytest

BATCH = (np.ones((4, 8), np.float32), np.ones((4, 1), np.float32))


def make_step() -> MeshStep:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fitted = mw.distribute(model, mw.Single("CPU:0"))
    fitted.make_train_function()
    step = fitted.train_function.guarded
    assert isinstance(step, MeshStep)
    return step


@pytest.mark.parametrize("measures_kernels", [True, False])
def test_batches_are_not_put_while_kernels_of_a_new_program_are_tried_out(
    monkeypatch: pytest.MonkeyPatch, measures_kernels: bool
) -> None:
    monkeypatch.setattr(MeshStep, "measures_kernels", measures_kernels)
    step = make_step()
    threads: list[threading.Thread] = []
    was_put: list[bool] = []

    def program(state: Any, batch: Any) -> Any:
        putting = threading.Thread(target=step.put, args=(BATCH,))
        putting.start()
        putting.join(0.2)
        threads.append(putting)
        was_put.append(not putting.is_alive())
        return {}, state

    cut, placed = step._cut(4), step.put(BATCH).arrays
    for _ in range(2):
        step._dispatch(program, cut, [], placed)
        threads[-1].join()
    assert was_put == [not measures_kernels, True], "the first call compiles"
