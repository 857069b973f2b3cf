"""The pieces of a step, and what passes between them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from meshwright.train.piece_programs import PieceProgram
from meshwright.train.staged_steps import StagedStep


class Pieces:
    """The pieces of a step on microbatches of one size.

    Attributes:
        step: The step.
        programs: What each piece does.
        stages: The stage that each piece lies on.
        phases: Pieces of one phase do not wait for each other.
        maker: The piece that makes a value which others read.
        readers: The pieces that read it.
        printer: The piece that makes an output of the step, by number.
    """

    def __init__(
        self,
        step: StagedStep,
        programs: list[PieceProgram],
        stages: Sequence[int],
        phases: Sequence[int],
    ) -> None:
        self.step = step
        self.programs = programs
        self.stages = stages
        self.phases = phases
        self.maker: dict[Any, int] = {}
        self.readers: dict[Any, list[int]] = defaultdict(list)
        self.printer: dict[int, int] = {}
        for number, program in enumerate(programs):
            ends = program.ends
            self.maker |= dict.fromkeys((*ends.carried, *ends.left), number)
            self.printer |= dict.fromkeys(ends.results, number)
            for v in (*ends.active, *ends.passive):
                self.readers[v].append(number)
