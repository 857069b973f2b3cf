"""Times of products are inferred from those that were measured."""

from meshwright.planner.speed import (
    ProductGroup,
    ProductPoint,
    Products,
    Speed,
    StreamPoint,
)

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


def inferred(
    *sizes: float,
    dtype: str = "float32",
    form: str = "nn",
    speed: Speed = SPEED,
    is_awkward: bool = False,
) -> float:
    array = np.array([[1.0, *sizes]])
    flops = 2 * array.prod(axis=1)
    group = ProductGroup("product", dtype, form, is_awkward)
    return float(speed.product_seconds(Products([group], array, flops))[0])


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


UNITS, PEAK, BANDWIDTH = 100, 1e15, 1e12


def tiled_seconds(rows: int, inner: int, columns: int) -> float:
    """A GPU whose units compute parts of 128 x 128, each as long as a full one."""
    parts = -(-rows // 128) * -(-columns // 128)
    turns = -(-parts // UNITS)
    return turns * UNITS * 2 * 128 * 128 * inner / PEAK


def gpu_point(rows: int, inner: int, columns: int, slower: float = 1.0) -> ProductPoint:
    moved = 2.0 * (rows * inner + inner * columns + rows * columns)
    computing = slower * tiled_seconds(rows, inner, columns)
    return ProductPoint(
        *("product", "bfloat16", "nn", 1, rows, inner, columns),
        seconds=computing + moved / BANDWIDTH,
        bytes=moved,
        is_awkward=slower != 1.0,
    )


GPU = Speed(
    products=(
        gpu_point(12800, 4096, 12800),
        gpu_point(12800, 1024, 128),
        gpu_point(25600, 512, 1280),
        gpu_point(25600, 512, 1280, slower=3.0),
    ),
    streams=(StreamPoint(1.0, 1 / BANDWIDTH), StreamPoint(1e12, 1e12 / BANDWIDTH)),
    units=UNITS,
)


@pytest.mark.parametrize("sizes", [(6400, 2048, 256), (51200, 768, 640)])
def test_on_gpus_the_time_beside_memory_is_inferred(sizes: tuple[int, ...]) -> None:
    found = inferred(*sizes, dtype="bfloat16", speed=GPU)
    assert found == pytest.approx(tiled_seconds(*sizes), rel=0.05)


def test_parts_at_the_edge_take_as_long_as_others() -> None:
    even = inferred(12800, 1024, 256, dtype="bfloat16", speed=GPU)
    odd = inferred(12800, 1024, 266, dtype="bfloat16", speed=GPU)
    assert odd > 1.15 * even


def test_units_share_a_part_if_there_are_few_and_much_to_sum() -> None:
    much = inferred(128, 16384, 128, dtype="bfloat16", speed=GPU)
    little = inferred(128, 256, 128, dtype="bfloat16", speed=GPU)
    assert much < 4 * little, "64 times the work, for more units"


def test_rows_that_begin_anywhere_are_slower() -> None:
    sizes = (25600, 512, 1280)
    good = inferred(*sizes, dtype="bfloat16", speed=GPU)
    bad = inferred(*sizes, dtype="bfloat16", speed=GPU, is_awkward=True)
    assert bad == pytest.approx(3 * good, rel=0.01)
