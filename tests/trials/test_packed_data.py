"""The orders of packed members are those of Keras' own shuffles."""

from typing import Any

from meshwright.data.resident import ArraysInMemory
from meshwright.trials import packed_data
from meshwright.trials.packed_data import Orders

import numpy as np
import pytest


def state_of(seed: int) -> Any:
    return np.random.RandomState(seed).get_state(legacy=True)


@pytest.mark.parametrize("alike", [True, False])
def test_members_in_the_same_random_state_share_what_is_drawn(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not alike:  # should a NumPy come whose newer generator shuffles in another way
        monkeypatch.setattr(packed_data, "_shuffles_alike", lambda: False)
    data = ArraysInMemory(np.zeros(9), 9, 4, shuffle=True)
    orders = Orders(data, [state_of(1), state_of(2), state_of(1)])
    alone, other = np.random.RandomState(1), np.random.RandomState(2)
    for _ in range(2):
        drawn = orders.draw([0, 1, 2])
        assert drawn.shape == (3, 9)
        np.testing.assert_array_equal(drawn[0], alone.permutation(9))
        np.testing.assert_array_equal(drawn[0], drawn[2])
        np.testing.assert_array_equal(drawn[1], other.permutation(9))
        assert (drawn[0] != drawn[1]).any()
    shared = orders.draw([0, 2])
    np.testing.assert_array_equal(shared, alone.permutation(9))


def test_without_shuffling_all_members_share_the_order_of_the_data() -> None:
    data = ArraysInMemory(np.zeros(9), 9, 4, shuffle=False)
    drawn = Orders(data, [state_of(1), state_of(2)]).draw([0, 1])
    np.testing.assert_array_equal(drawn, np.arange(9))
