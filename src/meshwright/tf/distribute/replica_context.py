"""What code can ask while it runs as a replica, and outside of it."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright.tf.distribute.contexts import current_replica, current_strategy
from meshwright.tf.distribute.values import PerReplica, is_leaf, regroup
from meshwright.tf.operations import constant
from meshwright.tf.tensors import Tensor

import jax

if TYPE_CHECKING:
    from meshwright.tf.distribute.replicas import Replica
    from meshwright.tf.distribute.strategy import Strategy


class ReduceOp(enum.Enum):
    """How values of replicas become one.

    >>> ReduceOp.SUM.value
    'SUM'
    """

    SUM = "SUM"
    MEAN = "MEAN"


def parse_op(op: Any) -> str:
    """Reads "SUM", "sum" or the enumeration's.

    >>> parse_op("mean")
    'MEAN'
    """
    name = op.value if isinstance(op, ReduceOp) else op
    if isinstance(name, str) and name.upper() in ReduceOp.__members__:
        return name.upper()
    raise ValueError(f"{op!r} is not a valid ReduceOp")


class ReplicaContext:
    """What `tf.distribute.get_replica_context` returns.

    >>> from meshwright import tf
    >>> tf.distribute.get_replica_context().num_replicas_in_sync
    1
    """

    def __init__(self, strategy: "Strategy", replica: "Replica | None") -> None:
        self.strategy = strategy
        self._replica = replica

    @property
    def replica_id_in_sync_group(self) -> Tensor:
        """The replica's number, from 0."""
        return constant(0 if self._replica is None else self._replica.index)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self.strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of the replica."""
        if self._replica is None:
            return ()
        return (self.strategy.name_of(self._replica.device),)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """The sum or mean over the replicas, which all get."""
        op = parse_op(reduce_op)
        return self._across(
            lambda all_of: self.strategy.reduce(op, all_of, None), value
        )

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """What all replicas have, one behind the other."""
        return self._across(lambda all_of: self.strategy.gather(all_of, axis), value)

    def _across(self, compute: Callable[[Any], Any], value: Any) -> Any:
        if self._replica is None:
            return value
        return self._replica.meet(lambda offers: compute(together(offers)), value)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function once, with the strategy and what all replicas passed."""
        given = tuple(args), dict(kwargs or {})

        def merge(offers: list[Any]) -> Any:
            all_args, all_kwargs = regroup(offers)
            return merge_fn(self.strategy, *all_args, **all_kwargs)

        if self._replica is None:
            return merge([given])
        return self._replica.meet(merge, given)

    def __enter__(self) -> "ReplicaContext":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def together(offers: list[Any]) -> Any:
    """One value per replica, also if all are the same object."""
    flat = [jax.tree.flatten(offer, is_leaf=is_leaf) for offer in offers]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return flat[0][1].unflatten([PerReplica(column) for column in columns])


def get_replica_context() -> ReplicaContext | None:
    """The replica that runs here; None across replicas, the default one outside."""
    from meshwright.tf.distribute.strategy import default_strategy

    replica = current_replica()
    if replica is not None:
        return ReplicaContext(replica.strategy, replica)
    if current_strategy() is not None:
        return None
    return ReplicaContext(default_strategy(), None)


def in_cross_replica_context() -> bool:
    """Whether the code is in the scope of a strategy and not in a replica."""
    return current_strategy() is not None and current_replica() is None


def has_strategy() -> bool:
    """Whether the code is in the scope of a strategy."""
    return current_strategy() is not None
