"""`mw.Auto`: when it chooses, why, what it trains with, and when it refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import ConfigurationError, DataError, PlanError
from meshwright.parallel.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.report import PlanReport
from meshwright.strategies import automatic
from meshwright.strategies.attach import attached

import jax
import keras
import numpy as np
import pytest

L = keras.layers
CPUS = [f"CPU:{i}" for i in range(4)]

pytestmark = [
    pytest.mark.usefixtures("small_programs_are_cached"),
    pytest.mark.filterwarnings("ignore::meshwright.errors.BatchWarning"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning"),
]


@pytest.fixture(autouse=True)
def own_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", str(tmp_path))


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def net(name: str = "net") -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [L.Dense(32, activation="relu"), L.Dense(4)]
    return compiled(keras.Sequential([keras.Input((16,)), *layers], name=name))


class Unbuilt(keras.Model):
    """Knows its inputs when it sees them."""

    def __init__(self) -> None:
        super().__init__(name="unbuilt")
        self.hidden, self.head = L.Dense(32, activation="relu"), L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x))


def unbuilt() -> keras.Model:
    keras.utils.set_random_seed(5)
    return compiled(Unbuilt())


def table(size: int = 48) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(size, 16)).astype(np.float32)
    return x, rng.integers(0, 4, size).astype(np.int32)


def train(model: keras.Model, **options: Any) -> list[Any]:
    keras.utils.set_random_seed(11)
    model.fit(*table(), **{"batch_size": 24, "epochs": 2, "verbose": 0, **options})
    return [np.asarray(v) for v in model.variables]


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


class Answer:
    """The planner's answer, and what it was asked; the plan is the test's."""

    def __init__(self, plan: Plan, *slower: Plan) -> None:
        self.plan = plan
        self.rejected = tuple(
            Candidate(plan=each, step_seconds=1.0, fits=False, reason="slower")
            for each in slower
        )
        self.asked: list[dict[str, Any]] = []

    def __call__(
        self, model: Any, batch_size: int, machine: Any, **asked: Any
    ) -> PlanReport:
        self.asked.append({"model": model, "batch_size": batch_size, **asked})
        best = Candidate(plan=self.plan, because="the test wants it")
        return PlanReport(
            model=model.name,
            batch_size=batch_size,
            machine=machine,
            best=best,
            candidates=(best,),
            rejected=self.rejected,
        )


def answering(monkeypatch: pytest.MonkeyPatch, plan: Plan, *slower: Plan) -> Answer:
    answer = Answer(plan, *slower)
    monkeypatch.setattr(automatic, "plan", answer)
    return answer


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("nothing is planned")


def test_the_plan_is_chosen_when_fit_begins() -> None:
    strategy = mw.Auto(CPUS)
    model = mw.distribute(net(), strategy)
    assert (strategy.is_open, strategy.report) == (True, None)
    assert strategy.because == "not chosen yet"
    assert strategy.plan == Plan(data=4)
    found = train(model)
    assert not strategy.is_open
    report = strategy.report
    assert report is not None
    assert report.best is not None
    assert (strategy.plan, strategy.because) == (report.best.plan, report.best.because)
    assert report.batch_size == 24
    assert report.machine.num_devices == 4
    assert len(strategy.devices) == strategy.plan.num_devices == strategy.mesh.size
    assert_close(found, train(net()))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(data=4),
        Plan(fsdp=2),
        Plan(fsdp=2, tensor=2),
        Plan(stages=2, microbatches=2),
        Plan(data=2, accumulate=2, remat=True),
    ],
    ids=Plan.describe,
)
def test_whatever_is_chosen_trains_to_the_result_of_one_device(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    answering(monkeypatch, plan)
    strategy = mw.Auto(CPUS)
    model = mw.distribute(net(), strategy)
    found = train(model)
    assert strategy.plan == plan
    assert strategy.because == "the test wants it"
    assert strategy.devices == tuple(f"/device:{c}" for c in CPUS[: plan.num_devices])
    assert_close(found, train(net()))


@pytest.mark.parametrize("make", [net, unbuilt])
def test_shuffled_batches_are_those_of_one_device_also_if_fit_builds_the_model(
    monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    answer = answering(monkeypatch, Plan(data=2))
    found = train(mw.distribute(make(), mw.Auto(CPUS)), shuffle=True)
    assert_close(found, train(make(), shuffle=True))
    x, y = answer.asked[0]["data"]
    assert (x.shape, y.shape) == ((24, 16), (24,))


def test_the_word_auto_and_no_word_are_the_planner_s_choice() -> None:
    for model in (mw.distribute(net(), "auto"), mw.distribute(net())):
        strategy = attached(model)
        assert isinstance(strategy, mw.Auto)
        assert len(strategy.devices) == 8


def test_a_model_made_in_its_scope_is_trained_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answering(monkeypatch, Plan(fsdp=4))
    with mw.Auto(CPUS).scope() as strategy:
        model = net()
    found = train(model)
    assert strategy.plan == Plan(fsdp=4)
    assert len(model.layers[0].kernel.value.sharding.device_set) == 4
    assert_close(found, train(net()))


def stateful(layer: keras.Layer) -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [L.Dense(32, use_bias=False), layer, L.Dense(4)]
    return compiled(keras.Sequential([keras.Input((16,)), *layers], name="stateful"))


def test_on_one_device_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "plan", never)
    monkeypatch.setattr(automatic, "parse_machine", never)
    strategy = mw.Auto(["CPU:1"])
    assert (strategy.is_open, strategy.because) == (False, "there is one device")
    found = train(mw.distribute(net(), strategy))
    assert strategy.report is None
    assert strategy.plan == Plan()
    assert_close(found, train(net()))


def test_on_one_device_with_a_limit_the_step_is_planned_to_fit() -> None:
    strategy = mw.Auto(["CPU:0"], memory="64MiB")
    assert strategy.is_open
    train(mw.distribute(net(), strategy))
    assert strategy.report is not None
    assert strategy.report.machine.usable_memory == 64 * 2**20


def test_the_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answering(monkeypatch, Plan(data=2))
    strategy = mw.Auto(CPUS)
    model = mw.distribute(net(), strategy)
    train(model, validation_data=table(7))
    mesh = strategy.mesh
    model.fit(*table(), batch_size=8, verbose=0)
    model.evaluate(*table(), verbose=0)
    model.predict(table()[0], verbose=0)
    assert len(answer.asked) == 1
    assert strategy.mesh is mesh


@pytest.mark.parametrize(
    "plan", [Plan(stages=2, microbatches=2), Plan()], ids=Plan.describe
)
def test_a_second_model_is_trained_by_the_plan_of_the_first(
    monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    answer = answering(monkeypatch, plan)
    strategy = mw.Auto(CPUS)
    first, second = (mw.distribute(net(name), strategy) for name in ("one", "two"))
    train(first)
    found = train(second)
    assert [asked["model"] for asked in answer.asked] == [first]
    assert_close(found, train(net()))


def test_precision_is_asked_for_and_kept() -> None:
    strategy = mw.Auto(CPUS[:2], precision="bfloat16")
    assert strategy.plan == Plan(data=2, precision="bfloat16")
    model = mw.distribute(net(), strategy)
    train(model)
    assert strategy.report is not None
    assert strategy.plan.precision == "bfloat16"
    assert {c.plan.precision for c in strategy.report.candidates} == {"bfloat16"}
    assert {layer.compute_dtype for layer in model.layers} == {"bfloat16"}


def batches() -> Iterator[Any]:
    x, y = table()
    while True:
        yield x[:16], y[:16]


def test_a_stream_that_does_not_say_its_batch_is_planned_for_the_usual_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = answering(monkeypatch, Plan(data=2))
    strategy = mw.Auto(CPUS)
    model = mw.distribute(net(), strategy)
    model.fit(batches(), steps_per_epoch=3, verbose=0)
    assert answer.asked[0]["batch_size"] == 32
    assert answer.asked[0]["data"] is None
    assert strategy.because == (
        "the test wants it; for a batch of 32, as the data does not say"
    )
    twin = net()
    twin.fit(batches(), steps_per_epoch=3, verbose=0)
    assert_close(*([np.asarray(v) for v in m.variables] for m in (model, twin)))


class Pieces(keras.utils.PyDataset):
    """Says how large its batches are."""

    batch_size = 12

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return tuple(each[12 * index : 12 * index + 12] for each in table())


def test_a_data_set_that_says_its_batch_is_planned_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = answering(monkeypatch, Plan(data=2))
    strategy = mw.Auto(CPUS)
    mw.distribute(net(), strategy).fit(Pieces(), verbose=0)
    assert answer.asked[0]["batch_size"] == 12
    assert strategy.because == "the test wants it"


@pytest.mark.parametrize(
    ("given", "size"), [({}, 32), ({"batch_size": 500}, 48), ({"batch_size": 6}, 6)]
)
def test_arrays_are_planned_for_in_the_batches_that_keras_makes(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], size: int
) -> None:
    answer = answering(monkeypatch, Plan())
    strategy = mw.Auto(CPUS)
    x, y = table()
    mw.distribute(net(), strategy).fit(jax.numpy.asarray(x), y, verbose=0, **given)
    assert answer.asked[0]["batch_size"] == size
    assert strategy.because == "the test wants it"


def test_a_model_whose_shapes_nobody_knows_gets_replicas_and_says_why() -> None:
    strategy = mw.Auto(CPUS[:2])
    model = mw.distribute(unbuilt(), strategy)
    model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert strategy.report is None
    assert strategy.plan == Plan(data=2)
    assert strategy.because == (
        "a replica on every device, because: 'unbuilt' was to be profiled, and is not "
        "built."
    )
    assert len(model.hidden.kernel.value.sharding.device_set) == 2


def test_a_model_that_is_not_compiled_predicts_and_is_planned_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = answering(monkeypatch, Plan(fsdp=2))
    strategy = mw.Auto(CPUS)
    keras.utils.set_random_seed(5)
    layers = [L.Dense(32, activation="relu"), L.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    mw.distribute(model, strategy)
    x = table()[0]
    before = model.predict(x, verbose=0)
    np.testing.assert_allclose(before, net().predict(x, verbose=0), atol=1e-6)
    assert strategy.is_open
    assert answer.asked == []
    found = train(compiled(model))
    assert strategy.plan == Plan(fsdp=2)
    assert strategy.mesh.size == 2
    assert_close(found, train(net()))


def test_no_samples_are_refused_as_ever_and_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automatic, "plan", never)
    strategy = mw.Auto(CPUS)
    model = mw.distribute(net(), strategy)
    x, y = table()
    with pytest.raises(DataError, match="fit received x of 0 samples"):
        model.fit(x[:0], y[:0], verbose=0)
    assert strategy.is_open


def test_if_nothing_fits_fit_is_refused_every_time_and_nothing_changes() -> None:
    strategy = mw.Auto(CPUS[:2], memory="2KiB")
    model = mw.distribute(net(), strategy)
    before = [np.asarray(v) for v in model.variables]
    for _ in range(2):
        with pytest.raises(PlanError) as raised:
            train(model)
        error, report = raised.value, strategy.report
        assert report is not None
        closest = report.least_bad
        assert closest is not None
        assert error.received == (
            f"No plan for 'net' with a batch of 24 fits on {report.machine}; the "
            f"closest is {closest.plan.describe()}: {closest.because}."
        )
        assert error.received.endswith("per device > 2.0 KiB.")
        assert error.rule == "What a step needs must fit the memory of each device."
        assert error.change == (
            "Use a smaller batch_size, more devices, or see mw.plan(model, batch_size)."
        )
    assert_close([np.asarray(v) for v in model.variables], before)


def test_if_nothing_can_be_looked_at_the_refusal_names_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(model: Any, batch_size: int, machine: Any, **_: Any) -> PlanReport:
        return PlanReport(
            model="net",
            batch_size=batch_size,
            machine=machine,
            best=None,
            candidates=(),
        )

    monkeypatch.setattr(automatic, "plan", nothing)
    strategy = mw.Auto(CPUS[:2])
    with pytest.raises(PlanError) as raised:
        train(mw.distribute(net(), strategy))
    assert raised.value.received.endswith("which share their cores.")


def test_a_limit_that_is_no_size_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="memory received 'lots'"):
        mw.Auto(CPUS, memory="lots")


def test_several_processes_have_a_replica_on_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(automatic, "process_count", lambda: 2)
    strategy = mw.Auto(CPUS)
    assert not strategy.is_open
    assert strategy.plan == Plan(data=4)
    assert strategy.because == "a replica on every device, because of 2 processes"
