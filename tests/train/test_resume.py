"""A training that was interrupted ends bit for bit as one that was not."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import CheckpointError, CheckpointWarning

import keras
import numpy as np
import pytest

from interruptions import (
    bits_of,
    in_one_go,
    interrupt,
    start_of_script,
    taking_part,
)
from interruptions import with_interruptions as interrupted

pytestmark = pytest.mark.usefixtures("small_programs_are_cached")

X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 44)
STEPS_OF_EPOCH = 6


def make_model(strategy: mw.Single | None = None) -> Any:
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3),
    ]
    with (strategy or mw.Mirrored(["CPU:0", "CPU:1"])).scope():
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def fit(model: Any, *data: Any, **options: Any) -> tuple[Any, Any, Any]:
    """What a fit leads to: bits, history, and what chance has in store."""
    if not data:
        data, options = (X, Y), {"batch_size": 8, **options}
    history = model.fit(*data, **{"epochs": 2, "verbose": 0, **options})
    drawn = np.random.random()
    return bits_of(model), (history.history, history.epoch), drawn


@pytest.mark.parametrize("step", [1, 6, 9])
def test_from_any_step(step: int, tmp_path: Path) -> None:
    def train() -> Any:
        return fit(make_model(), validation_data=(X[:9], Y[:9]))

    expected = in_one_go(train, tmp_path / "a", save_every=1)
    assert interrupted(train, tmp_path / "b", step, save_every=1) == expected


@pytest.mark.parametrize("save_every", [4, 100])
def test_however_often_it_is_saved(save_every: int, tmp_path: Path) -> None:
    def train() -> Any:
        return fit(make_model(), epochs=3)

    expected = in_one_go(train, tmp_path / "a", save_every=save_every)
    found = interrupted(train, tmp_path / "b", 4, 9, 9, 15, save_every=save_every)
    assert found == expected


class Listening(keras.callbacks.Callback):
    """Wants every batch, and remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.best: Any = None
        self.sums = np.zeros(2, "float64")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, logs["loss"]))
        self.sums += [1, batch]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.best = (epoch, {"loss": logs["loss"]}, np.float32(logs["loss"]))


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: mw.Single(),
    "fsdp": lambda: mw.FSDP(4, devices=[f"CPU:{i}" for i in range(4)]),
    "accumulate": lambda: mw.Mirrored(["CPU:0", "CPU:1"], accumulate=2),
    "tensor": lambda: mw.TensorParallel(2, devices=["CPU:0", "CPU:1"]),
    "pipeline": lambda: mw.Pipeline(2, 2, devices=["CPU:0", "CPU:1"]),
    "central": lambda: mw.CentralStorage("CPU:2", ["CPU:0", "CPU:1"]),
    "local-sgd": lambda: mw.LocalSGD(
        4, keras.optimizers.SGD(0.7, momentum=0.9), devices=["CPU:0", "CPU:1"]
    ),
    "float16": lambda: mw.Mirrored(["CPU:0", "CPU:1"], precision="float16"),
    "offload": lambda: mw.FSDP(2, devices=["CPU:0", "CPU:1"], offload=True),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_under_every_strategy(name: str, tmp_path: Path) -> None:
    def train() -> Any:
        return fit(make_model(STRATEGIES[name]()))

    expected = in_one_go(train, tmp_path / "a", save_every=2)
    assert interrupted(train, tmp_path / "b", 5, 11, save_every=2) == expected


def generator() -> Iterator[Any]:
    """Batches that are drawn, and never end."""
    while True:
        rows = np.random.randint(0, len(X), 8)
        yield X[rows] + np.random.normal(size=(8, 6)).astype("float32"), Y[rows]


class Drawn(keras.utils.PyDataset):
    """A data set that draws an order of its own after every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.random.permutation(len(X))

    def __len__(self) -> int:
        return STEPS_OF_EPOCH

    def __getitem__(self, index: int) -> Any:
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.order = np.random.permutation(len(X))


class Anew:
    """Batches that are iterated anew in every epoch, and draw while they are."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(X), 8):
            noise = np.random.normal(size=(len(X[start : start + 8]), 6))
            yield X[start : start + 8] + noise, Y[start : start + 8]


DATA: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "generator": (lambda: (generator(),), {"steps_per_epoch": 5, "shuffle": False}),
    "PyDataset": (lambda: (Drawn(),), {}),
    "iterable of unknown length": (lambda: (Anew(),), {}),
    "arrays in order": (lambda: (X, Y), {"batch_size": 8, "shuffle": False}),
    "arrays within batches": (lambda: (X, Y), {"batch_size": 8, "shuffle": "batch"}),
    "part of the arrays": (lambda: (X, Y), {"batch_size": 8, "steps_per_epoch": 4}),
    "split arrays": (lambda: (X, Y), {"batch_size": 8, "validation_split": 0.5}),
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("name", DATA)
def test_with_all_kinds_of_data(name: str, tmp_path: Path) -> None:
    make_data, options = DATA[name]
    in_stretches = name.startswith(("arrays", "PyDataset"))

    def train() -> Any:
        callbacks = [] if in_stretches else [Listening()]
        options_here = {**options, "callbacks": callbacks, "epochs": 3}
        found = fit(make_model(), *make_data(), **options_here)
        draws_ahead = name in ("generator", "iterable of unknown length")
        # What was read ahead by a thread has drawn, too.
        return found[:2] if draws_ahead else found

    expected = in_one_go(train, tmp_path / "a", save_every=1)
    assert interrupted(train, tmp_path / "b", 4, 8, 9, save_every=1) == expected


def test_what_callbacks_remember_is_given_back(tmp_path: Path) -> None:
    def train() -> Any:
        listening = Listening()
        early = keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=0.05, restore_best_weights=True
        )
        slower = keras.callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=0.05)
        found = fit(make_model(), callbacks=[listening, early, slower], epochs=9)
        seen = [(batch, float(loss)) for batch, loss in listening.seen]
        return found, seen, listening.best, list(listening.sums), early.best

    expected = in_one_go(train, tmp_path / "a", save_every=1)
    assert interrupted(train, tmp_path / "b", 3, 8, 13, save_every=1) == expected


def test_in_a_script_of_several_fits(tmp_path: Path) -> None:
    def train() -> Any:
        model = make_model()
        first = fit(model, epochs=1)
        between = [np.asarray(w).tobytes() for w in model.get_weights()]
        model.optimizer.learning_rate = 0.001 * np.random.random()
        second = fit(model, batch_size=12)
        other = make_model()
        return first, between, second, fit(other, epochs=1)

    expected = in_one_go(train, tmp_path / "a", save_every=2)
    steps = (5, 9, 12, 16)
    assert interrupted(train, tmp_path / "b", *steps, save_every=2) == expected


def test_a_fit_that_a_callback_ends_within_an_epoch(tmp_path: Path) -> None:
    def train() -> Any:
        model = make_model()

        def stop(batch: int, logs: Any) -> None:
            model.stop_training = batch == 3

        ending = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        return fit(model, callbacks=[ending]), fit(model)

    expected = in_one_go(train, tmp_path / "a", save_every=1)
    steps = [int(path.name) for path in (tmp_path / "a" / "checkpoints").iterdir()]
    assert max(steps) == 4 + 2 * STEPS_OF_EPOCH
    assert interrupted(train, tmp_path / "b", 3, 6, save_every=1) == expected


def test_a_fit_that_wants_fewer_epochs_than_it_had_ends_with_what_it_had(
    tmp_path: Path,
) -> None:
    def train(epochs: int) -> Callable[[], Any]:
        return lambda: fit(make_model(), epochs=epochs)[:2]

    interrupt(train(3), tmp_path, 9, save_every=4)
    weights, history = in_one_go(train(1), tmp_path, save_every=4)
    assert history[1] == [0]
    interrupt(train(3), tmp_path / "b", 9, save_every=4)
    start_of_script()
    assert weights != bits_of(make_model())
    assert in_one_go(train(1), tmp_path, save_every=4) == (weights, history)


def test_a_run_that_is_over_trains_no_more(tmp_path: Path) -> None:
    calls: list[str] = []

    def train() -> Any:
        said = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: calls.append("epoch")
        )
        return fit(make_model(), callbacks=[said])

    expected = in_one_go(train, tmp_path)
    assert calls == ["epoch", "epoch"]
    assert in_one_go(train, tmp_path) == expected
    assert calls == ["epoch", "epoch"]


def test_a_fit_inside_of_a_callback_is_a_part_of_the_one_around_it(
    tmp_path: Path,
) -> None:
    def train() -> Any:
        inner = make_model()
        both = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: inner.fit(X, Y, verbose=0)
        )
        return fit(make_model(), callbacks=[both])[1]

    in_one_go(train, tmp_path, save_every=1)
    steps = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert steps[-1] == 2 * STEPS_OF_EPOCH


def test_on_other_devices_it_is_equal_to_float_tolerance(tmp_path: Path) -> None:
    # faults.md row 32
    def train_on(strategy: Any) -> Callable[[], Any]:
        def train() -> Any:
            model = make_model(strategy())
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
            return model.get_weights()

        return train

    expected = in_one_go(train_on(STRATEGIES["single"]), tmp_path / "a", save_every=1)
    layers = lambda: mw.Layerwise(2, devices=["CPU:0", "CPU:1"])  # noqa: E731
    others = (STRATEGIES["fsdp"], 4), (layers, 8), (STRATEGIES["tensor"], 11)
    for strategy, step in others:
        interrupt(train_on(strategy), tmp_path / "b", step, save_every=1)
    found = in_one_go(train_on(STRATEGIES["single"]), tmp_path / "b", save_every=1)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        # The bias in front of BatchNormalization has a gradient of zero, and Adam makes
        # steps of the noise that is left.
        if number != 1:
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_an_epoch_goes_on_over_data_of_its_size_only(tmp_path: Path) -> None:
    interrupt(lambda: fit(make_model()), tmp_path, 4, save_every=2)
    with pytest.raises(CheckpointError) as caught:
        in_one_go(lambda: fit(make_model(), batch_size=4), tmp_path)
    assert str(caught.value).split("\n") == [
        "The checkpoint of step 2 was made after 2 of 6 steps of an epoch (batches of "
        "data: 6); fit has 11 now (batches: 11).",
        "An epoch goes on where it was, so its data and batch_size stay the same.",
        "Use the data and batch_size of before, or begin anew in another folder "
        "(--run).",
    ]


def test_other_arrays_are_noticed(tmp_path: Path) -> None:
    # faults.md row 18
    in_one_go(lambda: fit(make_model()), tmp_path)
    with pytest.warns(
        CheckpointWarning, match="are not those of checkpoint 12: digest"
    ):
        in_one_go(lambda: fit(make_model(), X + 1, Y, batch_size=8), tmp_path)


def test_the_end_of_an_earlier_fit_has_to_be_there(tmp_path: Path) -> None:
    def train() -> Any:
        model = make_model()
        return fit(model), fit(model)

    in_one_go(train, tmp_path)
    for file in (tmp_path / "checkpoints" / "12").rglob("*.json"):
        file.write_text("{}")
    start_of_script()
    with taking_part(tmp_path), pytest.raises(CheckpointError) as caught:
        train()
    assert str(caught.value).split("\n") == [
        "Fit 0 of the script has ended, as checkpoint 24 knows, and there is no good "
        "checkpoint of its end.",
        "A script that goes on in a later fit finds what the earlier ones led to.",
        "Bring its files back, or begin anew in another folder (--run).",
    ]


def test_metrics_are_logged_in_order_and_not_twice(tmp_path: Path) -> None:
    def train() -> Any:
        return fit(make_model(), validation_data=(X[:9], Y[:9]), epochs=3)[1][0]

    history = interrupted(train, tmp_path, 9, save_every=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    steps = [line["step"] for line in logged]
    assert steps == sorted(steps)
    epochs = [line for line in logged if "val_loss" in line]
    assert [(line["step"], line["epoch"]) for line in epochs] == [
        (6, 0),
        (12, 1),
        (18, 2),
    ]
    assert [line["loss"] for line in epochs] == history["loss"]
    assert 0 < epochs[-1]["goodput"] <= 1
    parts = ("devices", "input", "host", "compile")
    timed = [line for line in logged if "step_seconds" in line]
    assert timed
    for line in timed:
        whole = sum(line[f"{part}_share"] for part in parts)
        assert whole == pytest.approx(1, abs=2e-4)
        assert line["samples_per_second"] > 0


def test_the_plan_is_written(tmp_path: Path) -> None:
    in_one_go(lambda: fit(make_model(STRATEGIES["fsdp"]())), tmp_path)
    best = json.loads((tmp_path / "plan.json").read_text())["best"]
    assert best["plan"]["fsdp"] == 4
    assert best["because"] == "FSDP was named"
