"""Traces what the tests of pipelines cut: steps of Keras models, small functions."""

from collections.abc import Callable, Sequence
from typing import Any

from meshwright.models.parts import Part, as_function
from meshwright.models.stages import Input, Role, StagedProgram
from meshwright.train.mesh_step import training_state
from meshwright.train.staged_steps import TRAIN, StagedStep, trace_step, training_of

import jax
from jax.extend.core import ClosedJaxpr, Literal


def traced_training(model: Any, x: Any, y: Any) -> StagedStep:
    """The forward pass of a compiled model's training step, with loss and metrics."""
    batch = (x, y)
    given = training_state(model, batch), batch
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    return trace_step(training_of(model), TRAIN, ("state", "metric"), *shapes)


def staged_function(
    function: Callable[..., Any],
    roles: Sequence[Role],
    args: Sequence[Any],
    updates: dict[int, int] | None = None,
) -> StagedProgram:
    """A function as a step whose first output is its loss.

    Arguments:
        function: The function.
        roles: Those of its arguments.
        args: Arguments to trace it with.
        updates: Outputs that are the next values of inputs, both by number.
    """
    program = jax.make_jaxpr(function)(*args)
    found: list[Input] = []
    for role in roles:
        found.append(Input(role, sum(each.role == role for each in found)))
    known = updates or {}
    nexts = tuple(known.get(n) for n in range(len(program.jaxpr.outvars)))
    return StagedProgram(program, tuple(found), nexts, starts=(0,))


def run_parts(program: ClosedJaxpr, parts: Sequence[Part], args: Any) -> list[Any]:
    """The outputs of a program whose parts run one after the other.

    A part knows nothing but its arguments and what earlier parts have sent.
    """
    jaxpr = program.jaxpr
    passed: dict[Any, Any] = {}
    outputs: dict[int, Any] = {}
    for part in parts:
        inputs = [*(jaxpr.invars[n] for n in part.arguments), *part.received]
        made = [*part.sent, *(jaxpr.outvars[n] for n in part.results)]
        function = as_function(program, part, inputs, made)
        given = [args[n] for n in part.arguments]
        values = function(*given, *(passed[v] for v in part.received))
        number = len(part.sent)
        passed |= dict(zip(part.sent, values[:number], strict=True))
        outputs |= dict(zip(part.results, values[number:], strict=True))
    # Some outputs are inputs, or numbers; no part makes them.
    known = dict(zip(jaxpr.invars, args, strict=True))
    return [
        outputs[n] if n in outputs else v.val if isinstance(v, Literal) else known[v]
        for n, v in enumerate(jaxpr.outvars)
    ]
