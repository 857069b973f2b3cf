"""Strategies beside `MirroredStrategy`."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright import tf

import keras
import numpy as np
import pytest

from conformance import semantics
from forks import environment_of_scripts


def model() -> Any:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.05), "mse")
    return made


def fit(made: Any) -> float:
    x = np.random.default_rng(0).random((32, 4), "float32")
    history = made.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=4, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    return float(history.history["loss"][-1])


def of_meshwright(name: str) -> None:
    if not hasattr(mw, name):
        pytest.skip(f"meshwright.{name} does not exist yet")


@semantics("4.9.1", "same")
def test_central_storage_keeps_variables_on_one_device() -> None:
    of_meshwright("CentralStorage")
    central = tf.distribute.experimental.CentralStorageStrategy
    assert central is tf.distribute.CentralStorageStrategy
    strategy = central(["CPU:0", "CPU:1"], "CPU:2")
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        v = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
        made = model()
    assert type(v).__name__ == "AggregatingVariable"
    assert v.device.endswith("CPU:2")
    fit(made)


@semantics("4.9.2", "better", "A device that is not there is an error at once.")
def test_one_device() -> None:
    with pytest.raises(RuntimeError, match="GPU:7 unknown device"):
        tf.distribute.OneDeviceStrategy("GPU:7")
    with tf.distribute.OneDeviceStrategy("CPU:5").scope():
        made = model()
    fit(made)
    assert mw.placement(made)[0].devices == ("/device:CPU:5",)


@semantics(
    "4.9.5", "better", "It does not hang: workers are the devices of the process."
)
@semantics("4.9.6", "better", "`fit` works.")
def test_a_parameter_server_trains_by_fit() -> None:
    of_meshwright("AsyncServer")
    server = tf.distribute.experimental.ParameterServerStrategy
    assert server is tf.distribute.ParameterServerStrategy
    strategy = server(max_staleness=2, devices=["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        made = model()
    fit(made)


def test_resolvers_are_refused() -> None:
    for strategy in (
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.ParameterServerStrategy,
    ):
        with pytest.raises(AttributeError, match="cluster_resolver is not covered"):
            strategy(cluster_resolver=object())


TWO = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}}


@semantics("4.9.3", "better", "Text that is no JSON is an error in words.")
def test_the_cluster_is_told_by_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tf.distribute.MultiWorkerMirroredStrategy
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert make().num_replicas_in_sync == 8
    monkeypatch.setenv("TF_CONFIG", json.dumps({**TWO, "task": {"index": 3}}))
    with pytest.raises(
        ValueError, match="The task_id 3 exceeds the maximum id of worker"
    ):
        make()
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(
        ValueError, match=r"TF_CONFIG is '{'.*It is JSON with the workers'"
    ):
        make()
    monkeypatch.setenv("TF_CONFIG", json.dumps({**TWO, "task": {"index": 1}}))
    with pytest.raises(
        RuntimeError, match="Collective ops must be configured at program"
    ):
        make()


WORKER = """
from meshwright import tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras, numpy as np
x = np.arange(12, dtype='float32').reshape(6, 2) / 12
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), 'mse')
model.set_weights([np.ones((2, 1), 'float32'), np.zeros(1, 'float32')])
model.fit(x, x[:, :1], batch_size=2, shuffle=False, verbose=0)
context = tf.distribute.get_replica_context
total = strategy.run(lambda: context().replica_id_in_sync_group + 1)
weights = [f"{w:.4f}" for w in model.get_weights()[0].ravel()]
print(strategy.num_replicas_in_sync, weights,
      strategy.reduce('SUM', total, axis=None).numpy(), end=' ')
mse = keras.losses.MeanSquaredError()
shares = strategy.run(lambda: mse(np.zeros((1, 1)), np.full((1, 1), 2.0)))
print(strategy.reduce('SUM', shares, axis=None).numpy())
"""


@pytest.mark.processes
def test_two_workers_train_one_model(tmp_path: Path) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for each in sockets:
        each.close()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={
                **environment_of_scripts(),
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": i},
                    }
                ),
            },
        )
        for i in range(2)
    ]
    said = [worker.communicate(timeout=200)[0] for worker in workers]
    x = np.arange(12, dtype="float32").reshape(6, 2) / 12
    alone = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    alone.compile(keras.optimizers.SGD(0.1), "mse")
    alone.set_weights([np.ones((2, 1), "float32"), np.zeros(1, "float32")])
    alone.fit(x, x[:, :1], batch_size=2, shuffle=False, verbose=0)
    weights = [f"{w:.4f}" for w in alone.get_weights()[0].ravel()]
    assert [text.splitlines()[-1] for text in said] == [f"2 {weights} 3 4.0"] * 2
