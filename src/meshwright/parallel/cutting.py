"""Where the stages of a traced step begin, so that none is much slower than others."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from meshwright.models.stages import StagedProgram
from meshwright.models.work import FLOPS_PER_BYTE
from meshwright.parallel.balance import choose_stage_cuts

GOOD_ENOUGH = 1.08
"""Cuts between layers may make the slowest piece slower by this much than others."""


class Cuts(NamedTuple):
    """The operations that pieces begin at, without the first."""

    starts: list[int]
    where: str
    """In words."""


def balanced_cuts(
    staged: StagedProgram,
    num_pieces: int,
    *,
    held: Sequence[int] | None = None,
    limit: int | None = None,
) -> Cuts | None:
    """The cuts for which the slowest piece is fastest, between layers if that is good.

    Arguments:
        staged: The step.
        num_pieces: How many pieces are wanted.
        held: Bytes that each operation keeps on a device.
        limit: Bytes that a piece may keep at the most.

    Returns:
        The cuts; None if there are too few places for them.
    """

    def choose(is_cuttable: Sequence[bool]) -> list[int] | None:
        return choose_stage_cuts(
            staged.costs,
            staged.alive,
            is_cuttable,
            num_pieces,
            cost_per_byte=FLOPS_PER_BYTE,
            held=held,
            limit=limit,
        )

    if num_pieces == 1:
        return Cuts([], "nowhere")
    anywhere = choose(staged.is_cuttable)
    if anywhere is None:
        return None
    whole = choose(_between_layers(staged))
    if whole is None or _slowest(staged, whole) > GOOD_ENOUGH * _slowest(
        staged, anywhere
    ):
        return Cuts(anywhere, "also inside of layers")
    return Cuts(whole, "between layers")


def _between_layers(staged: StagedProgram) -> list[bool]:
    before = [(), *staged.layers[:-1]]
    rows = zip(staged.is_cuttable, staged.layers, before, strict=True)
    return [is_allowed and names != others for is_allowed, names, others in rows]


def _slowest(staged: StagedProgram, cuts: Sequence[int]) -> int:
    spans = pairwise([0, *cuts, len(staged.costs)])
    travels = pairwise([0, *(staged.alive[cut] for cut in cuts), 0])
    return max(
        sum(staged.costs[start:end]) + FLOPS_PER_BYTE * (before + after)
        for (start, end), (before, after) in zip(spans, travels, strict=True)
    )
