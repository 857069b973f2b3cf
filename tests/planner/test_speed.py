"""Times of products are inferred from those that were measured."""

from meshwright.planner.speed import ProductPoint, Products, Speed, StreamPoint

import numpy as np
import pytest


def seconds_by_law(rows: float, inner: float, columns: float) -> float:
    """A device of 1e12 FLOP/s that small rows and columns slow down."""
    slow = (1 + 64 / rows) * (1 + 32 / columns)
    return 2 * rows * inner * columns / 1e12 * slow


GRID = [(r, i, c) for r in (16, 128, 1024) for i in (64, 512) for c in (16, 128, 1024)]
SPEED = Speed(
    products=tuple(
        ProductPoint("product", "float32", "nn", 1, *s, seconds_by_law(*s))
        for s in GRID
    ),
    streams=(StreamPoint(1e3, 1e-8), StreamPoint(1e9, 1e-1)),
)


def inferred(*sizes: float, dtype: str = "float32", form: str = "nn") -> float:
    array = np.array([[1.0, *sizes]])
    flops = 2 * array.prod(axis=1)
    wanted = Products([("product", dtype, form)], array, flops)
    return float(SPEED.product_seconds(wanted)[0])


@pytest.mark.parametrize("sizes", GRID[::5])
def test_what_was_measured_is_found_again(sizes: tuple[int, ...]) -> None:
    assert inferred(*sizes) == pytest.approx(seconds_by_law(*sizes), rel=0.1)


@pytest.mark.parametrize("sizes", [(48, 200, 48), (300, 300, 300), (4096, 256, 4096)])
def test_between_and_beyond_the_points_the_law_holds(sizes: tuple[int, ...]) -> None:
    assert inferred(*sizes) == pytest.approx(seconds_by_law(*sizes), rel=0.25)


def test_forms_and_types_that_were_not_measured_are_taken_for_those_that_were() -> None:
    known = inferred(128, 128, 128)
    assert inferred(128, 128, 128, dtype="bfloat16", form="tt") == known


def test_streams_of_all_sizes_lie_between_those_that_were_measured() -> None:
    found = SPEED.stream_seconds(np.array([1e3, 1e6, 1e9, 0.0]))
    assert found[0] == pytest.approx(1e-8)
    assert 1e6 / 1e11 < found[1] < 1e6 / 1e10
    assert found[2] == pytest.approx(1e-1)
    assert found[3] == 0
