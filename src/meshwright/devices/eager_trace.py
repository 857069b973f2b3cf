"""Sees every operation that JAX executes eagerly.

JAX has no public hook for this. Internally, eager execution is one interpreter among
others (`EvalTrace`), and the current one is process-wide state that is part of the key
of every compiled call. Putting a listening copy of it in its place therefore shows
every operation, also those that would otherwise be dispatched without passing through
Python, and leaves no trace once it is taken away.

While it is in place, `jax.set_mesh` believes it is called inside a transformation and
refuses; Meshwright itself never calls it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UnsupportedVersionError

import jax
from jax._src import core
from jax.extend.core import jaxpr_as_fun


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that was executed, and how to do it again on other values."""

    repeat: Callable[..., Sequence[Any]]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


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


@contextlib.contextmanager
def recording() -> Iterator[list[Operation]]:
    """Keeps every operation that this thread executes inside, in order.

    Unlike `listen`, it works inside of `jax.jit` too: what is recorded there are the
    operations that are being traced.
    """
    trace = _make_recorder(core.trace_ctx.trace)
    with core.set_current_trace(trace):
        yield trace.operations


def _make_recorder(executor: Any) -> Any:
    """An interpreter that lets another one execute, and keeps what it did."""
    _check_core()

    class RecordingTrace(core.EvalTrace):
        def __init__(self) -> None:
            super().__init__()
            self.operations: list[Operation] = []

        def stage_value(self, value: Any) -> Any:
            with core.set_current_trace(executor):
                return executor.stage_value(value)

        def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
            with core.set_current_trace(executor):
                out = executor.process_primitive(primitive, args, params)

            def repeat(*values: Any) -> Sequence[Any]:
                again = primitive.bind(*values, **params)
                return again if primitive.multiple_results else (again,)

            outputs = tuple(out) if primitive.multiple_results else (out,)
            self.operations.append(Operation(repeat, tuple(args), outputs))
            return out

        # Functions with a derivative of their own can be called only once, so they are
        # kept as a program, in which the derivative stays theirs.
        def process_custom_jvp_call(
            self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any
        ) -> Any:
            def call(*values: Any) -> Any:
                trace = core.trace_ctx.trace
                return trace.process_custom_jvp_call(
                    primitive, fun, jvp, values, **params
                )

            return self._run_kept(call, tracers)

        def process_custom_vjp_call(
            self,
            primitive: Any,
            fun: Any,
            fwd: Any,
            bwd: Any,
            tracers: Any,
            /,
            **params: Any,
        ) -> Any:
            def call(*values: Any) -> Any:
                trace = core.trace_ctx.trace
                return trace.process_custom_vjp_call(
                    primitive, fun, fwd, bwd, values, **params
                )

            return self._run_kept(call, tracers)

        def _run_kept(self, call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
            repeat = jaxpr_as_fun(jax.make_jaxpr(call)(*inputs))
            with core.set_current_trace(executor):
                outputs = repeat(*inputs)
            self.operations.append(Operation(repeat, tuple(inputs), tuple(outputs)))
            return outputs

    return RecordingTrace()


def _check_core() -> None:
    needed = ("EvalTrace", "eval_trace", "trace_ctx", "trace_state", "eval_context")
    missing = [name for name in needed if not hasattr(core, name)]
    if missing:
        raise UnsupportedVersionError(
            f"JAX {jax.__version__} has no {', '.join(missing)} in jax._src.core.",
            "The log and the tape of eager operations stand on JAX's own interpreter.",
            "Use a JAX from 0.10 to 0.12, or leave the log and tf.GradientTape off.",
        )


def _make_trace(listener: Listener) -> Any:
    _check_core()

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
