"""What one piece of a step computes, forward and backward, as functions of arrays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.models.parts import Part, as_function, in_halves
from meshwright.models.stages import StagedProgram

import jax
from jax.extend.core import Var


@dataclass(frozen=True)
class Ends:
    """What goes into a piece and comes out of it.

    Attributes:
        weights: Numbers of the inputs of the step that gradients are wanted of.
        arguments: Numbers of its other inputs that the piece reads.
        active: Values from other pieces that pass gradients on.
        passive: Other values from other pieces.
        carried: Values through which gradients come back: those for other pieces, and
            where gradients start.
        left: Values for other pieces that have no gradients.
        results: Numbers of the outputs of the step that the piece makes.
    """

    weights: tuple[int, ...]
    arguments: tuple[int, ...]
    active: tuple[Var, ...]
    passive: tuple[Var, ...]
    carried: tuple[Var, ...]
    left: tuple[Var, ...]
    results: tuple[int, ...]

    @classmethod
    def of(cls, staged: StagedProgram, part: Part) -> "Ends":
        """Those of a part of a step."""
        needs = staged.needs_gradient
        invars, outvars = staged.program.jaxpr.invars, staged.program.jaxpr.outvars
        made = [outvars[n] for n in staged.starts if n in part.results]
        carried = dict.fromkeys(v for v in (*part.sent, *made) if v in needs)
        return cls(
            weights=tuple(n for n in part.arguments if invars[n] in needs),
            arguments=tuple(n for n in part.arguments if invars[n] not in needs),
            active=tuple(v for v in part.received if v in needs),
            passive=tuple(v for v in part.received if v not in needs),
            carried=tuple(carried),
            left=tuple(v for v in part.sent if v not in needs),
            results=part.results,
        )


class PieceFunctions:
    """The functions of one piece, which are traced when they are needed.

    Arguments:
        staged: The step.
        part: What of it the piece does.
        remat: Whether the backward pass computes the forward pass again, instead of
            keeping what it needs of it.
    """

    def __init__(self, staged: StagedProgram, part: Part, remat: bool) -> None:
        self.ends = Ends.of(staged, part)
        self._staged = staged
        self._part = part
        self._remat = remat
        self._known: list[int | None] = []

    @property
    def wanted_again(self) -> list[int]:
        """Which of the arguments of the forward pass the backward pass wants.

        It is known when the forward pass was traced, and such arguments are not kept.
        """
        return [number for number in self._known if number is not None]

    @property
    def has_backward(self) -> bool:
        """Whether gradients go through the piece."""
        ends = self.ends
        return bool(ends.carried) and bool(ends.weights or ends.active)

    @property
    def forward(self) -> Callable[[Any, Any], Any]:
        """Returns also what the backward pass wants, if there is one."""
        return self.plain if self._remat or not self.has_backward else self._keep

    @cached_property
    def halves(self) -> Any:
        """The backward pass in two: what the piece before waits for, and the rest."""
        ends, jaxpr = self.ends, self._staged.program.jaxpr
        weights = _shapes([jaxpr.invars[n] for n in ends.weights])
        arguments = _shapes([jaxpr.invars[n] for n in ends.arguments])
        given = (weights, _shapes(ends.active)), (arguments, _shapes(ends.passive))
        function = self.plain if self._remat else self._keep
        *_, kept = jax.eval_shape(function, *given)
        carried = _shapes(ends.carried)
        program = jax.make_jaxpr(self._gradients)(*given, kept, carried)
        late = len(ends.weights)
        return in_halves(program, range(late, late + len(ends.active)))

    @cached_property
    def _function(self) -> Callable[..., Any]:
        ends, jaxpr = self.ends, self._staged.program.jaxpr
        inputs = [jaxpr.invars[n] for n in (*ends.weights, *ends.arguments)]
        inputs = [*inputs, *ends.active, *ends.passive]
        outputs = [*ends.carried, *ends.left, *(jaxpr.outvars[n] for n in ends.results)]
        function = as_function(self._staged.program, self._part, inputs, outputs)

        def run(differentiated: Any, others: Any) -> Any:
            (weights, active), (arguments, passive) = differentiated, others
            values = function(*weights, *arguments, *active, *passive)
            first, second = len(ends.carried), len(ends.carried) + len(ends.left)
            return values[:first], (values[first:second], values[second:])

        return run

    def plain(self, differentiated: Any, others: Any) -> Any:
        """The forward pass, which keeps nothing."""
        return (*self._function(differentiated, others), None)

    def _keep(self, differentiated: Any, others: Any) -> Any:
        carried, pull, made = self._pull(differentiated, others)
        leaves, self._structure = jax.tree.flatten(pull)
        # What the backward pass gets anyway need not be kept twice.
        given = jax.tree.leaves((differentiated, others))
        self._known = [_position(leaf, given) for leaf in leaves]
        pairs = zip(leaves, self._known, strict=True)
        return carried, made, [leaf for leaf, known in pairs if known is None]

    def _pull(self, differentiated: Any, others: Any) -> Any:
        return jax.vjp(
            lambda d: self._function(d, others), differentiated, has_aux=True
        )

    def backward(
        self, differentiated: Any, others: Any, kept: Any, gradients: Any, sums: Any
    ) -> Any:
        """The sums of gradients with those of a microbatch, and those of `active`."""
        given = (differentiated, others, kept, gradients)
        to_weights, to_active = self._gradients(*given)
        return added(sums, to_weights), to_active

    def _gradients(
        self, differentiated: Any, others: Any, kept: Any, gradients: Any
    ) -> Any:
        if self._remat:
            _, pull, _ = self._pull(differentiated, others)
        else:
            given, stored = jax.tree.leaves((differentiated, others)), iter(kept)
            leaves = [next(stored) if n is None else given[n] for n in self._known]
            pull = jax.tree.unflatten(self._structure, leaves)
        (found,) = pull(gradients)
        return found


def added(sums: Any, gradients: Any) -> list[Any]:
    """Gradients, with those from before."""
    return [a + b for a, b in zip(sums, gradients, strict=True)]


def flat_of(args: Any) -> list[Any]:
    """The arrays of some arguments."""
    return jax.tree.leaves(args)


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _position(leaf: Any, given: list[Any]) -> int | None:
    return next((i for i, each in enumerate(given) if each is leaf), None)
