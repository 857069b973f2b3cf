"""Loggers of other packages beside a real training."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import ConfigurationError, MonitorWarning
from meshwright.train.loggers import adapt

import keras
import numpy as np
import pytest
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X[:, :1]


def fit(loggers: list[Any], **options: Any) -> Any:
    layer = keras.layers.Dense(1, name="line")
    model = keras.Sequential([keras.Input((4,)), layer], name="net")
    model.compile("sgd", "mse")
    mw.distribute(model, mw.Mirrored(["CPU:0", "CPU:1"]))
    monitor = mw.Monitor("none", loggers=loggers, **options)
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[monitor])


def events_in(folder: Path) -> list[Any]:
    """What a file of TensorBoard's holds: lengths, checksums and events."""
    (file,) = folder.iterdir()
    data, found = file.read_bytes(), []
    while data:
        length = int.from_bytes(data[:8], "little")
        event = data[12 : 12 + length]
        checksum = int.from_bytes(data[12 + length : 16 + length], "little")
        assert masked_crc32c(event) == checksum
        found.append(Event.FromString(event))
        data = data[16 + length :]
    return found


def test_tensorboard_gets_scalars_and_histograms_without_tensorflow(
    tmp_path: Path,
) -> None:
    writer = SummaryWriter(str(tmp_path))
    history = fit([writer], histograms=True).history
    writer.close()
    assert "tensorflow" not in sys.modules
    values = [(e.step, v) for e in events_in(tmp_path) for v in e.summary.value]
    losses = {step: v.simple_value for step, v in values if v.tag == "loss"}
    assert losses[8] == pytest.approx(history["loss"][0])
    assert losses[16] == pytest.approx(history["loss"][1])
    tags = {v.tag for _, v in values}
    assert {"samples_per_second", "step_seconds", "devices_share", "epoch"} <= tags
    kernels = [(step, v.histo.num) for step, v in values if v.tag == "net/line/kernel"]
    assert kernels == [(8, 4.0), (16, 4.0)]


class Mlflow:
    """As the module of that name, and its clients."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))


class WandbRun:
    """As what `wandb.init()` returns."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))


def test_mlflow_weights_and_biases_and_functions_get_the_same_numbers() -> None:
    mlflow, run = Mlflow(), WandbRun()
    called: list[tuple[int, Mapping[str, float]]] = []
    loggers = [mlflow, run, lambda step, numbers: called.append((step, numbers))]
    history = fit(loggers).history
    assert mlflow.logged == run.logged == called
    step, numbers = mlflow.logged[-1]
    assert (step, numbers["epoch"]) == (16, 1.0)
    assert numbers["loss"] == pytest.approx(history["loss"][1])
    assert all(isinstance(value, float | int) for value in numbers.values())


def test_steps_only_rise() -> None:
    run = WandbRun()
    fit([run])
    steps = [step for step, _ in run.logged]
    assert steps == sorted(steps)


def test_a_logger_that_fails_is_dropped_and_nothing_stops() -> None:
    # faults.md row 48
    def fail(step: int, numbers: Any) -> None:
        raise ConnectionError("no network")

    run = WandbRun()
    with pytest.warns(MonitorWarning) as caught:
        history = fit([fail, run])
    (warning,) = caught
    assert str(warning.message) == (
        "Monitor has dropped the function fail, which failed: "
        "ConnectionError('no network'). The training goes on."
    )
    assert len(history.epoch) == 2
    assert run.logged[-1][0] == 16, "the others get their numbers"


def test_a_disk_that_is_full_drops_tensorboard(tmp_path: Path) -> None:
    # faults.md row 48
    writer = SummaryWriter(str(tmp_path))
    fit([writer])

    def refuse(*args: Any) -> None:
        raise OSError(28, os.strerror(28))

    writer.add_scalar = refuse
    with pytest.warns(MonitorWarning, match="No space left on device"):
        history = fit([writer])
    assert len(history.epoch) == 2


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ConfigurationError) as raised:
        adapt("tensorboard")
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        "Monitor received 'tensorboard' (a str) as a logger.",
        "A logger is a TensorBoard writer, the module mlflow, a run of Weights & "
        "Biases, or a function of a step and its numbers.",
        "Pass, for example, loggers=[tensorboardX.SummaryWriter('runs/x')].",
    ]


def test_some_steps_are_traced(tmp_path: Path) -> None:
    fit([], profile=(3, 5), folder=tmp_path / "trace")
    names = {file.name for file in (tmp_path / "trace").rglob("*.*")}
    assert any(name.endswith(".xplane.pb") for name in names)
    assert "perfetto_trace.json.gz" in names


@pytest.mark.parametrize("steps", [(0, 5), (5, 3), 10, (1, 2, 3), (1.0, 2), (True, 2)])
def test_a_trace_is_from_one_step_to_another(steps: Any) -> None:
    with pytest.raises(ConfigurationError) as raised:
        mw.Monitor(profile=steps)
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        f"Monitor received profile={steps!r}.",
        "It is a pair of steps: the first one to trace, from 1, and the last one.",
        "Use, for example, profile=(10, 15); the first steps are compiled.",
    ]
