"""Sees every operation that JAX executes eagerly.

JAX has no public hook for this. Internally, eager execution is one interpreter among
others (`EvalTrace`), and the current one is process-wide state that is part of the key
of every compiled call. Putting a listening copy of it in its place therefore shows
every operation, also those that would otherwise be dispatched without passing through
Python, and leaves no trace once it is taken away.

While it is in place, `jax.set_mesh` believes it is called inside a transformation and
refuses; Meshwright itself never calls it.
"""

from collections.abc import Callable
from typing import Any

from meshwright.errors import UnsupportedVersionError

import jax
from jax._src import core

Listener = Callable[[str, Any], None]
"""Called with an operation's name in JAX and its first result."""


def listen(listener: Listener) -> None:
    """Calls `listener` after every eager operation, until `stop`.

    Heard are this thread and those that start from now on: JAX copies the global state
    into each thread's own as it works, out of reach of the others.
    """
    trace = _make_trace(listener)
    core.trace_ctx.set_trace(trace)
    core.trace_state.set_global(trace._weakref)
    core.trace_state_strong_ref.set_global(trace)


def stop() -> None:
    """Stops listening, in every thread."""
    core.trace_state_strong_ref.get_global().listener = None
    if hasattr(core.trace_ctx.trace, "listener"):
        core.trace_ctx.reset()
    core.trace_state.set_global(core.eval_trace._weakref)
    core.trace_state_strong_ref.set_global(core.eval_trace)


def _make_trace(listener: Listener) -> Any:
    needed = ("EvalTrace", "eval_trace", "trace_ctx", "trace_state", "eval_context")
    missing = [name for name in needed if not hasattr(core, name)]
    if missing:
        raise UnsupportedVersionError(
            f"JAX {jax.__version__} has no {', '.join(missing)} in jax._src.core.",
            "The log of eager operations listens to JAX's own interpreter.",
            "Use a JAX from 0.10 to 0.12, or leave the placement log off.",
        )

    class ListeningTrace(core.EvalTrace):
        """JAX's eager interpreter, with somebody listening."""

        def __init__(self) -> None:
            super().__init__()
            self.listener: Listener | None = listener

        def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
            with core.eval_context():
                out = core.eval_trace.process_primitive(primitive, args, params)
            if self.listener is not None:
                is_compiled = primitive.name in ("jit", "pjit")
                name = params["name"] if is_compiled else primitive.name
                several = isinstance(out, list | tuple)
                self.listener(name, (out[0] if out else None) if several else out)
            return out

        # Functions with a derivative of their own are made of operations; go inside.
        def process_custom_jvp_call(
            self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **_: Any
        ) -> Any:
            with core.set_current_trace(self):
                return fun.call_wrapped(*tracers)

        def process_custom_vjp_call(
            self,
            primitive: Any,
            fun: Any,
            fwd: Any,
            bwd: Any,
            tracers: Any,
            /,
            **_: Any,
        ) -> Any:
            with core.set_current_trace(self):
                return fun.call_wrapped(*tracers)

    return ListeningTrace()
