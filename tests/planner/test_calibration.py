"""The calibration measures what it says, on this machine."""

from typing import Any

import meshwright as mw
from meshwright.planner import calibration, context
from meshwright.planner.calibration import _collectives, measure_speed
from meshwright.planner.context import REFERENCES
from meshwright.planner.measuring import Stopwatch, Trial
from meshwright.strategies.planning import _mesh

import jax.numpy as jnp
import pytest


def test_the_stopwatch_sees_that_more_work_takes_longer() -> None:
    shapes = [((256, 256), "float32")] * 2

    def once(a: jnp.ndarray, b: jnp.ndarray) -> jnp.ndarray:
        return a @ b

    def often(a: jnp.ndarray, b: jnp.ndarray) -> jnp.ndarray:
        for _ in range(8):
            a = a @ b
        return a

    watch = Stopwatch(mw.Single().mesh)
    short, long = watch.seconds([Trial(once, shapes), Trial(often, shapes)])
    assert 3 < long / short < 20


def test_a_calibration_without_time_has_something_of_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "_TOGETHER", 8)
    # The kernels of a step are of the same kinds on few samples.
    few = {name: step._replace(batch=2) for name, step in REFERENCES.items()}
    monkeypatch.setattr(context, "REFERENCES", few)
    speed = measure_speed([_mesh(("/device:CPU:0",))], most_seconds=0.0)
    assert {point.kind for point in speed.products} == {"product", "convolution"}
    assert speed.per_random > speed.per_number > 0
    assert speed.per_dear["pow"] > speed.per_dear["div"] > speed.per_number
    assert speed.per_summed["float32"] > 0
    assert speed.per_transposed > 0
    kinds = {"product", "convolution", "loop", "transpose", "other"}
    assert speed.in_context.keys() == kinds
    assert len(speed.streams) == 13
    assert all(point.seconds > 0 for point in speed.streams)
    assert speed.dispatch > 0
    assert speed.fresh >= 0, "a difference of times, of which others may take all"
    assert not speed.overlaps
    assert not speed.units


@pytest.mark.parametrize("is_cpu", [True, False])
def test_the_first_products_have_something_of_everything(is_cpu: bool) -> None:
    points = [point for _, point in calibration._all_products(is_cpu)]
    first = points[: calibration._TOGETHER]
    assert {(p.kind, p.dtype, p.form) for p in first} >= {
        ("product", point.dtype, point.form) for point in points if is_product(point)
    }
    assert {p.form for p in first if not is_product(p)} >= {"outputs", "kernel"}


def is_product(point: Any) -> bool:
    return bool(point.kind == "product")


def test_collectives_are_timed_on_all_devices_at_once() -> None:
    points = list(_collectives(_mesh(("/device:CPU:0", "/device:CPU:1"))))
    kinds = {point.kind for point in points}
    assert kinds == {"all_reduce", "all_gather", "permute", "wait"}
    assert {point.num_devices for point in points} == {2}
    assert all(point.seconds > 0 for point in points if point.kind != "wait")
