"""`mw.Monitor` beside real trainings."""

import re
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.devices.memory import StepMemory
from meshwright.errors import ConfigurationError, MonitorWarning
from meshwright.report.run_page import run_page
from meshwright.report.run_record import RunRecord
from meshwright.train import monitor as monitoring
from meshwright.train.display import Lines
from meshwright.train.glance import Glance
from meshwright.train.monitor import Monitor
from meshwright.train.stopwatch import THREAD_NAME

import jax
import keras
import numpy as np
import pytest

X = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
Y = X[:, :1]
CPUS = ["CPU:0", "CPU:1"]


def make_model() -> Any:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="line")
    model.compile("sgd", "mse", metrics=["mae"])
    return mw.distribute(model, mw.Mirrored(CPUS))


class Shown:
    """A display that remembers, and shows every lap."""

    every = 0.0

    def __init__(self) -> None:
        self.glances: list[Glance] = []
        self.warnings: list[str] = []
        self.told: list[str] = []
        self.is_closed = False

    def show(self, glance: Glance) -> None:
        self.glances.append(glance)

    def tell(self, words: str) -> None:
        self.told.append(words)

    def warn(self, words: str) -> None:
        self.warnings.append(words)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    made = Shown()
    monkeypatch.setattr(monitoring, "make_display", lambda how: made)
    return made


def batches(pause: float = 0.0) -> Iterator[Any]:
    for start in range(0, 70, 10):
        time.sleep(pause)
        yield X[start : start + 10], Y[start : start + 10]


@pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:Your input ran out")
@pytest.mark.parametrize("kind", ["arrays", "stream", "one by one"])
def test_every_step_and_sample_is_counted_once(kind: str, shown: Shown) -> None:
    model, watching = make_model(), Monitor()
    if kind == "stream":
        model.fit(batches(), epochs=1, verbose=0, callbacks=[watching])
        sizes = [(7, 70)]
    else:
        alone = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: None)
        callbacks = [watching] if kind == "arrays" else [watching, alone]
        options: dict[str, Any] = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        model.fit(X, Y, batch_size=32, validation_data=(X, Y), **options)
        sizes = [(3, 70), (3, 70)]
    assert [(each.steps, each.samples) for each in watching.spent] == sizes
    assert shown.glances[-1].is_end
    assert shown.is_closed


def test_it_shows_where_the_fit_is_and_what_it_has_come_to(shown: Shown) -> None:
    history = make_model().fit(
        X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[Monitor()]
    )
    ends = [glance for glance in shown.glances if glance.is_end]
    assert [(g.epoch, g.epochs, g.step, g.steps) for g in ends] == [
        (1, 2, 3, 3),
        (2, 2, 3, 3),
    ]
    for end, loss in zip(ends, history.history["loss"], strict=True):
        assert end.numbers["loss"] == pytest.approx(loss)
        assert set(end.numbers) == {"loss", "mae"}
    assert ends[-1].seconds_left == 0
    (activity,) = ends[0].activities
    assert re.fullmatch(r"\d+ CPUs on \d+ cores", activity.name)
    assert activity.memory is not None


def test_it_changes_neither_the_result_nor_how_steps_are_dispatched(
    shown: Shown,
) -> None:
    found = []
    for callbacks in ([], [Monitor()]):
        keras.utils.set_random_seed(1)
        model = make_model()
        model.fit(X, Y, batch_size=10, epochs=2, verbose=0, callbacks=callbacks)
        strategy = model._meshwright_strategy
        found.append((str(strategy.pace["fit"]), *model.get_weights()))
    (pace, *weights), (pace_watched, *watched) = found
    assert pace == pace_watched
    for one, other in zip(weights, watched, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:Your input ran out")
def test_devices_that_starve_are_told_of(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.timeline.ENOUGH_SECONDS", 0.0)
    model, watching = make_model(), Monitor()
    model.fit(batches(), verbose=0, callbacks=[watching])
    shown.every = 9.0
    model.fit(batches(pause=0.03), verbose=0, callbacks=[watching])
    (spent,) = watching.spent
    assert spent.input > 0.1
    said = [words for words in shown.warnings if "waited for data" in words]
    assert said


def test_what_is_lost_in_short_epochs_counts_together(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.timeline.ENOUGH_SECONDS", 1.0)
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(0.02)
    )
    model, callbacks = make_model(), [slow, Monitor()]
    model.fit(X, Y, batch_size=10, epochs=20, verbose=0, callbacks=callbacks)
    said = [words for words in shown.warnings if "waited for Python" in words]
    assert said, "each epoch took 0.14 s"


def test_callbacks_that_take_long_are_time_of_python(shown: Shown) -> None:
    slow = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(0.02)
    )
    watching = Monitor()
    make_model().fit(X, Y, batch_size=10, verbose=0, callbacks=[slow, watching])
    (spent,) = watching.spent
    assert spent.host > 0.1
    goodput = shown.glances[-1].goodput
    assert goodput is not None
    assert goodput < spent.devices / spent.seconds + 0.01, "they were idle meanwhile"


def test_a_display_that_fails_does_not_stop_the_training(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(glance: Glance) -> None:
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(shown, "show", fail)
    model = make_model()
    with pytest.warns(MonitorWarning) as caught:
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[Monitor()])
    (warning,) = caught
    assert str(warning.message) == (
        "Monitor cannot show the training any more: BrokenPipeError('nobody reads'). "
        "It goes on."
    )
    assert len(model.history.epoch) == 2


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
def test_warnings_that_are_errors_do_not_stop_the_training(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(glance: Glance) -> None:
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(shown, "show", fail)
    model = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, batch_size=10, epochs=2, verbose=0, callbacks=[Monitor()])
    assert len(model.history.epoch) == 2


def test_a_fit_that_fails_leaves_neither_thread_nor_display(shown: Shown) -> None:
    def fail(epoch: int, logs: Any) -> None:
        raise RuntimeError("enough")

    callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    with pytest.raises(RuntimeError, match="enough"):
        make_model().fit(X, Y, verbose=0, callbacks=[Monitor(), callback])
    assert shown.is_closed
    deadline = time.monotonic() + 10
    while any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread ends when the devices are done"
        time.sleep(0.01)


def test_a_monitor_follows_one_fit_after_the_other(shown: Shown) -> None:
    model, watching = make_model(), Monitor()
    for epochs in (2, 1):
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[watching])
        assert len(watching.spent) == epochs


def test_lines_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    watching = Monitor(display="lines")
    make_model().fit(X, Y, batch_size=32, verbose=0, callbacks=[watching])
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"epoch 1/1, step 3/3: .*loss .* \| .* samples/s, ", last)
    assert Lines.every > 1


def test_a_run_of_a_plain_script_has_files_and_a_report(tmp_path: Path) -> None:
    model, watching = make_model(), Monitor("none", run=tmp_path / "run")
    for epochs in (2, 1):
        model.fit(X, Y, batch_size=10, epochs=epochs, verbose=0, callbacks=[watching])
    record = RunRecord.read(tmp_path / "run")
    assert record.config["versions"]["keras"] == keras.__version__
    assert record.plan["strategy"] == "Mirrored(data=2)"
    assert record.state == "finished after step 21"
    steps = [line["step"] for line in record.metrics if line["epoch"] == 0]
    assert steps[-1] == 21, "the second fit counts on"
    assert record.variables[0]["name"].startswith("line/")
    assert 0 < record.metrics[-1]["goodput"] < 1
    assert "This command does it again" in run_page(record)


def test_a_run_that_begins_anew_leaves_nothing_of_the_one_before(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        make_model().fit(
            X, Y, batch_size=10, verbose=0, callbacks=[Monitor("none", run=tmp_path)]
        )
    steps = [line["step"] for line in RunRecord.read(tmp_path).metrics]
    assert steps[-1] == 7


def test_the_folder_of_a_launcher_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "launches.jsonl").touch()
    with pytest.raises(ConfigurationError) as raised:
        make_model().fit(X, Y, verbose=0, callbacks=[Monitor("none", run=tmp_path)])
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        f"Monitor received run={str(tmp_path)!r}, which is a run of meshwright train.",
        "A folder belongs to one run, and the launcher writes its files.",
        "Use another folder, or leave run out.",
    ]


def fit_until_seen(watching: Monitor, **options: Any) -> Any:
    """Trains until somebody has looked at the devices, or gave it up."""

    def stop_when_seen(epoch: int, logs: Any) -> None:
        model.stop_training = watching._sampler is None or watching.sample is not None

    stop = keras.callbacks.LambdaCallback(on_epoch_end=stop_when_seen)
    model = make_model()
    callbacks = [watching, stop]
    model.fit(X, Y, batch_size=10, epochs=3000, verbose=0, callbacks=callbacks)
    return model


def test_what_devices_did_is_shown_kept_and_reported(
    shown: Shown, tmp_path: Path
) -> None:
    watching = Monitor(run=tmp_path, look_after=0)
    fit_until_seen(watching)
    sample = watching.sample
    assert sample is not None
    assert list(sample.devices) == [f"/device:{name}" for name in CPUS]
    assert all(each.computing > 0 for each in sample.devices.values())
    assert [words.split(":")[1] for words in shown.told[:2]] == ["0", "1"]
    assert shown.glances[-1].sample is sample
    record = RunRecord.read(tmp_path)
    assert record.occupation is not None
    assert record.occupation.devices.keys() == sample.devices.keys()
    assert sum(record.shares.values()) == pytest.approx(1, abs=0.01)
    parts = [f"{part}_share" for part in ("computing", "communicating", "pausing")]
    last = record.metrics[-1]
    assert sum(last[part] for part in parts) == pytest.approx(
        last["devices_share"], abs=0.001
    )
    page = run_page(record)
    assert "What each device did" in page
    assert "computing_share" not in page, "it is no metric of the model"


def test_a_profile_of_the_user_s_own_goes_on_and_is_told_of(
    shown: Shown, tmp_path: Path
) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it makes all that Python does slow
    jax.profiler.start_trace(str(tmp_path), profiler_options=options)
    try:
        with pytest.warns(MonitorWarning) as caught:
            fit_until_seen(watching := Monitor(look_after=0))
    finally:
        jax.profiler.stop_trace()
    (warning,) = caught
    assert re.fullmatch(
        r"Monitor cannot look at what devices do: JAX's profiler failed: .*rofile.*\. "
        r"The training goes on\.",
        str(warning.message),
    )
    assert watching.sample is None


def test_what_devices_do_between_epochs_is_not_looked_at(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.sampler._SHORTEST", 60.0)
    on: list[bool] = []

    class Between(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            on.append(is_profiled())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            on.append(is_profiled())

    watching = Monitor(look_after=0)
    for checks in ((X, Y), None):
        make_model().fit(
            *(X, Y, 10),
            epochs=3,
            verbose=0,
            validation_data=checks,
            callbacks=[watching, Between()],
        )
        assert watching.sample is not None, "the look was on, and was ended"
    assert not any(on)


def is_profiled() -> bool:
    try:
        jax.profiler.start_trace(tempfile.mkdtemp())
    except RuntimeError:
        return True
    jax.profiler.stop_trace()
    return False


@pytest.mark.parametrize(
    "options",
    [{}, {"look_after": None}, {"look_after": 0, "profile": (1, 2)}],
    ids=["short", "unwanted", "traced"],
)
def test_not_every_training_is_looked_at(
    shown: Shown, tmp_path: Path, options: Any
) -> None:
    watching = Monitor(folder=tmp_path, **options)
    make_model().fit(X, Y, batch_size=10, epochs=3, verbose=0, callbacks=[watching])
    assert watching.sample is None
    assert len(watching.spent) == 3


@pytest.mark.parametrize(
    "strategy",
    [
        mw.Mirrored,
        lambda cpus: mw.FSDP(devices=cpus),
        lambda cpus: mw.Pipeline(["second"], 2, devices=cpus),
    ],
    ids=["mirrored", "fsdp", "pipeline"],
)
def test_the_memory_of_a_step_is_known_by_kind(strategy: Any, tmp_path: Path) -> None:
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(64),
            keras.layers.Dense(1, name="second"),
        ]
    )
    model.compile("adam", "mse")
    mw.distribute(model, strategy(CPUS))
    model.fit(X, Y, batch_size=10, verbose=0, callbacks=[Monitor("none", run=tmp_path)])
    record = RunRecord.read(tmp_path)
    assert [*record.memory] == [f"/device:{name}" for name in CPUS]
    for name, each in record.memory.items():
        held = record.bytes_by_device[name]
        kinds = each["kinds"]
        assert kinds["parameters"] == held["parameters"]
        # The compiler counts the learning rate and the number of updates as well.
        assert 0 <= kinds["optimizer state"] - held["optimizer state"] <= 16
        assert kinds["temporaries"] > 0
    assert "By the account of the compiler" in run_page(record)


def test_memory_that_cannot_be_told_does_not_stop_a_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("an XLA of tomorrow")

    monkeypatch.setattr(StepMemory, "of", fail)
    model, watching = make_model(), Monitor("none", run=tmp_path)
    with pytest.warns(MonitorWarning) as caught:
        model.fit(X, Y, epochs=2, verbose=0, callbacks=[watching])
    (warning,) = caught
    assert str(warning.message) == (
        "The memory of a step of 'line' cannot be told: KeyError('an XLA of "
        "tomorrow'). The training goes on."
    )
    assert RunRecord.read(tmp_path).memory == {}


def test_a_model_without_a_strategy_cannot_be_followed() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="plain")
    model.compile("sgd", "mse")
    with pytest.raises(ConfigurationError) as raised:
        model.fit(X, Y, verbose=0, callbacks=[Monitor()])
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        "Monitor was given to a fit of 'plain', which has no strategy.",
        "It follows the steps of models that a strategy trains.",
        "Use mw.distribute(model, mw.Single()) first (mw.Single('GPU:1') for another "
        "device than the first one), or leave the monitor out.",
    ]


def test_a_run_is_the_name_of_a_folder() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Monitor(run=3)  # type: ignore[arg-type]
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        "Monitor received run=3 (a int).",
        "It is a folder, which is made if it is not there.",
        "Use, for example, run='runs/mine'.",
    ]


def test_a_display_has_one_of_some_names() -> None:
    with pytest.raises(ConfigurationError) as raised:
        Monitor(display="loud")  # type: ignore[arg-type]
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        "Monitor received display='loud' (a str).",
        "A display is one of 'auto', 'live', 'lines', 'notebook', 'none'.",
        "Use display='auto' to let it look at where the output goes.",
    ]
