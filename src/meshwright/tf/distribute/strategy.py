"""`tf.distribute.Strategy`: TensorFlow's names over a strategy of Meshwright's."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from meshwright.cluster.identity import process_count, process_index
from meshwright.devices.runtime import name_of
from meshwright.errors import PerReplicaError
from meshwright.strategies.strategy import Strategy as MeshStrategy
from meshwright.tf.absent import refuse
from meshwright.tf.distribute.contexts import (
    current_replica,
    current_strategy,
    entering,
    refuse_mixing,
)
from meshwright.tf.distribute.inputs import (
    DistributedDataset,
    InputContext,
    InputOptions,
    check_options,
    make_dataset,
)
from meshwright.tf.distribute.replica_context import parse_op
from meshwright.tf.distribute.replicas import Replica, run_on_replicas
from meshwright.tf.distribute.updates import copies
from meshwright.tf.distribute.values import (
    PerReplica,
    is_leaf,
    map_per_replica,
    to_mesh,
)
from meshwright.tf.errors import InvalidArgumentError
from meshwright.tf.tensors import Tensor, full_name, raw, wrap

import jax
import jax.numpy as jnp

_WAYS = {
    "make_dataset_iterator": "strategy.experimental_distribute_dataset",
    "experimental_make_numpy_dataset": "strategy.distribute_dataset(arrays, "
    "batch_size)",
    "cluster_resolver": "meshwright train --hosts a,b script.py",
}


class Strategy:
    """How variables and work are spread over devices.

    Attributes:
        meshwright: The strategy of Meshwright's that does the work.
    """

    def __init__(self, meshwright: MeshStrategy | None) -> None:
        self._meshwright = meshwright

    @property
    def meshwright(self) -> MeshStrategy:
        """The strategy of Meshwright's that does the work."""
        assert self._meshwright is not None, "the default strategy has none"
        return self._meshwright

    @property
    def num_replicas_in_sync(self) -> int:
        """Into how many parts a batch is split."""
        return self.meshwright.num_replicas

    @property
    def num_local_replicas(self) -> int:
        """How many of the replicas this process has."""
        return len(self.make_replicas())

    @property
    def num_processes(self) -> int:
        """How many processes work together."""
        return process_count()

    @property
    def process_index(self) -> int:
        """The number of this one."""
        return process_index()

    @property
    def extended(self) -> "Extended":
        """Details of the strategy."""
        return Extended(self)

    def variable_kind(self, mirrored: type) -> type:
        """The class of variables that are made in the scope."""
        return mirrored

    def name_of(self, device: jax.Device) -> str:
        """Meshwright's name of one of the devices."""
        return name_of(device)

    def make_replicas(self) -> list[Replica]:
        """The replicas of this process, ready to run."""
        own = jax.process_index()
        devices = enumerate(self.meshwright.mesh.devices.flat)
        here = [(i, d) for i, d in devices if d.process_index == own]
        return [
            Replica(self, position, index, device)
            for position, (index, device) in enumerate(here)
        ]

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Variables and models that are made inside belong to the strategy."""
        here = current_strategy()
        if here is not None and here is not self:
            refuse_mixing(self)
        opened = self.meshwright.scope() if here is None else contextlib.nullcontext()
        with entering(self, current_replica()), opened:
            yield self

    def across(self, function: Callable[[list[Any]], Any], offers: list[Any]) -> Any:
        """Does something across replicas, on behalf of them."""
        with entering(self, None):
            return function(offers)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls a function on every replica, with that replica's part of the arguments.

        >>> from meshwright import tf
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> context = tf.distribute.get_replica_context
        >>> strategy.run(lambda: context().replica_id_in_sync_group)
        PerReplica:{
          0: <tf.Tensor: shape=(), dtype=int32, numpy=0>,
          1: <tf.Tensor: shape=(), dtype=int32, numpy=1>
        }
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args)}"
            )
        here = current_strategy()
        if here is not None and here is not self:
            refuse_mixing(self)
        if current_replica() is not None:
            raise RuntimeError(
                "strategy.run was called inside of a function that it runs. Return the "
                "values, and call it again with them."
            )
        return run_on_replicas(self, fn, tuple(args), dict(kwargs or {}))

    def reduce(self, reduce_op: Any, value: Any, axis: int | None) -> Any:
        """One value of those of all replicas; every sample counts once.

        Arguments:
            reduce_op: `tf.distribute.ReduceOp.SUM`, `MEAN`, or their names.
            value: What `run` returned.
            axis: A dim along which is reduced too, or None.
        """
        op = parse_op(reduce_op)
        if current_replica() is not None:
            raise RuntimeError(
                "Method requires being in cross-replica context, use "
                "get_replica_context().merge_call()"
            )
        return jax.tree.map(
            lambda leaf: self._reduce_one(op, leaf, axis), value, is_leaf=is_leaf
        )

    def _reduce_one(self, op: str, value: Any, axis: int | None) -> Any:
        value = self._as_values(value)
        if not isinstance(value, PerReplica):
            return self._reduce_plain(op, value, axis)
        if len(value.values) == 1 and self.num_replicas_in_sync == 1:
            return self._reduce_plain(op, value.values[0], axis)
        try:
            reduced = self.meshwright.reduce(
                op, to_mesh(value, self.meshwright.mesh), axis
            )
        except PerReplicaError as error:
            raise InvalidArgumentError(None, None, str(error)) from error
        return self._here(reduced)

    def _as_values(self, value: Any) -> Any:
        """The copies of a variable of the strategy; anything else as it is."""
        if getattr(value, "distribute_strategy", None) is not self:
            is_one_of_many = self.num_local_replicas == 1 < self.num_replicas_in_sync
            if is_one_of_many and not isinstance(value, PerReplica):
                return PerReplica([value])  # the others are in other processes
            return value
        if value.synchronization == "on_read":
            return value.read_value()
        return PerReplica(copies(value))

    def _reduce_plain(self, op: str, value: Any, axis: int | None) -> Any:
        if op == "SUM" and self.num_replicas_in_sync > 1:
            raise ValueError(
                f"A non-DistributedValues value {value!s} cannot be reduced with the "
                "given "
                f"reduce op ReduceOp.{op}."
            )
        if axis is None:
            return wrap(raw(value))
        reduce = jnp.sum if op == "SUM" else jnp.mean
        return wrap(reduce(jnp.asarray(raw(value)), axis))

    def _here(self, value: jax.Array) -> Tensor:
        """The copy that lies on the first device of this process."""
        shards = sorted(value.addressable_shards, key=lambda s: s.device.id)
        return Tensor(shards[0].data)

    def gather(self, value: Any, axis: int) -> Any:
        """What all replicas have, one behind the other along a dim."""
        if current_replica() is not None:
            raise RuntimeError(
                "tf.distribute.Strategy.gather method requires cross-replica "
                "context, use "
                "get_replica_context().all_gather() instead"
            )

        def gather(leaf: PerReplica) -> Any:
            try:
                mesh_value = to_mesh(leaf, self.meshwright.mesh)
                return self._here(self.meshwright.gather(mesh_value, axis))
            except PerReplicaError as error:
                raise InvalidArgumentError(None, None, str(error)) from error

        return map_per_replica(gather, value)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas."""
        if isinstance(value, PerReplica):
            return value.values
        if getattr(value, "distribute_strategy", None) is self:
            return tuple(getattr(value, "values", (value,)))
        return (value,)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Batches of a dataset of global batches, each split over the replicas."""
        check_options(options)
        return DistributedDataset(dataset, self)

    def split(self, batches: Any) -> Iterator[Any]:
        """Batches as Meshwright splits them."""
        return iter(self.meshwright.distribute_dataset(batches))

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Batches of a dataset that a function makes, one for each replica in turn."""
        return make_dataset(dataset_fn, self)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[["ValueContext"], Any]
    ) -> Any:
        """What a function gives for each replica."""
        replicas = self.make_replicas()
        values = [
            value_fn(ValueContext(replica.index, self.num_replicas_in_sync))
            for replica in replicas
        ]
        placed = [
            Tensor(jax.device_put(raw(value), replica.device))
            if isinstance(raw(value), jax.Array)
            else value
            for value, replica in zip(values, replicas, strict=True)
        ]
        return PerReplica(placed) if len(placed) > 1 else placed[0]

    def __getattr__(self, name: str) -> Any:
        return refuse(f"tf.distribute.{type(self).__name__}", _WAYS)(name)


class ValueContext:
    """What a function that makes a replica's value is told.

    >>> ValueContext(1, 2).replica_id_in_sync_group
    1
    """

    def __init__(self, index: int, count: int) -> None:
        self.replica_id_in_sync_group = index
        self.num_replicas_in_sync = count


class Extended:
    """Details of a strategy, under `strategy.extended`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that compute."""
        return tuple(full_name(name) for name in self._strategy.meshwright.devices)

    parameter_devices = worker_devices

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether a variable belongs to the strategy."""
        return getattr(variable, "distribute_strategy", None) is self._strategy

    def __getattr__(self, name: str) -> Any:
        return refuse("tf.distribute.Strategy.extended", {})(name)


class DefaultStrategy(Strategy):
    """What holds outside of all strategies: one replica."""

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def num_replicas_in_sync(self) -> int:
        """One."""
        return 1

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Nothing changes inside."""
        yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls the function."""
        return fn(*args, **dict(kwargs or {}))

    def gather(self, value: Any, axis: int) -> Any:
        """The value."""
        return value

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """The dataset."""
        return dataset


@cache
def default_strategy() -> Strategy:
    """The strategy outside of all strategies."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy that holds here.

    >>> from meshwright import tf
    >>> tf.distribute.get_strategy().num_replicas_in_sync
    1
    """
    return current_strategy() or default_strategy()
