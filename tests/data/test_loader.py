"""The loader: its order, and going on where it stopped."""

import json
from typing import Any

from meshwright.data.loader import Batches
from meshwright.errors import DataError

import numpy as np
import pytest

X, Y = np.arange(23), np.arange(23) * 10


def make(**options: Any) -> Batches:
    return Batches({"x": X, "y": Y}, 4, **{"seed": 5, **options})


def epoch_of(batches: Batches) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def test_order_is_numpy_s_permutation_of_seed_and_epoch() -> None:
    batches = make()
    for epoch in range(3):
        expected = np.random.default_rng((5, epoch)).permutation(23)
        got = list(batches)
        np.testing.assert_array_equal(np.concatenate([b["x"] for b in got]), expected)
        np.testing.assert_array_equal(
            np.concatenate([b["y"] for b in got]), expected * 10
        )
        assert [len(b["x"]) for b in got] == [4, 4, 4, 4, 4, 3]


def test_order_does_not_depend_on_or_change_numpy_s_global_state() -> None:
    np.random.seed(1)
    first = epoch_of(make())
    after = np.random.random()
    np.random.seed(1)
    assert after == np.random.random()
    assert epoch_of(make()) == first
    assert epoch_of(make(seed=6)) != first


def test_the_last_batch_can_be_dropped_and_the_order_kept() -> None:
    batches = make(shuffle=False, drop_last=True)
    assert len(batches) == 5
    assert epoch_of(batches) == X[:20].reshape(5, 4).tolist()


@pytest.mark.parametrize("stop", range(1, 14))
def test_a_fresh_object_goes_on_exactly_where_another_stopped(stop: int) -> None:
    reference, whole = make(), []
    for _ in range(3):
        whole += epoch_of(reference)

    first, seen = make(), list[Any]()
    while len(seen) < stop:
        for batch in first:
            seen.append(batch["x"].tolist())
            if len(seen) == stop:
                break
    saved = json.dumps(first.position)

    second = make()
    second.restore(json.loads(saved))
    rest: list[Any] = []
    while len(seen) + len(rest) < len(whole):
        rest += epoch_of(second)
    assert seen + rest == whole


@pytest.mark.parametrize(
    "position",
    [
        {"epoch": 0, "batch": 6, "seed": 5},
        {"epoch": 0, "batch": 0, "seed": 4},
        {"epoch": -1, "batch": 0, "seed": 5},
        {"batch": 0, "seed": 5},
    ],
)
def test_a_position_of_other_batches_is_refused(position: dict[str, int]) -> None:
    with pytest.raises(DataError) as caught:
        make().restore(position)
    assert str(caught.value).split("\n") == [
        f"restore received {position}.",
        "A position has an epoch from 0, a batch from 0 to 5, and the seed of these "
        "batches, 5.",
        "Make the Batches with the arrays, batch_size, drop_last and seed that the "
        "position was saved with.",
    ]


def test_arrays_of_different_or_no_length_are_refused() -> None:
    with pytest.raises(DataError) as caught:
        Batches((X, Y[:20]), 4)
    assert str(caught.value).split("\n") == [
        "Batches received arrays[0] of 23 samples and arrays[1] of 20 samples.",
        "All of them have one entry per sample, so their lengths are equal.",
        "arrays[1] is the shortest: complete it, or cut the others to 20.",
    ]
    with pytest.raises(DataError) as caught:
        Batches(X[:0], 4)
    assert str(caught.value).split("\n")[0] == "Batches received arrays of 0 samples."
    with pytest.raises(DataError) as caught:
        Batches(np.float32(3), 4)
    assert str(caught.value).split("\n") == [
        "Batches received arrays without a dim: it is a single number.",
        "The first dim of an array counts its samples.",
        "Pass an array with one entry per sample.",
    ]


@pytest.mark.parametrize(
    ("size", "options", "ending"),
    [(0, {}, ""), (24, {"drop_last": True}, " and drop_last=True")],
)
def test_an_epoch_without_batches_is_refused(
    size: int, options: dict[str, Any], ending: str
) -> None:
    with pytest.raises(DataError) as caught:
        Batches(X, size, **options)
    assert str(caught.value).split("\n") == [
        f"Batches received batch_size={size} for 23 samples{ending}.",
        "An epoch has at least one batch, and a batch at least one sample.",
        "Use a batch_size from 1 to 23.",
    ]
