"""Batches that are cut into microbatches."""

from meshwright.parallel.microbatch import Microbatches, cut_batch

import numpy as np
import pytest


@pytest.mark.parametrize("wanted", range(1, 20))
def test_sizes_differ_by_at_most_one_and_no_sample_is_lost(wanted: int) -> None:
    for size in range(1, 60):
        cut = Microbatches(size, wanted)
        assert sum(cut.sizes) == size
        assert len(cut.sizes) == cut.number == min(wanted, size)
        assert max(cut.sizes) - min(cut.sizes) <= 1
        assert list(cut.sizes) == sorted(cut.sizes, reverse=True)
        assert cut.sizes.count(cut.larger) == cut.num_larger
        assert cut.num_smaller == len(cut.sizes) - cut.num_larger


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", range(1, 14))
def test_samples_keep_their_order(size: int, wanted: int) -> None:
    x = np.random.default_rng(0).normal(size=(size, 2))
    larger, smaller = cut_batch({"x": x, "scale": np.float32(2)}, wanted)
    groups = [larger] if smaller is None else [larger, smaller]
    expected = [part for part in np.array_split(x, wanted) if len(part)]
    found = [part for group in groups for part in group["x"]]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for group in groups:
        np.testing.assert_array_equal(group["scale"], [2.0] * len(group["x"]))


@pytest.mark.parametrize("size", [4, 8, 10])
def test_only_sizes_that_occur_have_a_group(size: int) -> None:
    _, smaller = Microbatches(size, 4).cut(np.arange(size))
    assert (smaller is None) == (size % 4 == 0)


@pytest.mark.parametrize("size", [3, 8, 10])
def test_stacked_batches_are_cut_as_each_of_them_is(size: int) -> None:
    stack = np.arange(5 * size * 2).reshape(5, size, 2)
    cut = Microbatches(size, 4)
    found = cut.cut(stack, num_stacks=1)
    for at, batch in enumerate(stack):
        for ours, theirs in zip(found, cut.cut(batch), strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                np.testing.assert_array_equal(ours[at], theirs)


def test_a_batch_without_samples_is_one_microbatch() -> None:
    assert Microbatches(0, 4).sizes == (0,)
