"""What holds while a function runs as one replica among others."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

from meshwright.errors import MeshwrightError, StrategyError

import jax

_axes: ContextVar[tuple[str, ...] | None] = ContextVar(
    "meshwright_replica_axes", default=None
)


@contextmanager
def as_one_replica(axes: tuple[str, ...]) -> Iterator[None]:
    """Inside, code runs as one of the replicas along some axes of a mesh.

    Variables of Keras' can be neither read nor assigned: the program of a replica is
    compiled once, so it would go on with the values of its first run.
    """
    token = _axes.set(axes)
    scope = _closed_scope()() if "keras" in sys.modules else nullcontext()
    try:
        with scope:
            yield
    except Exception:
        # Keras turns what is raised inside of a layer into an error of its own.
        refusal = getattr(scope, "refusal", None)
        if refusal is not None:
            raise refusal from None
        raise
    finally:
        _axes.reset(token)


def replica_id() -> jax.Array:
    """See `Strategy.replica_id`."""
    axes = _axes.get()
    if axes is None:
        raise StrategyError(
            "replica_id was called outside of a function that strategy.run runs.",
            "Only there a replica has a number.",
            "Call it inside of fn.",
        )
    return jax.lax.axis_index(axes)


def refuse_inside_replica(name: str) -> None:
    """Raises if the caller is a function that runs as one replica."""
    if _axes.get() is not None:
        raise StrategyError(
            f"{name} was called inside of a function that strategy.run runs.",
            "There is only one replica's part there; this is for the values of all.",
            "Return the value and use it after run, or, for a sum inside of fn, use "
            "jax.lax.psum(x, strategy.replica_axes).",
        )


@cache
def _closed_scope() -> Any:
    import keras

    class ClosedScope(keras.StatelessScope):
        """A scope of Keras' in which variables that nobody mapped are refused."""

        refusal: MeshwrightError | None = None

        def get_current_value(self, variable: Any) -> Any:
            outer = self.original_scope
            value = None if outer is None else outer.get_current_value(variable)
            if value is None:
                self._refuse(
                    f"fn reads the variable {variable.path}.",
                    "A replica's program is compiled once and would not see new values "
                    "of it.",
                    "Pass values in args, and use model.stateless_call and the other "
                    "stateless methods of Keras'.",
                )
            return value

        def add_update(self, update: Any) -> None:
            self._refuse(
                f"fn assigns to the variable {update[0].path}.",
                "A replica returns values; variables belong to all replicas.",
                "Return the new value, reduce it, and assign after run.",
            )

        def _refuse(self, *beats: str) -> None:
            self.refusal = StrategyError(*beats)
            raise self.refusal

    return ClosedScope
