"""Where to cut a straight line of work into stages. Numbers in, numbers out."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

NUM_CANDIDATES = 1024
"""Places that are considered; up to so many the choice is the best there is."""


def choose_stage_cuts(
    costs: Sequence[int],
    travels: Sequence[int],
    is_cuttable: Sequence[bool],
    num_stages: int,
    *,
    cost_per_byte: float = 0.0,
    held: Sequence[int] | None = None,
    limit: int | None = None,
) -> list[int] | None:
    """The cuts for which the slowest stage is as fast as possible.

    Arguments:
        costs: Of each piece of work.
        travels: Bytes that cross a cut in front of each piece of work.
        is_cuttable: Whether there may be a cut in front of each.
        num_stages: How many stages are wanted.
        cost_per_byte: What a byte costs that crosses a cut, on both of its sides.
        held: Bytes that each piece of work keeps in memory.
        limit: Bytes that a stage may hold at the most; None for any number.

    Returns:
        The indices of the pieces of work that begin a new stage, without 0; None if
        there is no way to cut. Among equally fast ones, those with the least to carry.

    >>> choose_stage_cuts([2, 2, 4, 1, 3], [0, 8, 8, 1, 8], [True] * 5, 2)
    [3]
    """
    places = _candidates(costs, travels, is_cuttable)
    if len(places) - 1 < num_stages:
        return None
    before = np.array([0, *accumulate(costs)], dtype=float)[places]
    memory = np.array([0, *accumulate(held or [0] * len(costs))], dtype=float)[places]
    toll = np.array([0.0, *(travels[p] for p in places[1:-1]), 0.0])
    slowness = before[None, :] - before[:, None]
    slowness += cost_per_byte * (toll[None, :] + toll[:, None])
    slowness[np.tril_indices(len(places))] = np.inf
    if limit is not None:
        slowness[memory[None, :] - memory[:, None] > limit] = np.inf
    fastest = _fastest(slowness, num_stages)
    if not np.isfinite(fastest):
        return None
    # Every stage that is no slower than the slowest has to be may be used.
    carried = np.where(slowness <= fastest, toll[None, :], np.inf)
    return [places[at] for at in _shortest_path(carried, num_stages)]


def _candidates(
    costs: Sequence[int], travels: Sequence[int], is_cuttable: Sequence[bool]
) -> list[int]:
    """The ends, and the places with the least to carry in stretches of the line.

    Half of the stretches have equal work, and half have equally many places: all work
    may be in one place.
    """
    allowed = [i for i, is_allowed in enumerate(is_cuttable) if is_allowed and i]
    if len(allowed) > NUM_CANDIDATES:
        half, total, done = NUM_CANDIDATES // 2, sum(costs), [0, *accumulate(costs)]
        best: dict[tuple[str, int], int] = {}
        for number, place in enumerate(allowed):
            by_work = ("work", done[place] * half // max(total, 1))
            by_number = ("number", number * half // len(allowed))
            for stretch in (by_work, by_number):
                if stretch not in best or travels[place] < travels[best[stretch]]:
                    best[stretch] = place
        allowed = sorted(set(best.values()))
    return [0, *allowed, len(costs)]


def _fastest(slowness: np.ndarray, num_stages: int) -> float:
    """The least that the slowest of so many steps from the first to the last can be."""
    slowest = slowness[0]
    for _ in range(num_stages - 1):
        slowest = np.maximum(slowest[:, None], slowness).min(axis=0)
    return float(slowest[-1])


def _shortest_path(lengths: np.ndarray, num_stages: int) -> list[int]:
    """The stops on the shortest path of so many steps from the first to the last."""
    shortest = lengths[0]
    previous: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        options = shortest[:, None] + lengths
        previous.append(options.argmin(axis=0))
        shortest = options.min(axis=0)
    stops, at = [], len(lengths) - 1
    for come_from in reversed(previous):
        at = int(come_from[at])
        stops.append(at)
    return stops[::-1]
