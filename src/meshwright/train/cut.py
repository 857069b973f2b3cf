"""What a step in pieces asks of whoever decides which piece computes what."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from meshwright.models.parts import Owners
from meshwright.models.stages import Input, StagedProgram

from jax.sharding import NamedSharding

Act = tuple[str, int, int]
"""What is to be done (`forward`, `backward`, ...), by which piece, on which microbatch.
"""


class PieceMap(NamedTuple):
    """Which piece computes what, and where the pieces are."""

    owners: Owners
    """For each operation the pieces that compute it."""
    stages: Sequence[int]
    """The stage of each piece, in the order in which they compute."""
    phases: Sequence[int]
    """Pieces of one phase do not wait for each other."""


class Room(NamedTuple):
    """What a device has room for."""

    limit: int
    """Bytes that it may use."""
    copies: float
    """Of a trained weight: itself, its gradient, and what the optimizer keeps of it."""


class Cut(Protocol):
    """Where one model is cut; its steps share it.

    Attributes:
        layers: For each piece the names of the layers in it.
        shares: For each piece its share of all work, by estimate.
        because: Why it is cut there.
    """

    layers: list[list[str]]
    shares: list[float]
    because: str

    def keep_for(self, variables: Sequence[Any]) -> None:
        """Forgets what depends on other variables of the model than these."""

    def assign(self, staged: StagedProgram, room: Room | None = None) -> PieceMap:
        """Decides which piece computes which operation of a step.

        Arguments:
            staged: The step.
            room: What each device has room for, if there is an end to it.
        """

    def stage(self, given: Input) -> int | None:
        """The stage that a variable lives on; None for those that are everywhere."""

    def ticks(self, num_microbatches: int, phases: Sequence[int]) -> list[list[Act]]:
        """What is to be done in a training step; things in a list are independent.

        Arguments:
            num_microbatches: Of the batch.
            phases: Of the pieces of the step.
        """

    def name_of(self, stage: int) -> str:
        """What users call a device of a stage."""

    def relief(self, is_fixed: bool, has_gradients: bool) -> str:
        """What helps if a stage needs too much memory.

        Arguments:
            is_fixed: Whether it does so for batches of any size.
            has_gradients: Whether it is in training that it does.
        """

    def mark(self, variable: Any, place: NamedSharding) -> None:
        """Notes at a variable of the model where its steps keep it."""

    def tracing(self) -> AbstractContextManager[None]:
        """What a step of the model is traced in."""
