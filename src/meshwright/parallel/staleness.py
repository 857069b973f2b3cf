"""How old gradients may be, and who waits so that none is older.

The weights have a version: the number of updates that they have had. A worker pulls
them at some version, and its gradients are applied at a later one. The difference is
their staleness.
"""

from collections import Counter
from collections.abc import Hashable


class StalenessBound:
    """Says who may pull and whose gradients may be applied, so that none is too old.

    A worker pulls only if its gradients can still come in time when all that compute
    already are served before it. Gradients are applied in the order in which they
    arrive, unless another worker could then not come in time any more: they wait until
    that one is served. Whoever has the least time left can always be served, so
    somebody always goes on.

    Arguments:
        most: The largest staleness.

    Attributes:
        most: It may be changed while nobody computes.
        version: Updates so far.

    >>> bound = StalenessBound(most=1)
    >>> bound.pull("slow")
    >>> bound.pull("fast")
    >>> bound.apply("fast")
    0
    >>> bound.pull("fast")
    >>> bound.may_apply("fast")  # those of the slow one would become too old
    False
    >>> bound.apply("slow"), bound.apply("fast")
    (1, 1)
    """

    def __init__(self, most: int) -> None:
        self.version = 0
        self.most = most
        self._pulled: dict[Hashable, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nobody computes."""
        return not self._pulled

    def may_pull(self) -> bool:
        """Whether one more worker can compute and come in time."""
        return len(self._pulled) <= self.most

    def pull(self, worker: Hashable) -> None:
        """A worker takes the weights of now."""
        assert self.may_pull(), worker
        assert worker not in self._pulled, worker
        self._pulled[worker] = self.version

    def may_apply(self, worker: Hashable) -> bool:
        """Whether all others come in time if this worker's gradients are next."""
        after = self.version + 1
        left = sorted(
            self.most - (after - version)
            for other, version in self._pulled.items()
            if other != worker
        )
        return all(turn <= updates for turn, updates in enumerate(left))

    def apply(self, worker: Hashable) -> int:
        """Counts an update by a worker; returns how old its gradients were."""
        assert self.may_apply(worker), worker
        staleness = self.version - self._pulled.pop(worker)
        self.version += 1
        return staleness

    def withdraw(self, worker: Hashable) -> None:
        """Forgets what a worker computes."""
        self._pulled.pop(worker, None)


class Staleness(Counter[int]):
    """How many updates were how old; it prints as a histogram.

    >>> print(Staleness({0: 2, 1: 6, 3: 2}))
    staleness  updates
            0        2  20.0 %  ######
            1        6  60.0 %  ##################
            2        0   0.0 %
            3        2  20.0 %  ######
    10 updates, staleness 1.2 on average and 3 at the most
    """

    @property
    def mean(self) -> float:
        """The average."""
        return sum(age * number for age, number in self.items()) / (self.total() or 1)

    @property
    def largest(self) -> int:
        """The largest that there was; 0 if there was no update."""
        return max((age for age, number in self.items() if number), default=0)

    def __str__(self) -> str:
        total = self.total()
        if not total:
            return "no update yet"
        lines = ["staleness  updates"]
        for age in range(self.largest + 1):
            share = self[age] / total
            bar = "#" * round(30 * share)
            line = f"{age:9}  {self[age]:7}  {100 * share:4.1f} %  {bar}"
            lines.append(line.rstrip())
        lines.append(
            f"{total} updates, staleness {self.mean:.2g} on average and {self.largest} "
            "at the most"
        )
        return "\n".join(lines)
