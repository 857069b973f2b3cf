"""What the stages of a pipeline need in memory.

A stage keeps its variables, the sums of its gradients, and for each microbatch that is
under way what the backward pass will want; on top comes what its largest program needs
while it runs. This is how training adds it up, too (`train.stage_memory`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.models.flattening import flatten
from meshwright.models.formulations import BEST_FORMS, Platform
from meshwright.models.operations import FlatProgram, Size
from meshwright.models.parts import Part, split_program
from meshwright.models.piece_functions import PieceFunctions
from meshwright.models.rewriting import rewritten
from meshwright.models.stages import Assignment, Input, StagedProgram, assign_by_cuts
from meshwright.parallel.cutting import balanced_cuts
from meshwright.planner.liveness import LivesBySize
from meshwright.planner.partitioning import InputSplit, partition

import jax
from jax.extend.core import ClosedJaxpr


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceNeeds:
    """Bytes that one piece needs on a device."""

    gradients: float
    """The sums of the gradients of its weights."""
    kept: float
    """What it keeps of a microbatch for the backward pass."""
    working: float
    """What its programs need while they run, and throw away."""


class Shares(NamedTuple):
    """How a microbatch and its stage are split over devices."""

    samples: int
    """Samples on a device."""
    size: int
    """Samples of the microbatch."""
    fsdp: int
    tensor: int
    has_several: bool
    """Whether a stage has more than one device."""


class TracedPieces:
    """A step that is cut into pieces, whose programs are traced once for all splits.

    Arguments:
        staged: The step without its gradients, on `SAMPLES`.
        starts: The operations that pieces begin at.
        platform: What it is compiled for.
        remat: Whether backward passes compute forward passes again.
    """

    def __init__(
        self,
        staged: StagedProgram,
        starts: Sequence[int],
        platform: Platform,
        *,
        remat: bool,
    ) -> None:
        self.number = len(starts) + 1
        self.staged = staged
        self.platform: Platform = platform
        found: Assignment = assign_by_cuts(staged, starts, self.number)
        self.homes = found.homes
        self.parts = split_program(staged.program, found.owners, self.number)
        self._remat = remat
        self.piece = lru_cache(maxsize=None)(self._trace)

    def _trace(self, piece: int) -> "_Traced":
        return _Traced(self.staged, self.parts[piece], self.platform, self._remat)


class CutStep:
    """A step that is cut into pieces, each split over devices.

    Arguments:
        pieces: The pieces.
        splits: How each input of the step is split.
        sums_over_samples: Whether microbatches are split.
    """

    def __init__(
        self,
        pieces: TracedPieces,
        splits: Sequence[InputSplit],
        *,
        sums_over_samples: bool,
    ) -> None:
        self.num_pieces = pieces.number
        self.homes = pieces.homes
        self._pieces = pieces
        self._splits = splits
        self._sums = sums_over_samples
        self._piece = lru_cache(maxsize=None)(self._make_piece)

    def needs(self, piece: int, shares: "Shares") -> PieceNeeds:
        """What a piece needs for a microbatch."""
        return self._piece(piece).needs(shares)

    def reads(self, piece: int) -> list[Input]:
        """The inputs of the step that a piece reads."""
        inputs = self._pieces.staged.inputs
        return [inputs[n] for n in self._pieces.parts[piece].arguments]

    def _make_piece(self, piece: int) -> "_Piece":
        return _Piece(
            self._pieces.piece(piece), self._splits, self._pieces.platform, self._sums
        )


def cut_evenly(staged: StagedProgram, num_pieces: int) -> list[int] | None:
    """Where a step is cut into so many pieces; None if it cannot be."""
    found = balanced_cuts(staged, num_pieces)
    return None if found is None else found.starts


def starts_of(staged: StagedProgram, names: Sequence[str]) -> list[int] | None:
    """The first operations of layers; None if one of them is not in the step."""
    found = []
    for name in names:
        places = [
            number
            for number, layers in enumerate(staged.layers)
            if name in layers and staged.is_bound[number]
        ]
        if not places:
            return None
        found.append(places[0])
    return found


class _Traced:
    """The programs of one piece, on all devices together."""

    def __init__(
        self, staged: StagedProgram, part: Part, platform: Platform, remat: bool
    ) -> None:
        functions = PieceFunctions(staged, part, remat)
        self.ends = ends = functions.ends
        invars = staged.program.jaxpr.invars
        weights = [_shape(invars[n]) for n in ends.weights]
        given = (
            (weights, _shapes(ends.active)),
            ([_shape(invars[n]) for n in ends.arguments], _shapes(ends.passive)),
        )
        forward, shapes = jax.make_jaxpr(functions.forward, return_shape=True)(*given)
        kept = shapes[-1]
        self.num_kept = len(jax.tree.leaves(kept))
        self.again = [n for n in functions.wanted_again if n < len(ends.weights)]
        self.weights = [_size(invars[n]) for n in ends.weights]
        data = [n for n in ends.arguments if staged.inputs[n].role == "data"]
        passed = [*ends.active, *ends.passive, *(invars[n] for n in data)]
        self.passed = [_size(v) for v in passed]
        self.forward = _flat(forward, platform)
        self.backward = None
        if functions.has_backward:
            more = (kept, _shapes(ends.carried), weights)
            backward = jax.make_jaxpr(functions.backward)(*given, *more)
            self.backward = _flat(backward, platform)


def _flat(program: ClosedJaxpr, platform: Platform) -> FlatProgram:
    return flatten(rewritten(program, BEST_FORMS[platform]).jaxpr, platform)


class _Piece:
    """The programs of one piece on one device."""

    def __init__(
        self,
        traced: _Traced,
        splits: Sequence[InputSplit],
        platform: Platform,
        sums: bool,
    ) -> None:
        ends, whole = traced.ends, InputSplit()
        mine = [splits[n] for n in ends.weights]
        self._weights = list(zip(traced.weights, mine, strict=True))
        self._passed = traced.passed
        self._again = [self._weights[n] for n in traced.again]
        inputs = [*mine, *[whole] * len(ends.active)]
        inputs += [splits[n] for n in ends.arguments] + [whole] * len(ends.passive)
        self._forward = _Program(
            traced.forward, inputs, platform, sums=sums, num_kept=traced.num_kept
        )
        self._backward = None
        if traced.backward is not None:
            inputs += [whole] * (traced.num_kept + len(ends.carried))
            renewed = {i: len(inputs) + i for i in range(len(mine))}
            self._backward = _Program(
                traced.backward, [*inputs, *mine], platform, sums=sums, renewed=renewed
            )

    def needs(self, shares: Shares) -> PieceNeeds:
        """What the piece needs for a microbatch."""
        fsdp, tensor = shares.fsdp, shares.tensor
        gradients = sum(_part(size, each, fsdp, tensor) for size, each in self._weights)
        kept, working = self._forward.needs(shares)
        kept += sum(size.at(shares.samples) for size in self._passed)
        if shares.has_several:
            # What was gathered is no argument any more, and is kept with the rest.
            kept += sum(_part(size, each, 1, tensor) for size, each in self._again)
        if self._backward is None:
            return PieceNeeds(gradients=0.0, kept=kept, working=working)
        _, back = self._backward.needs(shares)
        working = max(working, back - gradients)
        return PieceNeeds(gradients=gradients, kept=kept, working=working)


class _Program:
    """A program of a piece on one device."""

    def __init__(
        self,
        flat: FlatProgram,
        splits: Sequence[InputSplit],
        platform: Platform,
        *,
        sums: bool,
        num_kept: int = 0,
        renewed: dict[int, int] | None = None,
    ) -> None:
        pairs = {flat.outputs[a]: flat.inputs[b] for a, b in (renewed or {}).items()}
        parts = partition(flat, splits, pairs, platform, sums_over_samples=sums)
        self._lives = LivesBySize(parts, pairs, platform)
        own = set(pairs)
        values = parts.flat.values
        bound = _that_know_samples(flat)
        self._returned = [
            _Returned(values[v].bytes, parts.by_tensor[v], v not in bound)
            for v in flat.outputs
            if v not in own
        ]
        self._kept = self._returned[len(self._returned) - num_kept :]
        self.needs = lru_cache(maxsize=None)(self._needs)

    def _needs(self, shares: Shares) -> tuple[float, float]:
        """What it returns to be kept, and what it needs besides."""
        lives = self._lives.at(shares.samples)
        alive = lives.most(shares.samples, shares.fsdp, shares.tensor)
        kept = sum(each.bytes_on(shares) for each in self._kept)
        returned = sum(each.bytes_on(shares) for each in self._returned)
        return kept, alive.total + returned - kept


class _Returned(NamedTuple):
    """Something that a program returns."""

    bytes: Size
    is_split: bool
    is_whole: bool
    """Whether it is the same on all devices, since it depends on no sample."""

    def bytes_on(self, shares: Shares) -> float:
        """Bytes of it on a device."""
        size = self.bytes.at(shares.size if self.is_whole else shares.samples)
        return size / (shares.tensor if self.is_split else 1)


def _that_know_samples(flat: FlatProgram) -> set[int]:
    """The values that depend on the data of a batch."""
    found = {v for v in flat.inputs if flat.values[v].size.power}
    for operation in flat.operations:
        if found.intersection(operation.inputs):
            found.update(operation.outputs)
    return found


def _part(size: Size, split: InputSplit, fsdp: int, tensor: int) -> float:
    ways = (fsdp if split.fsdp is not None else 1) * (
        tensor if split.tensor is not None else 1
    )
    return size.number / ways


def _shape(v: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [_shape(v) for v in variables]


def _size(v: Any) -> Size:
    itemsize = int(getattr(v.aval.dtype, "itemsize", 0))
    return Size.of(int(v.aval.size) * itemsize)
