"""What reading and assigning a variable means: for one replica, and across them.

A variable has one array over the devices of its strategy as long as its copies are
equal, and a list of arrays as soon as they are not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.devices.keras_hooks import current_stateless_scope
from meshwright.tf.distribute.contexts import (
    current_replica,
    current_strategy,
    refuse_mixing,
)
from meshwright.tf.distribute.values import PerReplica, regroup
from meshwright.tf.tensors import raw, together

import jax
import jax.numpy as jnp
import keras
import numpy as np

if TYPE_CHECKING:
    from meshwright.tf.distribute.replicas import Replica
    from meshwright.tf.distribute.strategy import Strategy

_COPIES = "_meshwright_copies"
_FIRST = "_meshwright_first_copy"


class ReplicaScope(keras.StatelessScope):
    """Lets Keras' variables be those of one replica."""

    def __init__(self, replica: "Replica") -> None:
        super().__init__()
        self._replica = replica

    def get_current_value(self, variable: Any) -> Any:
        """The replica's value."""
        return _value_in(self._replica, variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keeps what is assigned by Keras for the end of the run."""
        variable, value = update
        replica = self._replica
        if not _is_shared(variable, replica):
            variable._direct_assign(value)
            replica.values.pop(id(variable), None)
            return
        replica.values[id(variable)] = variable, value
        replica.written[id(variable)] = variable, value


def read(variable: Any) -> Any:
    """The value that code sees here."""
    replica = current_replica()
    if replica is not None:
        return _value_in(replica, variable)
    if _is_read_together(variable):
        return _read_across(variable)
    return _whole(variable)


def _whole(variable: Any) -> Any:
    """The value on all devices of the strategy; the first one's if they differ."""
    has_copies = getattr(variable, _COPIES, None) is not None
    return copies(variable)[0] if has_copies else variable._value


def local_value(variable: Any) -> Any:
    """The copy that lies here: the replica's, or the first one."""
    replica = current_replica()
    if replica is not None:
        return _value_in(replica, variable)
    return copies(variable)[0]


def _value_in(replica: "Replica", variable: Any) -> Any:
    """A replica's value; always the same array until it is assigned."""
    if id(variable) not in replica.values:
        replica.values[id(variable)] = variable, _find_value(replica, variable)
    return replica.values[id(variable)][1]


def _find_value(replica: "Replica", variable: Any) -> Any:
    own = getattr(variable, _COPIES, None)
    if own is not None:
        return own[replica.position]
    value = variable._value
    if value is None or isinstance(value, jax.core.Tracer):
        return value
    for shard in value.addressable_shards:
        if shard.device == replica.device and shard.data.shape == value.shape:
            return shard.data
    return jax.device_put(value, replica.device)


def copies(variable: Any) -> list[Any]:
    """The arrays of a variable on the devices of this process."""
    own = getattr(variable, _COPIES, None)
    if own is not None:
        return list(own)
    value = variable._value
    if isinstance(value, jax.core.Tracer) or len(value.sharding.device_set) == 1:
        return [value]
    kept = getattr(variable, _FIRST, None)
    if kept is None or kept[0] is not value:
        # The same arrays every time: a tape knows them by their identity.
        shards = sorted(value.addressable_shards, key=lambda s: s.device.id)
        kept = value, [shard.data for shard in shards]
        object.__setattr__(variable, _FIRST, kept)
    return list(kept[1])


def _is_shared(variable: Any, replica: "Replica") -> bool:
    """Whether replicas have copies of a variable, not one variable together."""
    strategy = replica.strategy
    if hasattr(variable, "distribute_strategy"):
        owner = variable.distribute_strategy
        if owner is not None and owner is not strategy:
            refuse_mixing(owner)
        return owner is strategy
    value = variable._value
    return value is not None and (
        strategy.num_replicas_in_sync == 1
        or len(value.sharding.device_set) == strategy.num_replicas_in_sync
    )


def _is_read_together(variable: Any) -> bool:
    has_strategy = getattr(variable, "distribute_strategy", None) is not None
    return has_strategy and variable.synchronization == "on_read"


def _read_across(variable: Any) -> Any:
    how = variable.aggregation
    if how == "none":
        _refuse_no_aggregation()
    strategy = variable.distribute_strategy
    own = copies(variable)
    if how == "only_first_replica" or strategy.num_replicas_in_sync == 1:
        return own[0]
    return raw(strategy.reduce(how.upper(), PerReplica(own), axis=None))


def _refuse_no_aggregation() -> None:
    raise ValueError(
        "Could not convert from `tf.VariableAggregation` VariableAggregationV2.NONE to "
        "`tf.distribute.ReduceOp` type"
    )


def assign(variable: Any, value: Any, method: str) -> None:
    """Assigns, adds or subtracts, as it is meant here."""
    replica = current_replica()
    if replica is None and current_stateless_scope() is not None:
        combined = _combine(keras.Variable.value.fget(variable), value, method)
        keras.Variable.assign(variable, combined)
    elif replica is None:
        _assign_across(variable, value, method)
    elif not _is_shared(variable, replica):
        new = _combine(_value_in(replica, variable), value, method)
        write_all(variable, new)
        replica.values.pop(id(variable), None)
    elif variable.synchronization == "on_read":
        _write_own(replica, variable, value, method)
    elif variable.aggregation != "none":
        replica.meet(lambda offers: _write_together(variable, offers, method), value)
        replica.values.pop(id(variable), None)
    elif type(variable).__name__ == "AggregatingVariable":
        raise ValueError(
            "You must specify an aggregation method to update a AggregatingVariable in "
            "Replica Context. You can do so by passing an explicit value for argument "
            "`aggregation` to tf.Variable(..)."
        )
    else:
        _write_own(replica, variable, value, method)


def _combine(old: Any, value: Any, method: str) -> Any:
    if isinstance(value, PerReplica):
        raise TypeError("A value per replica cannot be assigned as one value.")
    old, value = together(old, value)
    if method == "assign":
        new = jnp.asarray(value)
    else:
        new = (
            jnp.add(old, value) if method == "assign_add" else jnp.subtract(old, value)
        )
    if new.shape != old.shape:
        raise ValueError(
            f"Cannot assign value to variable: Shape mismatch. The variable shape "
            f"{tuple(old.shape)}, and the assigned value shape {tuple(new.shape)} are "
            "incompatible."
        )
    return new.astype(old.dtype)


def _write_own(replica: "Replica", variable: Any, value: Any, method: str) -> None:
    own = copies(variable)
    if len(own) < replica.strategy.num_local_replicas:
        own = [_find_value(replica, variable)] * replica.strategy.num_local_replicas
    new = _combine(_value_in(replica, variable), value, method)
    own[replica.position] = new
    object.__setattr__(variable, _COPIES, own)
    replica.values[id(variable)] = variable, new
    replica.parted[id(variable)] = variable


def _write_together(variable: Any, offers: list[Any], method: str) -> None:
    strategy, how = variable.distribute_strategy, variable.aggregation
    value = regroup([raw(offer) for offer in offers])
    if how == "only_first_replica":
        value = raw(offers[0])
    elif isinstance(value, PerReplica) or how == "sum":
        value = strategy.reduce(how.upper(), value, axis=None)
    write_all(variable, _combine(copies(variable)[0], value, method))


def _assign_across(variable: Any, value: Any, method: str) -> None:
    strategy = getattr(variable, "distribute_strategy", None)
    here = current_strategy()
    if strategy is not None and here is not None and here is not strategy:
        refuse_mixing(strategy)
    if not _is_read_together(variable):
        write_all(variable, _combine(_whole(variable), value, method))
        return
    assert strategy is not None
    if variable.aggregation == "none":
        _refuse_no_aggregation()
    if variable.aggregation != "sum":
        old = None if method == "assign" else _read_across(variable)
        base = copies(variable)[0] if old is None else old
        write_all(variable, _combine(base, value, method))
    elif method == "assign":
        share = _combine(copies(variable)[0], value, method)
        write_all(variable, share / strategy.num_replicas_in_sync)
    else:
        raise ValueError(
            f"SyncOnReadVariable does not support `{method}` in cross-replica context "
            "when aggregation is set to `tf.VariableAggregation.SUM`."
        )


def write_all(variable: Any, value: Any) -> None:
    """Makes a value that of all copies."""
    object.__setattr__(variable, _COPIES, None)
    object.__setattr__(variable, _FIRST, None)
    old = variable._value
    value = jnp.asarray(value, old.dtype)
    if len(old.sharding.device_set) > 1:
        value = jax.device_put(value, old.sharding)
    variable._direct_assign(value)


def settle(strategy: "Strategy", replicas: Sequence["Replica"]) -> None:
    """Makes one value of what Keras' variables became on each replica.

    Metrics are sums; moving statistics are means, as they were in Keras 2; what
    optimizers change is equal on all.
    """
    for variable in {k: v for r in replicas for k, v in r.parted.items()}.values():
        if variable.synchronization != "on_read":
            _keep_first(variable)
    changed = {key: v for r in replicas for key, (v, _) in r.written.items()}
    for key, variable in changed.items():
        old = copies(variable)[0]
        values = [r.written[key][1] if key in r.written else old for r in replicas]
        write_all(variable, _settled(strategy, variable, values, old))


def _keep_first(variable: Any) -> None:
    """Makes the first copy what `fit` sees; forgets the copies if all are equal."""
    own = copies(variable)
    first = np.asarray(own[0])
    write_all(variable, own[0])
    if any(not np.array_equal(first, np.asarray(other)) for other in own[1:]):
        object.__setattr__(variable, _COPIES, own)


def _settled(
    strategy: "Strategy", variable: Any, values: Sequence[Any], old: Any
) -> Any:
    if strategy.num_replicas_in_sync == 1:
        return values[0]
    if variable.aggregation == "sum" or variable.synchronization == "on_read":
        total = raw(strategy.reduce("SUM", PerReplica(values), axis=None))
        return total - (strategy.num_replicas_in_sync - 1) * jax.device_put(
            old, next(iter(total.devices()))
        )
    is_statistic = not variable.trainable and jnp.issubdtype(old.dtype, jnp.floating)
    if is_statistic and variable.aggregation in ("none", "mean"):
        return raw(strategy.reduce("MEAN", PerReplica(values), axis=None))
    return values[0]
