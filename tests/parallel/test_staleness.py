"""No gradient is older than the bound, and somebody can always go on."""

from meshwright.parallel.staleness import Staleness, StalenessBound

import numpy as np
import pytest


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 100])
@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_whatever_happens_none_is_older_than_the_bound_and_all_are_served(
    most: int, num_workers: int
) -> None:
    """Plays: at each turn a random worker does what it may."""
    chance = np.random.default_rng(most * 100 + num_workers)
    for speeds in ([1] * num_workers, [1, *[20] * (num_workers - 1)]):
        bound, ages = StalenessBound(most), Staleness()
        computing: set[int] = set()
        while bound.version < 300:
            able = [
                worker
                for worker in range(num_workers)
                if (
                    bound.may_apply(worker) if worker in computing else bound.may_pull()
                )
            ]
            assert able, "nobody can go on"
            weights = np.array([speeds[worker] for worker in able])
            worker = int(chance.choice(able, p=weights / weights.sum()))
            if worker in computing:
                computing.remove(worker)
                if chance.random() < 0.05:
                    bound.withdraw(worker)  # it died
                else:
                    ages[bound.apply(worker)] += 1
            else:
                computing.add(worker)
                bound.pull(worker)
        assert ages.largest <= most
        assert ages.total() == 300


def test_with_a_wide_bound_nobody_ever_waits() -> None:
    bound = StalenessBound(1000)
    bound.pull("slow")
    for _ in range(1000):
        assert bound.may_pull()
        bound.pull("fast")
        assert bound.may_apply("fast")
        bound.apply("fast")
    bound.pull("fast")
    assert not bound.may_apply("fast")
    assert bound.apply("slow") == 1000


def test_a_bound_of_zero_lets_one_compute_at_a_time() -> None:
    bound = StalenessBound(0)
    bound.pull("one")
    assert not bound.may_pull()
    assert bound.apply("one") == 0
    assert bound.may_pull()
    assert bound.is_idle


def test_the_histogram_of_nothing_says_so() -> None:
    assert str(Staleness()) == "no update yet"
    assert (Staleness().mean, Staleness().largest) == (0.0, 0)
