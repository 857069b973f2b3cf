"""The hand-written floor trains what Keras trains; else it would be no floor."""

from typing import Any

import meshwright  # noqa: F401

import floors
import jax
import numpy as np
import pytest
from jobs import Job, keras_model, load


def weights_in_keras_order(params: dict[str, Any], job: Job) -> list[Any]:
    if job.name == "mlp":
        hidden, out = params["hidden"], params["out"]
        return [hidden["w"].T, hidden["b"], out["w"], out["b"]]
    names = ["conv1", "conv2", "norm1", "conv3", "conv4", "norm2", "dense", "norm3"]
    return [params[name][part] for name in (*names, "out") for part in "wb"]


@pytest.mark.parametrize(("name", "samples"), [("cnn", 24), ("mlp", 40)])
def test_one_epoch_of_the_floor_equals_one_of_keras(name: str, samples: int) -> None:
    job = Job(name=name, samples=samples, batch_size=16, parameters=0)
    x, y = load(job)
    state, epoch, _ = floors.make_floor(job, "float32")
    parameters = {"cnn": 331_370, "mlp": 25_450}[name]
    model = keras_model(
        Job(name=name, samples=samples, batch_size=16, parameters=parameters)
    )
    started = weights_in_keras_order(state[0], job)
    for variable, value in zip(model.trainable_variables, started, strict=True):
        variable.assign(np.array(value))
    key = jax.random.key(3)
    order = np.asarray(jax.random.permutation(key, samples))
    history = model.fit(
        x[order], y[order], batch_size=job.batch_size, shuffle=False, verbose=0
    )
    state, (loss, accuracy) = epoch(state, x, y, key)
    np.testing.assert_allclose(loss, history.history["loss"][0], rtol=1e-4)
    np.testing.assert_allclose(accuracy, history.history["accuracy"][0], rtol=1e-6)
    trained = weights_in_keras_order(state[0], job)
    for variable, value in zip(model.trainable_variables, trained, strict=True):
        np.testing.assert_allclose(value, variable.numpy(), atol=3e-4)


def test_the_floor_learns_in_bfloat16_too() -> None:
    job = Job(name="mlp", samples=640, batch_size=32, parameters=0)
    x, y = load(job)
    state, epoch, hits = floors.make_floor(job, "bfloat16")
    losses = []
    for number in range(3):
        state, (loss, _) = epoch(state, x, y, jax.random.key(number))
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    assert int(hits(state, x, y)) > 0.8 * job.samples
