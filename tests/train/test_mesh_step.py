"""What a step over a mesh does while its program is compiled."""

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import meshwright as mw
from meshwright.devices.strategy_hooks import trace_hooks
from meshwright.parallel.plan import Plan
from meshwright.train.mesh_programs import FETCHED_IN_TURN, MeshPrograms
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


@pytest.mark.parametrize("offload", [True, False])
def test_a_gpu_does_not_fetch_all_state_of_the_host_at_once(offload: bool) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    gpu = SimpleNamespace(platform="gpu")
    programs = MeshPrograms(
        model,
        SimpleNamespace(__name__="train_step", __wrapped__=model.train_step),
        Plan(offload=offload),
        SimpleNamespace(devices=np.array([gpu])),
    )
    assert programs._options() == (FETCHED_IN_TURN if offload else None)


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


@pytest.mark.parametrize(("devices", "uses_library"), [(1, True), (2, False)])
def test_recurrent_layers_are_not_left_to_a_library_that_cannot_divide_them(
    monkeypatch: pytest.MonkeyPatch, devices: int, uses_library: bool
) -> None:
    from jax.experimental import rnn as library

    rnn = importlib.import_module("keras.src.backend.jax.rnn")
    calls: list[bool] = []

    def lstm(*args: Any, **kwargs: Any) -> Any:
        if trace_hooks() is not None:
            calls.append(True)
        raise NotImplementedError  # Keras goes on without it.

    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)
    monkeypatch.setattr(library, "lstm", lstm)
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4)])
    model.compile("sgd", "mse")
    mw.distribute(model, mw.Mirrored([f"CPU:{i}" for i in range(devices)]))
    model.fit(np.ones((4, 5, 3)), np.ones((4, 4)), batch_size=4, verbose=0)
    assert bool(calls) == uses_library
