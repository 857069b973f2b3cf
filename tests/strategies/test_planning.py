"""`mw.plan`: what it answers, for devices here and elsewhere, and what it refuses."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import (
    CatalogError,
    ConfigurationError,
    MachineError,
    MeshwrightError,
    ObjectiveError,
    PlanError,
    ProfileError,
)
from meshwright.models.profile import build_abstractly
from meshwright.planner.machines import parse_machine
from meshwright.planner.speed import Speed
from meshwright.planner.speeds import known_speed
from meshwright.strategies import planning
from meshwright.strategies.attach import attached

import jax
import keras
import numpy as np
import pytest

L = keras.layers
MIB = 2**20


@pytest.fixture(autouse=True)
def own_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No figures of this machine but those that a test measures."""
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", str(tmp_path))
    return tmp_path


def small() -> keras.Model:
    keras.utils.set_random_seed(5)
    layers = [L.Dense(32, activation="relu"), L.BatchNormalization(), L.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers], name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def wide(width: int = 4096) -> keras.Model:
    """Weights are most of it."""
    layers = [L.Dense(width, activation="relu", use_bias=False) for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *layers], name="wide")
    model.compile("adam", "mse")
    return model


def long() -> keras.Model:
    """Activations are most of it."""
    layers = [L.Dense(256, activation="gelu") for _ in range(12)]
    model = keras.Sequential([keras.Input((512, 256)), *layers], name="long")
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def wide_model() -> keras.Model:
    return build_abstractly(wide)


@pytest.fixture(scope="module")
def long_model() -> keras.Model:
    return build_abstractly(long)


@pytest.fixture(scope="module")
def wide_report(wide_model: keras.Model) -> mw.PlanReport:
    return mw.plan(wide_model, 8192, "8xH200", samples=10**7, epochs=2)


def refusal(error: type[MeshwrightError], call: Callable[[], object]) -> list[str]:
    """The three beats of an error."""
    with pytest.raises(error) as raised:
        call()
    found = raised.value
    return [found.received, found.rule, found.change]


def test_the_best_plan_is_the_first_and_the_fastest_that_fits(
    wide_report: mw.PlanReport,
) -> None:
    best, *others = wide_report.candidates
    assert wide_report.best is best
    assert best.because == "the fastest of the plans that fit"
    assert best.seconds is not None
    for each in wide_report.candidates:
        assert each.fits
        assert each.seconds is not None
        assert each.seconds >= best.seconds / 1.02
        assert 0 < (each.memory_bytes or 0) < 105.75 * 1024 * MIB
    for each in others:
        assert each.because.startswith(("predicted ", "as fast"))
        assert ";" not in each.because, "a reason is said once"


def test_parts_of_a_step_sum_to_it_and_kinds_to_the_memory(
    wide_report: mw.PlanReport,
) -> None:
    for each in wide_report.candidates:
        assert sum(each.parts.values()) == pytest.approx(each.step_seconds)
        assert sum(each.memory_by_kind.values()) == each.memory_bytes


def test_every_plan_that_loses_has_a_reason(wide_report: mw.PlanReport) -> None:
    assert wide_report.rejected
    assert all(each.because and each.reason for each in wide_report.rejected)
    assert not any(each.fits for each in wide_report.rejected)
    plans = [each.plan for each in (*wide_report.candidates, *wide_report.rejected)]
    assert len(set(plans)) == len(plans), "each plan is looked at once"


def test_scaling_is_strong_and_weak(wide_report: mw.PlanReport) -> None:
    strong = [row for row in wide_report.scaling if not row.is_weak]
    weak = [row for row in wide_report.scaling if row.is_weak]
    for rows in (strong, weak):
        assert [row.candidate.num_devices for row in rows] == [1, 2, 4, 8]
        assert rows[0].speed_up == rows[0].efficiency == 1.0
        assert sum(row.is_best_return for row in rows) == 1
        because = {row.candidate.because for row in rows}
        assert because <= {
            "the fastest of the plans that fit",
            "the plainest of the fastest plans that fit",
        }
    assert [row.batch_size for row in strong] == [8192] * 4
    assert [row.batch_size for row in weak] == [1024, 2048, 4096, 8192]
    for row in (*strong, *weak):
        steps = -(-(10**7) // row.batch_size)
        seconds = row.candidate.seconds
        assert seconds is not None
        assert row.epoch_seconds == pytest.approx(steps * seconds)
        assert row.job_seconds == pytest.approx(2 * steps * seconds)
        dollars = 7.912 * row.candidate.num_devices * 2 * steps * seconds / 3600
        assert row.job_dollars == pytest.approx(dollars)
    assert strong[-1].candidate.seconds == weak[-1].candidate.seconds


def test_the_weak_batch_of_one_device_is_a_whole_share_and_at_least_a_sample() -> None:
    model = build_abstractly(small)
    for batch, own in ((36, 4), (3, 1)):
        report = mw.plan(model, batch, "8xH200")
        rows = {row.candidate.num_devices: row for row in report.scaling if row.is_weak}
        assert {number: row.batch_size for number, row in rows.items()} == {
            number: own * number for number in rows
        }


def test_the_report_is_json_and_prints_its_argument(
    wide_report: mw.PlanReport,
) -> None:
    facts = json.loads(json.dumps(wide_report.to_json(), allow_nan=False))
    best = wide_report.best
    assert best is not None
    assert facts["best"]["step_seconds"] == best.step_seconds
    assert facts["machine"]["num_devices"] == 8
    assert len(facts["rejected"]) == len(wide_report.rejected)
    assert {row["scaling"] for row in facts["scaling"]} == {"strong", "weak"}
    lines = str(wide_report).splitlines()
    assert lines[0] == (
        "Plans for 'wide', a global batch of 8,192, on 8 x H200, NVLink 4"
    )
    for line in (
        "  wanted: the fastest",
        "The decision, step by step",
        "Strong scaling, predicted: a batch of 8,192, epochs of 10,000,000 samples, "
        "2 epochs",
        "Weak scaling, predicted: the batch grows with the devices, epochs of "
        "10,000,000 samples, 2 epochs",
    ):
        assert line in lines
    assert lines[-1] == f"Use it: {wide_report.code}"


def test_objectives_choose_the_least_time_money_or_memory(
    wide_model: keras.Model,
) -> None:
    best = {}
    for objective in ("fastest", "cheapest", "smallest"):
        report = mw.plan(wide_model, 1024, "8xH200", objective=objective)
        assert report.objective == objective
        assert report.best is not None
        best[objective] = report.best
    least: dict[str, Callable[[Any], Any]] = {
        "fastest": lambda each: each.seconds,
        "cheapest": lambda each: each.device_seconds,
        "smallest": lambda each: each.memory_bytes,
    }
    for objective, measure in least.items():
        values = {name: measure(each) for name, each in best.items()}
        assert min(values, key=lambda name: values[name]) == objective, values


def test_a_deadline_takes_the_cheapest_plan_that_keeps_it(
    wide_model: keras.Model, wide_report: mw.PlanReport
) -> None:
    rows = [row for row in wide_report.scaling if not row.is_weak]
    slow, fast = rows[0].job_seconds, rows[-1].job_seconds
    assert slow is not None
    assert fast is not None
    hours = (slow + fast) / 2 / 3600
    training: dict[str, Any] = {"samples": 10**7, "epochs": 2}
    report = mw.plan(wide_model, 8192, "8xH200", finish_by=hours, **training)
    assert report.objective == "cheapest"
    assert report.best is not None
    assert report.best.num_devices > 1
    (alone,) = [c for c in report.rejected if c.plan == mw.Plan()]
    assert alone.reason == "deadline"
    assert alone.because.startswith("the training takes predicted ")
    # What more devices bring is shown also for those that are too slow.
    assert report.scaling[0].candidate.plan == mw.Plan()
    none = mw.plan(wide_model, 8192, "8xH200", finish_by=fast / 7200, **training)
    assert none.best is None
    assert none.least_bad is not None
    assert none.least_bad.reason == "deadline"


def test_a_budget_rules_out_what_costs_more(
    wide_model: keras.Model, wide_report: mw.PlanReport
) -> None:
    cheapest = wide_report.scaling[0].job_dollars
    assert cheapest is not None
    training: dict[str, Any] = {"samples": 10**7, "epochs": 2}
    report = mw.plan(wide_model, 8192, "8xH200", at_most=1.01 * cheapest, **training)
    assert report.best is not None
    assert report.best.plan == mw.Plan()
    assert any(each.reason == "budget" for each in report.rejected)


def test_memory_that_is_too_small_for_replicas_splits_the_state(
    wide_model: keras.Model,
) -> None:
    report = mw.plan(wide_model, 1024, "8xH200", memory="900MiB")
    assert report.best is not None
    plan = report.best.plan
    assert plan.fsdp * plan.tensor * plan.stages > 1
    assert all((c.memory_bytes or 0) <= 900 * MIB for c in report.candidates)
    (replicas,) = [c for c in report.rejected if c.plan == mw.Plan(data=8)]
    assert replicas.reason == "memory"
    assert replicas.because.startswith("1.1 GiB per device > 900.0 MiB; fits with ")
    assert "(as memory= says)" in str(report)


@pytest.mark.parametrize(
    ("batch", "memory", "lever"), [(64, "100MiB", "accumulate"), (1, "20MiB", "remat")]
)
def test_memory_that_is_too_small_for_activations_pulls_a_lever(
    long_model: keras.Model, batch: int, memory: str, lever: str
) -> None:
    report = mw.plan(long_model, batch, "1xH200", memory=memory)
    assert report.best is not None
    assert getattr(report.best.plan, lever) > 1 - (lever == "remat")
    (plain,) = [c for c in report.rejected if c.plan == mw.Plan()]
    assert plain.reason == "memory"
    assert f"; fits with {lever}" in plain.because


def test_nothing_fits_shows_the_plan_that_comes_closest(
    wide_model: keras.Model,
) -> None:
    report = mw.plan(wide_model, 1024, "8xH200", memory="10MiB")
    assert report.best is None
    assert report.candidates == ()
    assert report.code is None
    closest = report.least_bad
    assert closest is not None
    sizes = [c.memory_bytes for c in report.rejected if c.memory_bytes is not None]
    assert closest.memory_bytes == min(sizes)
    assert f"{closest.plan.describe()}: {closest.because}" in " ".join(
        str(report).split()
    ), "the least bad plan is printed"
    assert report.to_json()["least_bad"]["because"].endswith(" > 10.0 MiB")


def test_devices_that_are_here_need_no_name() -> None:
    report = mw.plan(small(), 64)
    assert report.machine.is_here
    assert report.machine.num_devices == 8
    assert report.best is not None
    assert "not calibrated" in report.source
    two = mw.plan(small(), 64, ["CPU:2", "CPU:5"])
    assert two.machine.devices == ("/device:CPU:2", "/device:CPU:5")
    assert [row.candidate.num_devices for row in two.scaling] == [1, 2, 1, 2]


def test_precision_is_that_of_every_plan(wide_model: keras.Model) -> None:
    report = mw.plan(wide_model, 1024, "8xH200", precision="bfloat16")
    whole = mw.plan(wide_model, 1024, "8xH200")
    assert report.best is not None
    assert whole.best is not None
    assert {c.plan.precision for c in report.candidates} == {"bfloat16"}
    assert {c.plan.precision for c in whole.candidates} == {None}
    assert (report.best.seconds or 0) < (whole.best.seconds or 0)


class Shown(keras.Model):
    """Does not say what it takes."""

    def __init__(self) -> None:
        super().__init__(name="shown")
        self.head = L.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(x)


def test_data_shows_what_a_model_takes() -> None:
    model = Shown()
    model.compile("sgd", "mse")
    model(np.zeros((2, 16), np.float32))
    assert refusal(ProfileError, lambda: mw.plan(model, 8, "2xH200")) == [
        "'shown', a Shown, does not say what its inputs are.",
        "Functional and Sequential models know their inputs, others are shown some.",
        "Pass a batch of inputs, or its shapes, as data.",
    ]
    shapes = [jax.ShapeDtypeStruct((2, size), "float32") for size in (16, 4)]
    assert mw.plan(model, 8, "2xH200", data=tuple(shapes)).best is not None


def test_nothing_is_allocated_for_a_model_without_values() -> None:
    model = build_abstractly(lambda: wide(65_536))  # 17 billion parameters, 68 GB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = mw.plan(model, 1024, "4x8xH200")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "KiB"
    assert report.best is not None
    assert (report.best.memory_bytes or 0) * 32 > 3 * 4 * 65_536**2 * 4
    held = [*model.variables, *model.optimizer.variables]
    assert {type(v._value) for v in held if v.ndim == 2} == {jax.ShapeDtypeStruct}


def test_planning_leaves_a_model_with_values_as_it_is() -> None:
    model = mw.distribute(small(), mw.Mirrored(["CPU:0", "CPU:1"]))
    strategy, before = attached(model), state_of(model)
    mw.plan(model, 64, "8xH200", precision="bfloat16")
    assert attached(model) is strategy
    assert_same(state_of(model), before)
    assert model.layers[0].compute_dtype == "float32"
    assert not model.optimizer.built, "nor is anything made that was not there"


def state_of(model: keras.Model) -> list[Any]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(v) for v in (*variables, *model.metrics_variables)]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def some_data() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(64, 16)).astype(np.float32), rng.integers(0, 4, 64)


@pytest.mark.parametrize("strategy", [None, "mirrored"])
def test_measuring_runs_the_best_plans_and_gives_the_model_back(
    strategy: str | None,
) -> None:
    model = small()
    mirrored = mw.Mirrored(["CPU:0", "CPU:1"])
    if strategy:
        mw.distribute(model, mirrored)
    x, y = some_data()
    model.fit(x, y, batch_size=32, verbose=0)
    before, places = state_of(model), [v.value.sharding for v in model.variables]
    report = mw.plan(model, 64, ["CPU:0", "CPU:1"], measure=2, precision="bfloat16")
    measured = [c for c in report.candidates if c.measured_seconds is not None]
    assert len(measured) == 2
    assert all((each.measured_seconds or 0) > 0 for each in measured)
    assert "measured" in str(report).split("\n\n")[1].splitlines()[1]
    assert not any(c.measured_seconds for c in report.rejected)
    assert attached(model) is (mirrored if strategy else None)
    assert_same(state_of(model), before)
    assert [v.value.sharding for v in model.variables] == places
    assert model.layers[0].compute_dtype == "float32"
    twin = small()
    twin.fit(x, y, batch_size=32, verbose=0)
    for each in (model, twin):
        each.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    for ours, theirs in zip(state_of(model), state_of(twin), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_measuring_does_not_place_a_model_whose_strategy_is_still_to_be_chosen() -> (
    None
):
    strategy = mw.Auto(["CPU:0", "CPU:1"])
    model = mw.distribute(small(), strategy)
    mw.plan(model, 64, ["CPU:0", "CPU:1"], measure=1)
    assert strategy.is_open
    assert {len(v.value.sharding.device_set) for v in model.variables} == {1}


def test_what_is_measured_corrects_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, devices = small(), ["CPU:0", "CPU:1"]
    plain = mw.plan(model, 64, devices)
    first, second = plain.candidates[:2]
    seconds = {first.plan: 8.0, second.plan: 2.0}
    monkeypatch.setattr(planning, "time_steps", lambda _m, s, _b, _d: seconds[s.plan])
    report = mw.plan(model, 64, devices, measure=2)
    assert report.best is not None
    assert report.best.plan == second.plan
    assert report.best.because == "the fastest of the plans that fit"
    assert (first.step_seconds, second.step_seconds) != (None, None)
    ratios = [8.0 / (first.step_seconds or 1), 2.0 / (second.step_seconds or 1)]
    correction = sum(ratios) / 2
    old = {c.plan: c.step_seconds for c in (*plain.candidates, *plain.rejected)}
    for each in (*report.candidates, *report.rejected):
        was = old[each.plan]
        if was is not None:
            assert each.step_seconds == pytest.approx(correction * was)
            assert sum(each.parts.values()) == pytest.approx(each.step_seconds)
    strong, weak = ([r for r in report.scaling if r.is_weak == w] for w in (0, 1))
    assert {row.candidate.seconds for row in strong} <= {8.0, 2.0} | {
        each.seconds for each in report.candidates
    }
    before = [row.candidate.seconds or 0 for row in plain.scaling if row.is_weak]
    assert [row.candidate.seconds for row in weak] == pytest.approx(
        [correction * each for each in before]
    )


def test_a_deadline_is_kept_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "time_steps", lambda *_: 3600.0)
    wishes: dict[str, Any] = {"finish_by": 1.5, "samples": 128}
    report = mw.plan(small(), 64, ["CPU:0", "CPU:1"], measure=1, **wishes)
    measured = [c for c in report.rejected if c.measured_seconds is not None]
    assert [c.because for c in measured] == [
        "the training takes measured 2.0 h > 1.5 h"
    ]


def test_calibrating_measures_first_and_remembers_it(
    monkeypatch: pytest.MonkeyPatch, own_calibration: Path
) -> None:
    asked: list[int] = []

    def measure(meshes: list[Any]) -> Speed:
        asked.extend(mesh.size for mesh in meshes)
        return typical

    typical = known_speed(parse_machine(None)).speed
    monkeypatch.setattr(planning, "measure_speed", measure)
    devices = ["CPU:0", "CPU:1"]
    report = mw.plan(small(), 64, devices, calibrate=True)
    assert asked == [1, 2]
    assert report.source.startswith("calibrated on this machine on 20")
    assert len(list(own_calibration.iterdir())) == 1
    again = mw.plan(small(), 64, devices)
    assert again.source == report.source
    assert len(asked) == 2, "it is not measured again"


@pytest.mark.parametrize("batch", [0, -8, 2.0, True, "64", None])
def test_a_batch_is_a_count(batch: Any) -> None:
    assert refusal(PlanError, lambda: mw.plan(small(), batch, "8xH200")) == [
        f"plan received batch_size={batch!r} (a {type(batch).__name__}).",
        "A global batch has a whole number of samples from 1.",
        "Pass, for example, batch_size=256.",
    ]


def test_a_numpy_count_is_a_count() -> None:
    assert mw.plan(build_abstractly(small), np.int64(64), "2xH200").best is not None  # type: ignore[arg-type]


def test_a_model_is_a_keras_model() -> None:
    assert refusal(PlanError, lambda: mw.plan("small", 8, "8xH200")) == [
        "plan received 'small' (a str) as model.",
        "It takes a Keras model.",
        "Wrap layers in a model, for example keras.Sequential([...]).",
    ]


def test_a_model_is_built_and_compiled() -> None:
    unbuilt = keras.Sequential([L.Dense(4)], name="net")
    unbuilt.compile("sgd", "mse")
    assert refusal(ProfileError, lambda: mw.plan(unbuilt, 8, "8xH200")) == [
        "'net' was to be profiled, and is not built.",
        "The shapes of weights are known when a model is built.",
        "Give it a keras.Input, call it on a batch, or call build(input_shape).",
    ]
    uncompiled = keras.Sequential([keras.Input((4,)), L.Dense(4)], name="net")
    assert refusal(ProfileError, lambda: mw.plan(uncompiled, 8, "8xH200")) == [
        "'net' was to be planned for, and is not compiled.",
        "What a training step does depends on the loss and the optimizer.",
        "Call compile(optimizer=..., loss=...) first.",
    ]


def test_unknown_hardware_is_refused_with_what_is_near() -> None:
    received, rule, change = refusal(
        CatalogError, lambda: mw.plan(small(), 8, "8xH20O")
    )
    assert received == "'H20O' is not an accelerator of the catalog."
    assert rule.startswith("It knows V100, ")
    assert change.startswith("Did you mean H200")


def test_wishes_that_contradict_themselves_are_refused() -> None:
    def wish(**wishes: Any) -> list[str]:
        return refusal(ObjectiveError, lambda: mw.plan(small(), 8, "8xH200", **wishes))

    assert wish(finish_by=1)[0] == (
        "A plan was asked for with finish_by and without samples."
    )
    assert wish(objective="quickest", samples=8)[0] == (
        "'quickest' is not an objective."
    )
    assert wish(at_most=-1, samples=8)[0] == (
        "A plan was asked for with at_most=-1 (a int)."
    )
    here = refusal(ObjectiveError, lambda: mw.plan(small(), 8, at_most=1, samples=8))
    assert here[0] == (
        "A budget of $1.00 was given for devices whose price is not known."
    )


def test_memory_is_a_size_that_a_device_has() -> None:
    assert refusal(
        ConfigurationError, lambda: mw.plan(small(), 8, "8xH200", memory="lots")
    )[0] == ("memory received 'lots' (a str).")
    assert refusal(
        MachineError, lambda: mw.plan(small(), 8, "8xH200", memory="900GiB")
    )[0] == ("memory received 900.0 GiB for H200.")


@pytest.mark.parametrize("what", ["measure", "calibrate"])
def test_only_what_is_here_can_be_measured(what: str) -> None:
    wanted: dict[str, Any] = {what: True if what == "calibrate" else 2}
    assert refusal(MachineError, lambda: mw.plan(small(), 8, "8xH200", **wanted)) == [
        f"plan received {what} for 8 x H200, NVLink 4.",
        "Only devices that are here can be measured.",
        f"Leave {what} out, or leave devices out to plan for those that are here.",
    ]
    two = replace(parse_machine(["CPU:0"]), num_hosts=2)
    assert refusal(MachineError, lambda: mw.plan(small(), 8, two, **wanted)) == [
        f"plan received {what} in a run of 2 processes.",
        "Only the devices of a process that is alone can be measured.",
        f"Leave {what} out, or plan in a run of one process.",
    ]


@pytest.mark.parametrize("measure", [-1, 2.0, True])
def test_how_many_are_measured_is_a_count(measure: Any) -> None:
    assert refusal(PlanError, lambda: mw.plan(small(), 8, measure=measure)) == [
        f"plan received measure={measure!r} (a {type(measure).__name__}).",
        "It is the number of plans that are run here, from 0.",
        "Pass, for example, measure=3, or leave it out.",
    ]


def test_a_model_without_values_cannot_be_measured() -> None:
    model = build_abstractly(small)
    assert refusal(PlanError, lambda: mw.plan(model, 8, measure=1)) == [
        "plan received measure for 'small', whose variables have no values.",
        "Only a model with values can be run.",
        "Leave measure out, or build the model as usual.",
    ]
