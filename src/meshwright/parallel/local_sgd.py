"""Local SGD: workers that train on their own, and what they agree on now and then.

Each worker is a device with weights, other variables and an optimizer of its own, which
lie along a first dim that is split over the mesh. Functions here run inside of a
program, once on every worker.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.parallel.batch import batch_axes

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Replica = tuple[list[Any], list[Any], list[Any]]
"""What a worker has of its own: weights, other variables, optimizer state."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How a batch is shared out: in its order, in sizes that differ by at most one.

    The first workers have the larger shares. If there are fewer samples than workers
    the last ones have none.

    >>> Shares(size=10, num_workers=4).sizes
    (3, 3, 2, 2)
    >>> Shares(size=10, num_workers=4).rows.tolist()
    [[0, 1, 2], [3, 4, 5], [6, 7, 7], [8, 9, 9]]
    """

    size: int
    num_workers: int

    @property
    def larger(self) -> int:
        """Samples of a larger share."""
        return -(-self.size // self.num_workers)

    @property
    def smaller(self) -> int:
        """Samples of a smaller one, which may be none."""
        return self.size // self.num_workers

    @property
    def num_larger(self) -> int:
        """How many are larger; if all are equal, these are all."""
        return self.size % self.num_workers or self.num_workers

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each worker."""
        num_smaller = self.num_workers - self.num_larger
        return (self.larger,) * self.num_larger + (self.smaller,) * num_smaller

    @property
    def rows(self) -> "np.ndarray[Any, Any]":
        """The rows of each worker; a row that is not its own fills up a smaller share.

        A program takes arrays of one shape. What fills up is cut off in there.
        """
        ends = np.cumsum(self.sizes)
        starts = ends - np.array(self.sizes)
        rows = starts[:, None] + np.arange(self.larger)
        return np.minimum(rows, np.maximum(ends, 1)[:, None] - 1).astype(np.int32)


class Round(NamedTuple):
    """The steps since the workers agreed last."""

    steps: Any
    """How many there were."""
    samples: Any
    """How many samples a worker has had, a number for each."""
    anchor: list[Any]
    """The weights that the workers agreed on, if an outer optimizer needs them."""
    slots: list[Any]
    """The state of the outer optimizer."""


class Workers:
    """What workers do together inside of a program.

    Arguments:
        mesh: The devices; each is a worker.
        outer: The optimizer that moves the weights which all agree on, built; None to
            take the average of the workers.
        are_seeds: Which of the other variables are the state of a seed.
    """

    def __init__(self, mesh: Mesh, outer: Any, are_seeds: list[bool]) -> None:
        self.axes = batch_axes(mesh)
        self.number = mesh.size
        self._outer = outer
        self._are_seeds = are_seeds
        self.own = NamedSharding(mesh, PartitionSpec(self.axes))

    @property
    def index(self) -> Any:
        """The number of this worker."""
        return jax.lax.axis_index(self.axes)

    def agree(self, replica: Replica, round: Round) -> tuple[Replica, Round]:
        """The worker after all have agreed, and a round that begins.

        Workers count by the samples that they have had, so that shares of different
        sizes do what the whole batch would.
        """
        weights, others, slots = replica
        total = jax.lax.psum(round.samples, self.axes)
        share = round.samples / total
        floats = [_is_float(value) for value in others]
        own = [*weights, *(v for v, f in zip(others, floats, strict=True) if f)]
        # All in one collective, which the compiler makes of it.
        means = jax.lax.psum([_weighted(value, share) for value in own], self.axes)
        rounded = [m.astype(v.dtype) for m, v in zip(means, own, strict=True)]
        agreed, rest = rounded[: len(weights)], iter(rounded[len(weights) :])
        others = [next(rest) if f else v for v, f in zip(others, floats, strict=True)]
        outer_slots = round.slots
        if self._outer is not None:
            ways = [a - w for a, w in zip(round.anchor, agreed, strict=True)]
            agreed, outer_slots = self._outer.stateless_apply(
                round.slots, ways, round.anchor
            )
        anchor = agreed if self._outer is not None else []
        begun = Round(
            jnp.zeros_like(round.steps),
            jnp.zeros_like(round.samples),
            list(anchor),
            list(outer_slots),
        )
        return (list(agreed), others, slots), begun

    def agree_if(
        self, wanted: Any, replica: Replica, round: Round
    ) -> tuple[Replica, Round]:
        """The same if it is wanted, which all workers know alike."""
        return jax.lax.cond(
            wanted, self.agree, lambda replica, round: (replica, round), replica, round
        )

    def merge(self, replica: Replica) -> Replica:
        """One model of workers that have agreed.

        Optimizer state is averaged; of numbers and counters the first worker's count.
        """
        weights, others, slots = replica
        flags = zip(others, self._are_seeds, strict=True)
        return (
            weights,
            [self._merged_other(value, is_seed) for value, is_seed in flags],
            [self._merged_slot(value) for value in slots],
        )

    def spread(self, value: Any, is_seed: bool) -> Any:
        """A value of the model as one for each worker, along a first dim.

        Workers draw different numbers: the seed of worker i is that of the model + i.
        """
        every = jnp.broadcast_to(value, (self.number, *value.shape))
        if is_seed:
            every = every.at[:, 0].add(jnp.arange(self.number, dtype=value.dtype))
        return jax.lax.with_sharding_constraint(every, self.own)

    def _merged_other(self, value: Any, is_seed: bool) -> Any:
        if is_seed:
            return value.at[0].add(-self.index.astype(value.dtype))
        return value if _is_float(value) else self._of_first(value)

    def _merged_slot(self, value: Any) -> Any:
        if not (_is_float(value) and value.ndim):
            return self._of_first(value)
        mean = jax.lax.psum(_weighted(value, 1 / self.number), self.axes)
        return mean.astype(value.dtype)

    def _of_first(self, value: Any) -> Any:
        numbers = value.astype(jnp.uint8) if value.dtype == bool else value
        chosen = jnp.where(self.index == 0, numbers, jnp.zeros_like(numbers))
        return jax.lax.psum(chosen, self.axes).astype(value.dtype)


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def _weighted(value: Any, share: Any) -> Any:
    """Sums of low precision are made in float32."""
    return share * value.astype(jnp.promote_types(value.dtype, jnp.float32))
