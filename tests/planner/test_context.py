"""How much longer kernels take in steps is found from steps of several kinds."""

from typing import Any

import meshwright as mw
from meshwright.planner import context
from meshwright.planner.context import REFERENCES, Reference, fitted
from meshwright.planner.costs import kind_in_context

import jax
import numpy as np
import pytest


def test_factors_are_found_again() -> None:
    wanted = {"product": 1.2, "convolution": 1.4, "other": 1.1}
    sums = [
        {"product": 8.0, "other": 2.0},
        {"convolution": 5.0, "other": 2.0},
        {"product": 1.0, "other": 9.0},
        {"convolution": 9.0},
    ]
    times = [sum(wanted[k] * each for k, each in kinds.items()) for kinds in sums]
    assert fitted(sums, times) == pytest.approx(wanted, rel=0.05)


def test_what_no_step_tells_stays_as_it_is() -> None:
    sums = [{"product": 8.0, "loop": 0.0}, {"product": 2.0}]
    found = fitted(sums, [12.0, 3.0])
    assert found["loop"] == pytest.approx(1.0)
    assert found["product"] == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_have_the_kernels_that_they_stand_for(name: str) -> None:
    heavy = {"attention": "product", "images": "convolution", "recurrent": "loop"}
    kinds = {kind_in_context(k) for k in REFERENCES[name].kernels().kernels}
    assert heavy.get(name, "product") in kinds


def test_references_are_gradients_that_are_not_nothing() -> None:
    random = np.random.default_rng(0)
    for name, each in REFERENCES.items():
        small = Reference(each.loss, each.sample, each.weights, 2)
        arrays = [random.normal(size=s).astype(d) for s, d in small.shapes(2)]
        scaled = [arrays[0], *(0.1 * array for array in arrays[1:])]
        for gradient in jax.jit(small.step)(*scaled):
            values: Any = np.asarray(gradient)
            assert np.isfinite(values).all(), name
            assert np.abs(values).max() > 0, name


def test_measured_factors_are_those_of_all_kinds() -> None:
    from meshwright.planner.measuring import Stopwatch
    from meshwright.planner.speed import Speed, StreamPoint

    # Without speeds of products all that was measured is too much.
    speed = Speed(streams=(StreamPoint(1.0, 1e-9), StreamPoint(1e9, 1.0)))
    with pytest.MonkeyPatch.context() as patch:
        only = {"recurrent": REFERENCES["recurrent"]}
        patch.setattr(context, "REFERENCES", only)
        patch.setattr(context, "KernelCosts", _Unit)
        found = context.factors_in_context(Stopwatch(mw.Single().mesh), speed)
    assert found["loop"] < 1, "a loop of this size does not take a second"


class _Unit:
    """As if each kernel took a second."""

    def __init__(self, kernels: Any, speed: Any) -> None:
        self._number = len(kernels.kernels)

    def seconds(self, samples: int) -> Any:
        return np.ones(self._number)
