"""`mw.preflight`: the compiler's verdict, and the smallest change that fits."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import (
    ConfigurationError,
    MeshwrightError,
    PlanError,
    ProfileError,
    StrategyError,
)
from meshwright.models.profile import build_abstractly
from meshwright.parallel.plan import Plan
from meshwright.strategies import preflighting
from meshwright.strategies.preflighting import (
    MOST_COMPILED,
    Preflight,
    Suggestion,
    _Changes,
    _ordered,
    _room,
)
from meshwright.strategies.strategy import Strategy
from meshwright.train.exact_memory import ExactMemory

import jax
import keras
import pytest

L = keras.layers
CPUS = [f"CPU:{i}" for i in range(8)]
MIB = 2**20

pytestmark = pytest.mark.usefixtures("small_programs_are_cached")


def net(width: int = 128, depth: int = 3) -> keras.Model:
    layers = [L.Dense(width, activation="relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((64,)), *layers, L.Dense(10)], name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def wide(depth: int = 4) -> keras.Model:
    """Weights are most of it."""
    layers = [L.Dense(256, use_bias=False) for _ in range(depth)]
    model = keras.Sequential([keras.Input((256,)), *layers], name="wide")
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return build_abstractly(net)


@pytest.fixture(scope="module")
def alone(model: keras.Model) -> Preflight:
    return mw.preflight(model, 1024, mw.Single())


def refusal(error: type[MeshwrightError], call: Callable[[], object]) -> list[str]:
    with pytest.raises(error) as raised:
        call()
    found = raised.value
    return [found.received, found.rule, found.change]


def test_what_a_step_needs_is_compared_with_the_limit(
    model: keras.Model, alone: Preflight
) -> None:
    needed = alone.bytes_per_device
    enough = mw.preflight(model, 1024, mw.Single(), memory=needed)
    assert (enough.fits, enough.limit, enough.suggestion) == (True, needed, None)
    assert enough.because == "as memory= says"
    less = mw.preflight(model, 1024, mw.Single(), memory=needed - 1)
    assert not less.fits
    assert less.bytes_per_device == needed


def test_kinds_sum_to_what_a_device_needs(alone: Preflight) -> None:
    assert sum(alone.by_kind.values()) == alone.bytes_per_device
    parameters = (64 * 128 + 2 * 128 * 128 + 128 * 10) + 3 * 128 + 10
    assert alone.by_kind["parameters"] == 4 * parameters
    assert alone.by_kind["optimizer state"] == pytest.approx(8 * parameters, rel=0.01)
    assert alone.by_kind["batch"] == 1024 * (64 + 1) * 4


def test_without_memory_the_limit_is_that_of_the_devices(alone: Preflight) -> None:
    assert alone.fits
    assert alone.limit is not None
    assert alone.because.endswith("; the rest is for everything else that runs")


def test_without_a_strategy_it_is_the_model_s_own_or_one_device(
    model: keras.Model,
) -> None:
    assert mw.preflight(model, 64).plan == Plan()
    mine = mw.distribute(net(), mw.FSDP(devices=CPUS[:2]))
    found = mw.preflight(mine, 64)
    assert found.plan == Plan(fsdp=2)
    whole = mw.preflight(model, 64).by_kind["parameters"]
    assert found.by_kind["parameters"] < 0.6 * whole


def test_nothing_is_allocated_for_a_model_without_values(model: keras.Model) -> None:
    mw.preflight(model, 64, mw.Mirrored(CPUS[:2]))
    weights = [v for v in model.variables if v.ndim == 2]
    assert {type(v._value) for v in weights} == {jax.ShapeDtypeStruct}


def test_the_suggestion_is_words_and_a_plan_that_passes_preflight(
    model: keras.Model, alone: Preflight
) -> None:
    limit = alone.bytes_per_device // 2
    found = mw.preflight(model, 1024, mw.Single(), memory=limit)
    change = found.suggestion
    assert change is not None
    assert change.words.startswith("accumulate=")
    assert change.words == f"accumulate={change.plan.accumulate}"
    assert change.batch_size == 1024
    devices = mw.Single().devices
    again = mw.preflight(
        model, change.batch_size, Strategy(change.plan, devices), memory=limit
    )
    assert again.fits
    assert again.bytes_per_device == change.bytes_per_device


def test_the_suggestion_is_the_smallest_change_that_fits(
    model: keras.Model, alone: Preflight
) -> None:
    limit = alone.bytes_per_device // 2
    change = mw.preflight(model, 1024, mw.Single(), memory=limit).suggestion
    assert change is not None
    assert change.plan.accumulate > 2
    half = Plan(accumulate=change.plan.accumulate // 2)
    before = mw.preflight(model, 1024, Strategy(half, mw.Single().devices))
    assert before.bytes_per_device > limit, "fewer microbatches do not fit"


def test_state_is_sharded_where_microbatches_do_not_help() -> None:
    model = build_abstractly(wide)
    replicas = mw.preflight(model, 64, mw.Mirrored(CPUS[:4]))
    limit = replicas.bytes_per_device * 8 // 10
    change = mw.preflight(model, 64, mw.Mirrored(CPUS[:4]), memory=limit).suggestion
    assert change is not None
    assert change.words in ("fsdp=2", "fsdp=4")
    assert change.plan.num_devices == 4
    strategy = Strategy(change.plan, mw.Mirrored(CPUS[:4]).devices)
    assert mw.preflight(model, 64, strategy, memory=limit).fits


@pytest.mark.parametrize(("batch_size", "axis"), [(64, "tensor"), (4096, "stages")])
def test_weights_are_split_in_layers_or_over_stages_where_sharding_is_too_little(
    batch_size: int, axis: str
) -> None:
    model = build_abstractly(lambda: wide(6))
    mirrored = mw.Mirrored(CPUS[:4])
    needed = mw.preflight(model, batch_size, mirrored).bytes_per_device
    limit = needed // 2
    found = mw.preflight(model, batch_size, mirrored, memory=limit).suggestion
    assert found is not None
    assert found.words == f"{axis}={getattr(found.plan, axis)}"
    strategy = Strategy(found.plan, mirrored.devices)
    assert mw.preflight(model, batch_size, strategy, memory=limit).fits


def test_state_goes_to_the_host_only_where_that_is_other_memory() -> None:
    plan = Plan(data=4)
    assert not any(changed.offload for changed, _ in _ordered(plan, 64))
    away = [c for c, _ in _ordered(plan, 64, may_offload=True) if c.offload]
    assert away
    assert all(changed.stages == 1 for changed in away), "stages keep theirs"


def test_microbatches_of_one_device_flow_through_the_stages() -> None:
    plan = Plan(data=2, accumulate=16)
    cut = [c for c, size in _ordered(plan, 64) if c.stages == 2 and size == 64]
    assert {(c.accumulate, c.microbatches) for c in cut} == {(1, 16)}


def test_stages_get_more_microbatches() -> None:
    model = build_abstractly(lambda: net(128, 6))
    strategy = mw.Pipeline(2, 2, schedule="gpipe", devices=CPUS[:2], remat=True)
    needed = mw.preflight(model, 1024, strategy).bytes_per_device
    change = mw.preflight(model, 1024, strategy, memory=needed - 1000).suggestion
    assert change is not None
    assert change.words.startswith("microbatches=")
    assert change.plan.stages == 2


def kinds_of(plan: Plan, batch_size: int, changed: Plan, size: int) -> str:
    """What a change changes, in a word for each."""
    kinds = {
        "accumulate": changed.accumulate != plan.accumulate,
        "remat": changed.remat != plan.remat,
        "fsdp": changed.fsdp != plan.fsdp,
        "tensor": changed.tensor != plan.tensor,
        "stages": changed.stages != plan.stages,
        "offload": changed.offload != plan.offload,
        "bfloat16": changed.precision != plan.precision,
        "batch": size != batch_size,
    }
    return " ".join(kind for kind, is_new in kinds.items() if is_new)


def test_changes_are_tried_in_the_order_of_the_documentation() -> None:
    plan = Plan(data=8)
    ordered = _ordered(plan, 4096, may_offload=True)
    order = list(dict.fromkeys(kinds_of(plan, 4096, *each) for each in ordered))
    alone = [kind for kind in order if " " not in kind]
    splits = ["fsdp", "tensor", "stages"]
    assert alone == [
        "accumulate",
        "remat",
        *splits,
        "offload",
        "bfloat16",
        "batch",
    ]
    page = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    (said,) = re.findall(r"the first of these that fits: (.*?)\.", page, re.DOTALL)
    words = [*alone[:-1], "smaller batch"]
    places = [said.index(word) for word in words]
    assert places == sorted(places)


def test_what_keeps_the_result_comes_before_what_rounds_it_or_changes_batches() -> None:
    plan = Plan(data=8)
    kinds = [kinds_of(plan, 4096, *each) for each in _ordered(plan, 4096)]
    depths = [("bfloat16" in kind) + 2 * ("batch" in kind) for kind in kinds]
    assert depths == sorted(depths)
    assert kinds.index("accumulate remat fsdp") < kinds.index("bfloat16")
    exact = [kind for kind, depth in zip(kinds, depths, strict=True) if not depth]
    numbers = [len(kind.split()) for kind in exact]
    assert numbers == sorted(numbers), "one change alone before several"


def test_every_change_is_another_plan_on_the_same_devices_that_divides() -> None:
    plan = Plan(data=4, fsdp=2, tensor=1, remat=True, precision="float16")
    found = _ordered(plan, 96)
    assert (plan, 96) not in found
    assert len(set(found)) == len(found)
    for changed, size in found:
        assert changed.num_devices == 8
        assert (changed.remat, changed.precision) == (True, "float16")
        assert size % (changed.num_replicas * changed.accumulate) == 0
    assert _ordered(plan, 97), "an uneven batch has ways out too"


class Sizes(_Changes):
    """Estimates and the compiler's account by number, which agree or do not."""

    def __init__(self, estimates: list[int], needed: list[int | None]) -> None:
        self.estimates, self.needed = estimates, needed
        self.compiled: list[int] = []

    def _estimate(self, plan: Plan, batch_size: int) -> float:
        return self.estimates[batch_size]

    def _needed(self, plan: Plan, batch_size: int) -> int | None:
        self.compiled.append(batch_size)
        return self.needed[batch_size]

    def first(self, limit: int) -> int | None:
        self._limit = limit
        found = self._first([(Plan(), number) for number in range(len(self.needed))])
        return None if found is None else found[1]


def test_what_is_estimated_to_be_as_large_as_what_did_not_fit_is_not_compiled() -> None:
    sizes = Sizes([300, 100, 100, 110, 90], [300, 120, 120, 130, 95])
    assert sizes.first(limit=100) == 4
    assert sizes.compiled == [1, 4]


def test_a_plan_that_does_not_suit_the_model_says_nothing_of_others() -> None:
    sizes = Sizes([80, 90], [None, 90])
    assert sizes.first(limit=100) == 1


def test_the_last_change_that_is_compiled_is_the_leanest() -> None:
    estimates = [*range(120, 100, -1), 20]
    sizes = Sizes(estimates, [*([101] * 20), 20])
    assert sizes.first(limit=100) == 20
    assert len(sizes.compiled) == MOST_COMPILED
    late = Sizes([180, 150], [180, 90])
    assert late.first(limit=100) == 1, "estimates may be too large"
    without = Sizes(estimates, [101] * 21)
    assert without.first(limit=100) is None
    assert len(without.compiled) == MOST_COMPILED
    hopeless = Sizes([300, 200], [300, 200])
    assert hopeless.first(limit=100) is None
    assert hopeless.compiled == []


def test_a_gpu_needs_room_for_more_than_the_step() -> None:
    found = ExactMemory(by_stage=({"parameters": 4000, "batch": 100},), trials=700)
    assert _room(found, "cpu") == 4100
    assert _room(found, "gpu") == found.bytes_to_run > 4100


@pytest.mark.parametrize("try_kernels", [False, True])
def test_kernels_are_tried_out_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, try_kernels: bool
) -> None:
    asked: list[bool] = []

    def counted(*args: Any, tries_kernels: bool, **options: Any) -> ExactMemory:
        asked.append(tries_kernels)
        return ExactMemory(by_stage=({"parameters": 4 * MIB},))

    monkeypatch.setattr(preflighting, "exact_memory", counted)
    layers = [keras.Input((8,)), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    mw.preflight(
        model,
        batch_size=8,
        memory="2MiB",
        try_kernels=try_kernels,
        strategy=mw.Single(),
    )
    assert asked[0] == try_kernels
    assert {*asked} == {try_kernels}, "suggestions are judged in the same way"


def test_the_printed_text_has_the_verdict_the_kinds_and_the_change() -> None:
    change = Suggestion(
        words="fsdp=2", plan=Plan(fsdp=2), batch_size=64, bytes_per_device=MIB
    )
    facts: dict[str, Any] = {
        "model": "net",
        "plan": Plan(data=2),
        "batch_size": 64,
        "bytes_per_device": 3 * MIB,
        "bytes_to_run": 3 * MIB,
        "by_kind": {"parameters": 2 * MIB, "metrics": 0, "batch": MIB},
        "limit": 2 * MIB,
        "because": "as memory= says",
    }
    lines = [
        "net, batch of 64, data=2: does not fit",
        "  needs  3.0 MiB per device",
        "  limit  2.0 MiB (as memory= says)",
        "         2.0 MiB  parameters",
        "         1.0 MiB  batch",
        "  smallest change that fits: fsdp=2: 1.0 MiB per device",
    ]
    found = Preflight(**facts, fits=False, suggestion=change)
    assert str(found).splitlines() == lines
    none = str(Preflight(**facts, fits=False)).splitlines()
    assert none[:-1] == lines[:-1]
    assert none[-1] == "  no change that was tried fits; use more devices"
    fits = Preflight(**facts | {"limit": None, "because": "nobody knows"}, fits=True)
    assert str(fits).splitlines() == [
        "net, batch of 64, data=2: fits",
        lines[1],
        "  limit  unknown (nobody knows)",
        *lines[3:5],
    ]
    close = str(Preflight(**facts, fits=False, is_close=True)).splitlines()
    assert close[-2] == (
        "  close to the limit: it depends on kernels that were not tried out; "
        "try_kernels=True decides"
    )
    gpu = Preflight(**facts | {"bytes_to_run": 4 * MIB}, fits=False)
    assert str(gpu).splitlines()[1] == (
        "  needs  3.0 MiB, and 4.0 MiB to run, per device"
    )


def test_it_is_json_with_and_without_a_suggestion(
    model: keras.Model, alone: Preflight
) -> None:
    facts = json.loads(json.dumps(alone.to_json(), allow_nan=False))
    assert facts["suggestion"] is None
    assert facts["bytes_to_run"] == facts["bytes_per_device"] == alone.bytes_per_device
    assert sum(facts["by_kind"].values()) == alone.bytes_per_device
    limit = alone.bytes_per_device // 2
    found = mw.preflight(model, 1024, mw.Single(), memory=limit)
    facts = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert facts["fits"] is False
    assert facts["suggestion"]["plan"]["accumulate"] > 1
    assert facts["suggestion"]["bytes_per_device"] <= limit
    assert facts["suggestion"]["words"].startswith("accumulate=")


def test_if_no_change_fits_it_says_so(model: keras.Model) -> None:
    found = mw.preflight(model, 8, mw.Mirrored(CPUS[:2]), memory="1KiB")
    assert not found.fits
    assert found.suggestion is None
    assert str(found).splitlines()[-1] == (
        "  no change that was tried fits; use more devices"
    )


@pytest.mark.parametrize("batch", [0, -1, 1.5, False])
def test_a_batch_is_a_count(model: keras.Model, batch: Any) -> None:
    assert refusal(PlanError, lambda: mw.preflight(model, batch)) == [
        f"preflight received batch_size={batch!r} (a {type(batch).__name__}).",
        "A global batch has a whole number of samples from 1.",
        "Pass, for example, batch_size=256.",
    ]


def test_a_strategy_is_a_strategy(model: keras.Model) -> None:
    assert refusal(StrategyError, lambda: mw.preflight(model, 8, "fsdp")) == [  # type: ignore[arg-type]
        "preflight received 'fsdp' (a str) as strategy.",
        "It takes a strategy, or None for the model's own.",
        "Pass, for example, mw.Mirrored().",
    ]


def test_what_is_no_model_no_size_or_not_built_is_refused(model: keras.Model) -> None:
    assert refusal(PlanError, lambda: mw.preflight(None, 8)) == [
        "preflight received None (a NoneType) as model.",
        "It takes a Keras model.",
        "Wrap layers in a model, for example keras.Sequential([...]).",
    ]
    assert refusal(ConfigurationError, lambda: mw.preflight(model, 8, memory="lots"))[
        0
    ] == ("memory received 'lots' (a str).")
    unbuilt = keras.Sequential([L.Dense(4)], name="unbuilt")
    unbuilt.compile("sgd", "mse")
    assert refusal(ProfileError, lambda: mw.preflight(unbuilt, 8))[0] == (
        "'unbuilt' was to be profiled, and is not built."
    )
