"""Which strategy holds here, and whether the code runs as one of its replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from meshwright.tf.distribute.replicas import Replica
    from meshwright.tf.distribute.strategy import Strategy

_strategies: ContextVar[tuple["Strategy", ...]] = ContextVar(
    "meshwright_tf_strategies", default=()
)
_replica: ContextVar[Optional["Replica"]] = ContextVar(
    "meshwright_tf_replica", default=None
)


def current_strategy() -> Optional["Strategy"]:
    """The strategy of the innermost scope or replica; None outside of all."""
    found = _strategies.get()
    return found[-1] if found else None


def current_replica() -> Optional["Replica"]:
    """The replica that the code runs as, if it does."""
    return _replica.get()


@contextmanager
def entering(strategy: "Strategy", replica: Optional["Replica"]) -> Iterator[None]:
    """Inside, a strategy holds, and the code runs as a replica or across all."""
    if any(other is not strategy for other in _strategies.get()):
        refuse_mixing(strategy)
    before = _strategies.set((*_strategies.get(), strategy)), _replica.set(replica)
    try:
        yield
    finally:
        _strategies.reset(before[0])
        _replica.reset(before[1])


def refuse_mixing(other: Any) -> None:
    """Raises because two strategies meet."""
    raise RuntimeError(
        "Mixing different tf.distribute.Strategy objects: "
        f"{current_strategy()!r} is not {other!r}"
    )
