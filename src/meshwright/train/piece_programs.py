"""The programs of one piece of a pipeline: forward, backward, and their halves."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from meshwright.models.formulations import compiler_options, in_best_form
from meshwright.models.parts import Part
from meshwright.models.piece_functions import PieceFunctions, added, flat_of
from meshwright.models.stages import StagedProgram
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.mesh import replicated

import jax
from jax.sharding import Mesh, NamedSharding


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
        self._functions = PieceFunctions(staged, part, remat)
        self.ends = self._functions.ends
        self._staged = staged
        self._mesh = mesh
        self._size = size
        self._places = places

    @property
    def has_backward(self) -> bool:
        """Whether gradients go through the piece."""
        return self._functions.has_backward

    @cached_property
    def forward(self) -> Any:
        """Takes `(weights, active), (arguments, passive)`; all are lists.

        Returns:
            `carried, (left, results), kept`: the last is what the backward pass wants.
        """
        return self._compile(self._functions.forward, self._forward_places)

    @cached_property
    def forward_only(self) -> Any:
        """Like `forward`, and keeps nothing."""
        return self._compile(self._functions.plain, self._forward_places)

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
        return self._compile(self._functions.backward, places, donate=4)

    @cached_property
    def input_gradients(self) -> Any:
        """Takes `differentiated, others, kept, gradients`, as `backward` does.

        Returns:
            The gradients of `active`, and what `weight_gradients` wants to know.
        """
        places = (self._values(self.ends.active), None)
        return self._compile(
            lambda *args: self._functions.halves[0](*flat_of(args)), places
        )

    @cached_property
    def weight_gradients(self) -> Any:
        """Takes `differentiated, others, kept, gradients, between, sums`.

        Returns:
            The sums with those of this microbatch.
        """

        def run(*args: Any) -> Any:
            *given, between, sums = args
            return added(sums, self._functions.halves[1](flat_of(given), between))

        places = [self._places("input", number) for number in self.ends.weights]
        return self._compile(run, places, donate=5)

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


def _place(mesh: Mesh, size: int, variable: Any) -> NamedSharding:
    shape = variable.aval.shape
    has_samples = bool(shape) and shape[0] == size
    return BatchSplit(size, mesh).placement() if has_samples else replicated(mesh)
