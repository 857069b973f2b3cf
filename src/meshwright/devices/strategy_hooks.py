"""Where a strategy takes part in what Keras does; `keras_hooks` asks here.

Strategies live in rooms above this one, so they leave functions: for what is made in
their scope, for the tracing of a step, for a model's forward pass, and for its data.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

STEP_MAKER = "_meshwright_step_maker"
"""The attribute of a model that makes its steps."""

INTAKE_MAKER = "_meshwright_intake_maker"
"""The attribute of a model that makes what its data goes through."""


STAGE_MARK = "_meshwright_on_a_stage"
"""The attribute of a variable with the layout that a pipeline gave it."""

PLACED_MARK = "_meshwright_fixed"
"""The attribute of a variable whose model trains on several devices, put there by hand.
"""


class ScopeHooks(NamedTuple):
    """What a strategy does in its scope."""

    notice: Callable[[Any], None]
    """Called with a layer or operation that was made."""
    choose_layout: Callable[[Any], jax.sharding.Sharding | None]
    """Chooses the sharding of a variable that is being made."""


class TraceHooks(NamedTuple):
    """What a strategy does while a step is traced."""

    keep_output: Callable[[Any], Any]
    """Called with every tensor that a layer puts out; its result takes its place."""
    keep_cast: Callable[[Any, Any], Any]
    """Called with a variable that was cast for a layer, and its value."""
    convolve_groups: Callable[[Callable[[Any, Any], Any], Any, Any], Any]
    """Called with a grouped convolution, its inputs and its kernel; computes it."""
    num_devices: int
    """How many devices compute the step together."""


class LaidAside(NamedTuple):
    """Takes the place of a batch where an interrupted epoch goes on.

    Nothing is computed for it. Keras wants the logs of a step of every epoch, also if
    no step is left.
    """

    logs: Any


ForwardPass = Callable[..., Any]
"""Called with a model's own stateless call and its arguments, in its place."""

_scopes: ContextVar[tuple[ScopeHooks, ...]] = ContextVar(
    "meshwright_scopes", default=()
)
_trace: ContextVar[TraceHooks | None] = ContextVar("meshwright_trace", default=None)
_forward_passes: ContextVar[tuple[tuple[Any, ForwardPass], ...]] = ContextVar(
    "meshwright_forward_passes", default=()
)
_reads_as_they_are: ContextVar[bool] = ContextVar(
    "meshwright_reads_as_they_are", default=False
)
_intake: ContextVar[Any] = ContextVar("meshwright_intake", default=None)


@dataclass
class Library:
    """What computes layers as a whole while a step is traced, whatever is here."""

    lstm: Callable[..., Any] | None = None
    """Takes the place of `jax.experimental.rnn.lstm`; they are loops if it is None."""
    attention: Callable[..., Any] | None = None
    """Takes the place of cuDNN's attention, of query, key, value, bias and mask."""
    wanted: set[str] = field(default_factory=set)
    """What layers would have left to a library, if there had been one."""


_library: ContextVar[Library | None] = ContextVar("meshwright_library", default=None)


@contextlib.contextmanager
def _setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def in_scope(hooks: ScopeHooks) -> contextlib.AbstractContextManager[None]:
    """Lets a strategy see what is made inside of its scope."""
    return _setting(_scopes, (*_scopes.get(), hooks))


def scope_hooks() -> tuple[ScopeHooks, ...]:
    """Those of the scopes that are open here, outermost first."""
    return _scopes.get()


def tracing(hooks: TraceHooks) -> contextlib.AbstractContextManager[None]:
    """Lets a strategy take part in the tracing of a step."""
    return _setting(_trace, hooks)


def trace_hooks() -> TraceHooks | None:
    """Those of the step that is being traced here, if there is one."""
    return _trace.get()


def tracing_with(library: Library) -> contextlib.AbstractContextManager[None]:
    """Traces layers without regard to the libraries that are here."""
    return _setting(_library, library)


def current_library() -> Library | None:
    """What computes layers as a whole; None if that is what is here."""
    return _library.get()


def replacing_forward_pass(
    model: Any, forward: ForwardPass
) -> contextlib.AbstractContextManager[None]:
    """Runs a model's stateless calls through `forward`, while a step is traced."""
    return _setting(_forward_passes, (*_forward_passes.get(), (model, forward)))


def run_forward_pass(
    call: Callable[..., Any], model: Any, *args: Any, **kw: Any
) -> Any:
    """A stateless call of a model, or what replaces it here, innermost first."""
    passes = _forward_passes.get()
    if not passes or passes[-1][0] is not model:
        return call(model, *args, **kw)
    with _setting(_forward_passes, passes[:-1]):
        return passes[-1][1](call, model, *args, **kw)


class _PlacedSteps:
    make: Callable[[Any, Any], Any] | None = None


def set_maker_of_placed_steps(make: Callable[[Any, Any], Any]) -> None:
    """Says who makes the steps of models whose layers live on several devices."""
    _PlacedSteps.make = make


def make_placed_step(model: Any, step: Any) -> Any:
    """A step of a model whose layers live on several devices."""
    assert _PlacedSteps.make is not None, "set by strategies.by_hand"
    return _PlacedSteps.make(model, step)


def reading_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Lets a trainer read variables without a thought for eager work."""
    return _setting(_reads_as_they_are, True)


def reads_as_they_are() -> bool:
    """Whether variables are read by a trainer."""
    return _reads_as_they_are.get()


def taking_data_through(intake: Any) -> contextlib.AbstractContextManager[None]:
    """Takes the batches of a run through an intake, or, with None, as Keras does."""
    return _setting(_intake, intake)


def current_intake() -> Any:
    """What the batches of the innermost run go through; None if that is Keras' own."""
    return _intake.get()
