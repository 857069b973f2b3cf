"""One of two processes that train together; prints what came of each case as JSON.

`python worker.py ADDRESS INDEX`; started by test_two_processes.py.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.cluster import store
from meshwright.errors import (
    CheckpointError,
    DataError,
    EnsembleError,
    PeerLostError,
    StrategyError,
)
from meshwright.trials.ensemble_folder import save_members

import jax
import keras
import numpy as np
import pytest

TESTS = Path(__file__).parents[1]


@cache
def battery() -> Any:
    """The models of tests/test_equivalence.py."""
    sys.path.append(str(TESTS))
    path = TESTS / "test_equivalence.py"
    spec = importlib.util.spec_from_file_location("battery", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROWS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mirrored-cnn": ("cnn", lambda: mw.Mirrored()),
    "mirrored-dropout": ("dropout", lambda: mw.Mirrored()),
    "one-device-each-lstm": ("lstm", lambda: mw.Mirrored(["CPU:0"])),
    "central-cnn": ("cnn", lambda: mw.CentralStorage()),
    "fsdp-4-cnn": ("cnn", lambda: mw.FSDP()),
    "fsdp-2-transformer": ("transformer", lambda: mw.FSDP(2)),
    "tensor-4-mlp": ("mlp", lambda: mw.TensorParallel(4)),
    "hybrid-mlp": ("mlp", lambda: mw.Hybrid(fsdp=2, tensor=2)),
    "accumulate-mlp": ("mlp", lambda: mw.FSDP(accumulate=3)),
    "remat-cnn": ("cnn", lambda: mw.FSDP(remat=True)),
    "pipeline-4-lstm": ("lstm", lambda: mw.Pipeline(4, 3)),
    "pipeline-2-tagger": ("tagger", lambda: mw.Pipeline(2, 3, devices=["CPU:0"])),
    "layerwise-2-cnn": ("cnn", lambda: mw.Layerwise(2)),
    "fsdp-stages-clipped": (
        "clipped",
        lambda: mw.Hybrid(fsdp=2, stages=2, microbatches=3, schedule="zero_bubble"),
    ),
}


def row_equals_one_device(name: str) -> None:
    models = battery()
    case, make_strategy = ROWS[name]
    reference, expected = models.trained_alone(case)
    model = mw.distribute(models.build(case), make_strategy())
    history = models.train(model, case)
    for ours, theirs in zip(model.variables, reference.variables, strict=True):
        np.testing.assert_allclose(
            ours.numpy(), theirs.numpy(), atol=2e-5, err_msg=ours.path
        )
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)


def local_sgd_equals_workers_by_hand() -> None:
    models = battery()
    x, y = models.table(34)
    options = {"batch_size": 24, "epochs": 2}
    expected = models.train_by_hand(
        *(lambda: models.build("mlp"), x, y),
        **{"num_workers": 4, "sync_every": 3, "outer": models.Nesterov(0.7, 0.9)},
        **options,
    )
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    model = mw.distribute(models.build("mlp"), mw.LocalSGD(3, outer))
    history = model.fit(x, y, shuffle=False, verbose=0, **options).history
    for variable, value in zip(models.agreed(model), expected, strict=True):
        np.testing.assert_allclose(np.asarray(variable), value, atol=2e-5)
    assert same_everywhere([np.array(history["loss"]), *model.get_weights()])


def model_without_a_seed() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)]
    )
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    return model


def data(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return rng.normal(size=(size, 8)), rng.normal(size=(size, 4))


def same_everywhere(arrays: list[Any]) -> bool:
    from jax.experimental import multihost_utils

    flat = np.concatenate([np.ravel(array) for array in arrays])
    return bool(np.ptp(multihost_utils.process_allgather(flat), axis=0).max() == 0)


def weights_agree_without_a_seed() -> None:
    with mw.FSDP().scope():
        scoped = model_without_a_seed()
    moved = mw.distribute(model_without_a_seed(), mw.Mirrored())
    for model in (scoped, moved):
        assert same_everywhere(model.get_weights())
        model.fit(*data(22), batch_size=8, verbose=0)
        assert same_everywhere(model.get_weights())


def evaluate_and_predict_give_everything_to_everybody() -> None:
    keras.utils.set_random_seed(1)
    model = model_without_a_seed()
    x, y = data(11)
    scores = model.evaluate(x, y, batch_size=4, verbose=0)
    outputs = model.predict(x, batch_size=4, verbose=0)
    mw.distribute(model, mw.FSDP())
    ours = model.evaluate(x, y, batch_size=4, verbose=0)
    np.testing.assert_allclose(ours, scores, rtol=1e-5)
    predicted = model.predict(x, batch_size=4, verbose=0)
    np.testing.assert_allclose(predicted, outputs, atol=1e-5)


def single_is_refused() -> None:
    with pytest.raises(StrategyError) as caught:
        mw.Single()
    assert str(caught.value).split("\n") == [
        "Single was made in a run of 2 processes.",
        "One device belongs to one process, so the others would have none.",
        "Use Mirrored, or start one process.",
    ]


RULE_OF_BATCHES = [
    "Every process goes through the same batches and computes a part of each, so all "
    "have as many, of the same sizes.",
    "Give every process the same data, or stop streams of different lengths early with "
    "steps_per_epoch.",
]


def stream(num_batches: int, size: int = 8) -> Iterator[Any]:
    for _ in range(num_batches):
        yield data(size)


def a_stream_that_ends_early_in_one_process_stops_all() -> None:
    model = mw.distribute(model_without_a_seed(), mw.Mirrored())
    with pytest.raises(DataError) as caught:
        model.fit(stream(3 + 2 * mw.process_index()), verbose=0)
    assert str(caught.value).split("\n") == [
        "fit received batch 3 as the end of the data in process 0; 8 samples in "
        "process 1.",
        *RULE_OF_BATCHES,
    ]
    model.fit(*data(16), verbose=0)


def a_stream_that_fails_in_one_process_stops_all() -> None:
    def broken() -> Iterator[Any]:
        yield from stream(4)
        raise OSError("the disk is gone")

    model = mw.distribute(model_without_a_seed(), mw.Mirrored())
    is_first = mw.process_index() == 0
    with pytest.raises(DataError if is_first else OSError) as caught:
        model.fit(stream(9) if is_first else broken(), verbose=0)
    if is_first:
        assert str(caught.value).split("\n")[0] == (
            "fit received batch 4 as 8 samples in process 0; an error in process 1."
        )


def batches_of_different_sizes_are_refused() -> None:
    model = mw.distribute(model_without_a_seed(), mw.Mirrored())
    with pytest.raises(DataError) as caught:
        model.fit(stream(3, 8 + 4 * mw.process_index()), verbose=0)
    assert str(caught.value).split("\n")[0] == (
        "fit received batch 0 as 8 samples in process 0; 12 samples in process 1."
    )


def arrays_of_different_lengths_are_refused() -> None:
    model = mw.distribute(model_without_a_seed(), mw.Mirrored())
    with pytest.raises(DataError) as caught:
        model.fit(*data(20 + mw.process_index()), verbose=0)
    received, *rule = str(caught.value).split("\n")
    assert without_digests(received) == (
        "fit received arrays of 20 samples (digest ...) in process 0; 21 samples "
        "(digest ...) in process 1."
    )
    assert rule == RULE_OF_BATCHES


def arrays_of_different_contents_are_refused() -> None:
    # faults.md row 18
    model = mw.distribute(model_without_a_seed(), mw.Mirrored())
    x, y = data(20)
    x[7] += mw.process_index()
    with pytest.raises(DataError) as caught:
        model.fit(x, y, verbose=0)
    received, *_ = str(caught.value).split("\n")
    assert without_digests(received) == (
        "fit received arrays of 20 samples (digest ...) in process 0; 20 samples "
        "(digest ...) in process 1."
    )


def without_digests(text: str) -> str:
    return re.sub(r"digest \w{12}", "digest ...", text)


def streams_and_early_stops_train_alike() -> None:
    keras.utils.set_random_seed(1)
    model = mw.distribute(model_without_a_seed(), mw.Mirrored())

    def stop(epoch: int, logs: Any) -> None:
        model.stop_training = epoch == 1

    history = model.fit(
        stream(12),
        steps_per_epoch=3,
        epochs=4,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=stop)],
        validation_data=data(7),
        verbose=0,
    )
    assert len(history.history["val_loss"]) == 2
    assert same_everywhere(model.get_weights())


def devices_have_the_names_of_their_processes() -> None:
    assert mw.Mirrored().devices == (
        "/process:0/device:CPU:0",
        "/process:0/device:CPU:1",
        "/process:1/device:CPU:0",
        "/process:1/device:CPU:1",
    )
    table = mw.placement(mw.distribute(model_without_a_seed(), mw.Mirrored()))
    other = 1 - mw.process_index()
    names = [f"/device:CPU:{i}" for i in range(2)]
    theirs = [f"/process:{other}{name}" for name in names]
    assert set(table[0].devices) == {*names, *theirs}


def custom_loops_see_all_processes() -> None:
    strategy = mw.Mirrored()
    (batch,) = strategy.distribute_dataset(np.arange(8.0), batch_size=8)
    squares = strategy.run(lambda x: (x**2).sum(), args=(batch,))
    assert float(strategy.reduce("SUM", squares)) == sum(n * n for n in range(8))
    assert len(strategy.local_results(squares)) == 2

    def read(shard: Any) -> list[Any]:
        return [np.full(4, float(file)) for file in shard.files(["1", "2"])]

    (own,) = strategy.distribute_dataset(read)
    assert float(strategy.reduce("MEAN", own, axis=0)) == 1.5
    np.testing.assert_array_equal(strategy.gather(own), [1.0] * 4 + [2.0] * 4)


def who_says_nothing_is_named() -> None:
    if mw.process_index() == 1:
        store._turns["silence"] += 1
        return
    before, store.PATIENCE_SECONDS = store.PATIENCE_SECONDS, 1
    try:
        with pytest.raises(PeerLostError) as caught:
            store.say_to_all("silence", "hello")
    finally:
        store.PATIENCE_SECONDS = before
    assert str(caught.value).split("\n") == [
        "Process 0 waited 1 s for process 1 (meshwright/silence/0/1).",
        "All processes of a run go on together.",
        "Look at the output of process 1: it has ended, or it is stuck.",
    ]


def streams_are_stacked_alike() -> None:
    x, y = data(40)

    def batches() -> Iterator[Any]:
        for _ in range(2):
            yield from ((x[i : i + 4], y[i : i + 4]) for i in range(0, 40, 4))

    options = {"steps_per_epoch": 10, "shuffle": False, "verbose": 0}
    keras.utils.set_random_seed(3)
    reference = model_without_a_seed()
    reference.fit(batches(), epochs=2, **options)
    keras.utils.set_random_seed(3)
    strategy = mw.Mirrored()
    model = mw.distribute(model_without_a_seed(), strategy)
    model.fit(batches(), epochs=2, **options)
    assert "5 at a time" in str(strategy.pace["fit"])
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def gloo_gives_way_to_others() -> None:
    deadline = time.monotonic() + 60
    while True:
        assert mw.Mirrored().mesh.is_multi_process
        if classes_of_threads().count(os.SCHED_BATCH) == 1:
            break
        # On a busy machine Gloo's thread may be at work whenever it is looked for.
        assert time.monotonic() < deadline
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def classes_of_threads() -> list[int]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found.append(os.sched_getscheduler(int(thread)))
    return found


def members_are_spread_over_processes_and_end_as_they_would_alone() -> None:
    models, names = battery(), ("mlp", "dropout", "clipped")
    ensemble = mw.Ensemble([models.build(name) for name in names])
    assert ensemble.devices == (
        "/process:0/device:CPU:0",
        "/process:1/device:CPU:0",
        "/process:0/device:CPU:1",
    )
    histories = models.train_ensemble(ensemble, "mlp")
    x, _ = models.MODELS["mlp"].data(34)
    together, answers = ensemble.predict(x, members=True)
    for number, name in enumerate(names):
        reference, expected = models.trained_alone(name)
        models.assert_equal_weights(ensemble.members[number], reference, 2e-5)
        found = histories[number].history
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
        alone = reference.predict(x, verbose=0)
        np.testing.assert_allclose(answers[number], alone, atol=1e-5)
    assert same_everywhere([together, *answers])
    folder = tempfile.gettempdir() + f"/ensemble-{os.getppid()}"
    ensemble.save(folder)
    np.testing.assert_array_equal(mw.Ensemble.load(folder).predict(x), together)
    store.say_to_all("loaded", "")
    if mw.process_index() == 0:
        shutil.rmtree(folder)


def weights_of_members_are_those_of_their_own_process() -> None:
    ensemble = mw.Ensemble([model_without_a_seed() for _ in range(2)])
    assert same_everywhere([w for m in ensemble.members for w in m.get_weights()])


def a_folder_that_one_process_does_not_see_stops_all() -> None:
    is_first = mw.process_index() == 0
    folder = tempfile.mkdtemp()
    if not is_first:
        save_members(Path(folder), [model_without_a_seed()])
    with pytest.raises(CheckpointError if is_first else PeerLostError) as caught:
        mw.Ensemble.load(folder)
    shutil.rmtree(folder)
    if not is_first:
        assert str(caught.value).startswith(
            "Process 1 heard from another one that process 0 failed with "
            "'CheckpointError: Ensemble.load found no manifest at "
        )


def members_that_differ_between_processes_are_refused() -> None:
    members = [model_without_a_seed() for _ in range(1 + mw.process_index())]
    with pytest.raises(EnsembleError) as caught:
        mw.Ensemble(members)
    assert str(caught.value).split("\n") == [
        "Ensemble received 1 members with 212 parameters in process 0; 2 members with "
        "212 / 212 parameters in process 1.",
        "All processes of a run make the same members and train some of them each.",
        "Make all members in every process, from the same code.",
    ]


def a_member_that_fails_in_another_process_stops_all() -> None:
    def fail(number: int) -> list[Any]:
        if number == 1:
            raise OSError("no room")
        return []

    ensemble = mw.Ensemble([model_without_a_seed() for _ in range(2)])
    names = [model.name for model in ensemble.members]
    is_first = mw.process_index() == 0
    with pytest.raises(PeerLostError if is_first else OSError) as caught:
        ensemble.fit(*data(8), callbacks=fail, verbose=0)
    if is_first:
        assert str(caught.value).split("\n") == [
            f"Process 0 heard from another one that member 1 ({names[1]!r}) on "
            "/process:1/device:CPU:0 failed with 'OSError: no room'.",
            "All processes go on when all members are done.",
            "Look at the output of the process that this member is in.",
        ]


CASES: list[Callable[[], None]] = [
    streams_are_stacked_alike,
    gloo_gives_way_to_others,
    devices_have_the_names_of_their_processes,
    single_is_refused,
    weights_agree_without_a_seed,
    evaluate_and_predict_give_everything_to_everybody,
    a_stream_that_ends_early_in_one_process_stops_all,
    a_stream_that_fails_in_one_process_stops_all,
    batches_of_different_sizes_are_refused,
    arrays_of_different_lengths_are_refused,
    arrays_of_different_contents_are_refused,
    streams_and_early_stops_train_alike,
    custom_loops_see_all_processes,
    local_sgd_equals_workers_by_hand,
    who_says_nothing_is_named,
    members_are_spread_over_processes_and_end_as_they_would_alone,
    weights_of_members_are_those_of_their_own_process,
    a_folder_that_one_process_does_not_see_stops_all,
    members_that_differ_between_processes_are_refused,
    a_member_that_fails_in_another_process_stops_all,
]


def outcome(case: Callable[..., None], *args: str) -> str:
    try:
        case(*args)
    except Exception:
        return traceback.format_exc()
    return "as it should be"


def main(address: str, index: int) -> None:
    mw.configure(virtual=2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index, coordinator_bind_address=address)
    for case in CASES:
        print(json.dumps([case.__name__, outcome(case)]), flush=True)
    for name in ROWS:
        print(json.dumps([name, outcome(row_equals_one_device, name)]), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
