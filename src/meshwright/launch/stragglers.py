"""One process that is slower than the others, and keeps them all waiting."""

from collections import deque
from collections.abc import Mapping
from statistics import median

_WINDOW = 20
_TIMES_AS_LONG = 2.0
_LEAST_SECONDS = 0.01


class Stragglers:
    """Compares what processes spend on their own on each step.

    A step takes as long for one as for another, since they wait for each other; what
    differs is how much of it they work. One is a straggler if that is at least twice
    as much as for the others, in the middle of their last reports.
    """

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts
        self._seconds: dict[int, deque[float]] = {
            rank: deque(maxlen=_WINDOW) for rank in hosts
        }
        self._named: set[int] = set()

    def hear(self, rank: int, seconds: float) -> str | None:
        """Takes a report in; returns a line about the process if one is due."""
        own = self._seconds[rank]
        own.append(seconds)
        others = [median(s) for r, s in self._seconds.items() if r != rank and s]
        if rank in self._named or len(own) < _WINDOW or not others:
            return None
        usual, here = median(others), median(own)
        if here < _TIMES_AS_LONG * usual or here - usual < _LEAST_SECONDS:
            return None
        self._named.add(rank)
        return (
            f"rank {rank} on {self._hosts[rank]} is slower than the others, which wait "
            f"for it: {here:.3g} s of its own for each step, they need {usual:.3g} s"
        )
