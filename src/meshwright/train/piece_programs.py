"""The programs of one piece of a pipeline: forward, backward, and their halves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.models.parts import Part, as_function, in_halves
from meshwright.models.stages import StagedProgram
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.mesh import replicated
from meshwright.train.formulations import compiler_options, in_best_form

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding


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


class PieceProgram:
    """Compiles what one piece of a step does, for one size of microbatches.

    Arguments:
        staged: The step.
        part: What of it the piece does.
        mesh: The devices of the piece.
        size: Samples of a microbatch.
        places: Where inputs and outputs of the step lie on these devices, by number:
            a function of "input" or "output" and the number.
        remat: Whether the backward pass computes the forward pass again, instead of
            keeping what it needs of it.
    """

    def __init__(
        self,
        staged: StagedProgram,
        part: Part,
        mesh: Mesh,
        size: int,
        places: Callable[[str, int], NamedSharding],
        remat: bool,
    ) -> None:
        self.ends = Ends.of(staged, part)
        self._staged = staged
        self._part = part
        self._mesh = mesh
        self._size = size
        self._places = places
        self._remat = remat

    @property
    def has_backward(self) -> bool:
        """Whether gradients go through the piece."""
        ends = self.ends
        return bool(ends.carried) and bool(ends.weights or ends.active)

    @cached_property
    def forward(self) -> Any:
        """Takes `(weights, active), (arguments, passive)`; all are lists.

        Returns:
            `carried, (left, results), kept`: the last is what the backward pass wants.
        """
        function = self._plain if self._remat or not self.has_backward else self._keep
        return self._compile(function, self._forward_places)

    @cached_property
    def forward_only(self) -> Any:
        """Like `forward`, and keeps nothing."""
        return self._compile(self._plain, self._forward_places)

    @property
    def _forward_places(self) -> Any:
        made = (self._values(self.ends.left), self._outputs())
        return self._values(self.ends.carried), made, None

    @cached_property
    def backward(self) -> Any:
        """Takes `differentiated, others, kept, gradients, sums`.

        The first two are what the forward pass took, `gradients` those of what it
        carried, and `sums` those of the weights so far, which are used up.

        Returns:
            The sums with those of this microbatch, and the gradients of `active`.
        """
        weights = [self._places("input", number) for number in self.ends.weights]
        places = (weights, self._values(self.ends.active))
        return self._compile(self._backward, places, donate=4)

    @cached_property
    def input_gradients(self) -> Any:
        """Takes `differentiated, others, kept, gradients`, as `backward` does.

        Returns:
            The gradients of `active`, and what `weight_gradients` wants to know.
        """
        places = (self._values(self.ends.active), None)
        return self._compile(lambda *args: self._halves[0](*_flat(args)), places)

    @cached_property
    def weight_gradients(self) -> Any:
        """Takes `differentiated, others, kept, gradients, between, sums`.

        Returns:
            The sums with those of this microbatch.
        """

        def run(*args: Any) -> Any:
            *given, between, sums = args
            return _added(sums, self._halves[1](_flat(given), between))

        places = [self._places("input", number) for number in self.ends.weights]
        return self._compile(run, places, donate=5)

    @cached_property
    def _halves(self) -> Any:
        """The backward pass in two: what the piece before waits for, and the rest."""
        ends, jaxpr = self.ends, self._staged.program.jaxpr
        weights = _shapes([jaxpr.invars[n] for n in ends.weights])
        arguments = _shapes([jaxpr.invars[n] for n in ends.arguments])
        given = (weights, _shapes(ends.active)), (arguments, _shapes(ends.passive))
        function = self._plain if self._remat else self._keep
        *_, kept = jax.eval_shape(function, *given)
        carried = _shapes(ends.carried)
        program = jax.make_jaxpr(self._gradients)(*given, kept, carried)
        late = len(ends.weights)
        return in_halves(program, range(late, late + len(ends.active)))

    @cached_property
    def zeros(self) -> Any:
        """Makes the sums to start from."""
        invars = self._staged.program.jaxpr.invars
        shapes = [invars[number].aval for number in self.ends.weights]
        places = [self._places("input", number) for number in self.ends.weights]

        def make() -> list[Any]:
            return [jax.numpy.zeros(each.shape, each.dtype) for each in shapes]

        return jax.jit(make, out_shardings=places)

    def place_of_input(self, number: int) -> NamedSharding:
        """Where a variable lies that the piece reads, by the number of the input."""
        return self._places("input", number)

    def place(self, variable: Any) -> NamedSharding:
        """Where a value lies that passes between pieces: split by sample."""
        return _place(self._mesh, self._size, variable)

    def _values(self, variables: Sequence[Any]) -> list[NamedSharding]:
        return [self.place(v) for v in variables]

    def _outputs(self) -> list[NamedSharding]:
        return [self._places("output", number) for number in self.ends.results]

    def _compile(
        self, function: Callable[..., Any], places: Any, donate: Any = ()
    ) -> Any:
        return jax.jit(
            in_best_form(function, self._mesh, is_moved=True),
            out_shardings=places,
            donate_argnums=donate,
            compiler_options=compiler_options(self._mesh),
        )

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

    def _plain(self, differentiated: Any, others: Any) -> Any:
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

    def _backward(
        self, differentiated: Any, others: Any, kept: Any, gradients: Any, sums: Any
    ) -> Any:
        given = (differentiated, others, kept, gradients)
        to_weights, to_active = self._gradients(*given)
        return _added(sums, to_weights), to_active

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


def _added(sums: Any, gradients: Any) -> list[Any]:
    return [a + b for a, b in zip(sums, gradients, strict=True)]


def _flat(args: Any) -> list[Any]:
    return jax.tree.leaves(args)


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _position(leaf: Any, given: list[Any]) -> int | None:
    return next((i for i, each in enumerate(given) if each is leaf), None)


def _place(mesh: Mesh, size: int, variable: Any) -> NamedSharding:
    shape = variable.aval.shape
    has_samples = bool(shape) and shape[0] == size
    return BatchSplit(size, mesh).placement() if has_samples else replicated(mesh)
