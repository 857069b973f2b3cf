"""Where to cut a straight line of work into blocks. Numbers in, numbers out."""

from collections.abc import Sequence
from itertools import accumulate

NUM_CANDIDATES = 96
"""Places that are considered; more would make the search slow and little better."""

NUM_LIMITS = 64
"""Sizes of the largest block that are tried, up to everything in one block."""


def choose_cuts(produced: Sequence[int], alive: Sequence[int]) -> list[int]:
    """The cuts that keep the least memory, if blocks are computed again when needed.

    What is alive at a cut is kept all the time; what the largest block produces comes
    on top while that block is computed again. The sum of both is minimised.

    Arguments:
        produced: Bytes that each piece of work produces.
        alive: Bytes that later pieces need of earlier ones, in front of each piece.

    Returns:
        The indices of the pieces that begin a new block, without 0.

    >>> choose_cuts([8, 8, 8, 8, 8, 8, 8, 8], [0, 8, 1, 8, 1, 8, 1, 8])
    [2, 4, 6]
    """
    before = [0, *accumulate(produced)]
    places = _candidates(before, alive)
    total = before[-1]
    found = [
        _cheapest(places, before, alive, limit=total * share / NUM_LIMITS)
        for share in range(1, NUM_LIMITS + 1)
    ]
    return min(found, key=lambda option: option[0])[1]


def _candidates(before: list[int], alive: Sequence[int]) -> list[int]:
    """The best place to cut in each of many stretches of equal work."""
    total, best = before[-1], dict[int, int]()
    for place in range(1, len(alive)):
        stretch = before[place] * NUM_CANDIDATES // max(total, 1)
        if stretch not in best or alive[place] < alive[best[stretch]]:
            best[stretch] = place
    return [0, *best.values(), len(alive)]


def _cheapest(
    places: list[int], before: list[int], alive: Sequence[int], limit: float
) -> tuple[float, list[int]]:
    """The cuts with the least alive at them, if no block may produce over a limit.

    A block that cannot be cut any further may be larger.
    """
    kept: list[float] = [0.0]
    largest: list[int] = [0]
    previous = [0]
    for here in range(1, len(places)):
        options = []
        for there in reversed(range(here)):
            block = before[places[here]] - before[places[there]]
            if block > limit and there < here - 1:
                break
            options.append((kept[there], there, max(largest[there], block)))
        cost, there, size = min(options)
        is_end = places[here] == places[-1]
        kept.append(cost + (0 if is_end else alive[places[here]]))
        largest.append(size)
        previous.append(there)
    cuts, at = [], previous[-1]
    while at:
        cuts.append(places[at])
        at = previous[at]
    return kept[-1] + largest[-1], cuts[::-1]
