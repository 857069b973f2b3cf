"""Where the pieces of a model are cut, and where its variables live."""

import difflib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import groupby, pairwise
from typing import Any

from meshwright.devices.sizes import format_bytes
from meshwright.devices.strategy_hooks import STAGE_MARK
from meshwright.errors import MemoryLimitError, StrategyError
from meshwright.models.stages import (
    Assignment,
    Homes,
    Input,
    StagedProgram,
    assign_by_cuts,
    assign_by_homes,
    layers_of_pieces,
    shares_of_pieces,
)
from meshwright.parallel.cutting import Cuts, balanced_cuts
from meshwright.parallel.plan import Plan
from meshwright.train.cut import Act, PieceMap, Room

from jax.sharding import NamedSharding

PRODUCTS = ("dot_general", "conv_general_dilated")


class StageCut:
    """The cut of one model; it is made by the first of its steps that is traced.

    Attributes:
        layers: For each piece the names of the layers in it.
        shares: For each piece its share of all work, by estimate.
        because: Why it is cut there.
    """

    def __init__(self, name: str, plan: Plan) -> None:
        self.layers: list[list[str]] = []
        self.shares: list[float] = []
        self.because = ""
        self._name = name
        self._plan = plan
        self._homes: Homes | None = None
        self._variables: list[Any] = []
        self._schedule = cache(plan.schedule_of)

    def stage(self, given: Input) -> int | None:
        """The stage that a variable lives on; None for those that are everywhere."""
        if given.role == "shared":
            return None
        if given.role == "metric":
            # `predict`, which may be what the model is cut by, does not know them.
            return self._stage_of(self._plan.num_pieces - 1)
        assert self._homes is not None, "a step was traced before"
        return self._stage_of(self._homes[given])

    def _stage_of(self, piece: int) -> int:
        return piece % self._plan.stages

    def ticks(self, num_microbatches: int, phases: Sequence[int]) -> list[list[Act]]:
        """The actions of the plan's schedule, by tick."""
        actions = self._schedule(num_microbatches).actions
        return [
            [(a.kind, a.piece(self._plan.stages), a.microbatch) for a in group]
            for _, group in groupby(actions, key=lambda action: action.tick)
        ]

    def name_of(self, stage: int) -> str:
        """The stage."""
        return f"each device of stage {stage}"

    def relief(self, is_fixed: bool, has_gradients: bool) -> str:
        """What helps if a stage needs too much memory."""
        if is_fixed:
            more = "use more stages, or fsdp or tensor devices in each"
            return f"No batch size helps: {more}"
        if has_gradients and not self._plan.remat:
            return "Use remat=True, more microbatches, or a smaller batch_size"
        return "Use more microbatches, or a smaller batch_size"

    def mark(self, variable: Any, place: NamedSharding) -> None:
        """Makes a variable keep to its stage, and tells eager work that it does."""
        variable._layout = place
        setattr(variable, STAGE_MARK, place)

    def tracing(self) -> AbstractContextManager[None]:
        """Nothing special."""
        return nullcontext()

    def keep_for(self, variables: Sequence[Any]) -> None:
        """Forgets the cut if the variables, by which it is known, are in other places.

        They are when layers have been frozen.
        """
        if [id(v) for v in variables] != [id(v) for v in self._variables]:
            self._variables, self._homes = list(variables), None

    def assign(self, staged: StagedProgram, room: Room | None = None) -> PieceMap:
        """Decides which piece computes which operation of a step."""
        pieces = range(self._plan.num_pieces)
        stages = [self._stage_of(piece) for piece in pieces]
        return PieceMap(self._assign(staged, room).owners, stages, pieces)

    def _assign(self, staged: StagedProgram, room: Room | None) -> Assignment:
        if self._homes is not None:
            found = assign_by_homes(staged, self._homes, self._plan.num_pieces)
            self._refuse_states_on_the_move(staged, found)
            return found
        cuts = self._choose(staged, room)
        found = assign_by_cuts(staged, cuts, self._plan.num_pieces)
        self._homes = found.homes
        pieces = self._plan.num_pieces
        self.layers = layers_of_pieces(staged, found.owners, pieces)
        self.shares = shares_of_pieces(staged, found.owners, pieces)
        return found

    def _choose(self, staged: StagedProgram, room: Room | None) -> list[int]:
        if room is not None and staged.starts:
            self._refuse_large_operation(staged, room)
        if self._plan.cuts:
            self.because = "the cuts were given"
            return self._pinned(staged, self._plan.cuts)
        if self._plan.num_pieces == 1:
            return []
        found = self._balanced(staged, room)
        if found is None and room is not None:
            # The estimate is on the safe side; a limit is checked once more, with what
            # the compiler says.
            room = None
            found = self._balanced(staged, room)
        if found is None:
            raise self._too_many_stages(staged)
        of_those = ", of those that fit" if room is not None else ""
        self.because = f"the slowest piece is fastest{of_those}, {found.where}"
        return found.starts

    def _balanced(self, staged: StagedProgram, room: Room | None) -> Cuts | None:
        return balanced_cuts(
            staged,
            self._plan.num_pieces,
            held=None if room is None else self._held(staged, room),
            limit=None if room is None else room.limit,
        )

    def _held(self, staged: StagedProgram, room: Room) -> list[int]:
        """Bytes that each operation keeps on a device, on the safe side.

        The first to read a weight keeps it. What is made is taken to be kept for the
        backward passes of as many microbatches as are under way on any stage.
        """
        plan = self._plan
        schedule = self._schedule(plan.microbatches or 1)
        alive = max(map(schedule.most_alive, range(plan.stages)))
        made = [0] * len(staged.costs) if plan.remat else staged.makes
        copies, parts = room.copies / (plan.fsdp * plan.tensor), plan.data * plan.fsdp
        pairs = zip(staged.brings, made, strict=True)
        return [int(copies * weight + alive * each / parts) for weight, each in pairs]

    def _refuse_large_operation(self, staged: StagedProgram, room: Room) -> None:
        """Counts what is certain: other outputs than products may never be stored."""
        plan = self._plan
        devices = plan.fsdp * plan.tensor
        for number, operation in enumerate(staged.program.jaxpr.eqns):
            weights = int(room.copies * staged.brings[number] / devices)
            is_product = operation.primitive.name in PRODUCTS
            made = staged.makes[number] if is_product else 0
            outputs = made // (plan.data * devices)
            if weights + outputs > room.limit:
                layers = "/".join(staged.layers[number]) or "no layer"
                raise MemoryLimitError(
                    f"{operation.primitive.name} in {layers} of {self._name!r} needs "
                    f"{format_bytes(weights)} for its weights, their gradients and "
                    f"optimizer state, and {format_bytes(outputs)} for what it makes "
                    f"of a microbatch; a device has {format_bytes(room.limit)}.",
                    "A stage has one operation at the least, so no cut helps.",
                    "Split the stage's weights and batches over several devices with "
                    "Hybrid(stages=, fsdp=) or Hybrid(stages=, tensor=), use more "
                    "microbatches, or raise memory_limit.",
                    needed=weights + outputs,
                    limit=room.limit,
                    by_kind={"weights": weights, "outputs": outputs},
                    largest=(layers,),
                )

    def _too_many_stages(self, staged: StagedProgram) -> StrategyError:
        most = sum(staged.is_cuttable) + 1
        return StrategyError(
            f"{self._name!r} was to be cut into {self._plan.num_pieces} pieces.",
            f"Its training step has {most} that can stand alone: an operation is not "
            "cut, nor is what updates a state (BatchNorm, seeds).",
            f"Use at most {most} stages x chunks.",
        )

    def _pinned(self, staged: StagedProgram, names: Sequence[str]) -> list[int]:
        """The first operations of layers, which are in the order of the step."""
        found = [self._position(staged, name) for name in names]
        for (before, name), (start, end) in zip(
            pairwise(names), pairwise(found), strict=True
        ):
            if start >= end:
                ordered = dict(sorted(zip(found, names, strict=True)))
                raise StrategyError(
                    f"Stages of {self._name!r} were to begin at "
                    f"{', '.join(map(repr, names))}.",
                    "Each begins after the one before it in the training step, and "
                    f"{name!r} does not begin after {before!r}.",
                    "Name different layers in the order of the step: "
                    f"{', '.join(map(repr, ordered.values()))}.",
                )
        return found

    def _position(self, staged: StagedProgram, name: str) -> int:
        """The first operation of a layer."""
        for number, names in enumerate(staged.layers):
            if name in names and staged.is_bound[number]:
                return self._checked_position(staged, name, number)
        known = list(dict.fromkeys(n for names in staged.layers for n in names))
        near = difflib.get_close_matches(name, known) or known[:8]
        raise StrategyError(
            f"A stage was to begin at {name!r}, which is no layer of {self._name!r}.",
            "Stages begin at layers that the training step computes.",
            f"Near misses: {', '.join(near)}.",
        )

    def _checked_position(self, staged: StagedProgram, name: str, number: int) -> int:
        if staged.is_cuttable[number]:
            return number
        raise StrategyError(
            f"A stage was to begin at {name!r} of {self._name!r}.",
            "There, the model cannot be cut: it is the beginning, or a state (that of "
            "BatchNorm, or of a dropout's seed) is read before and written after it.",
            "Begin the stage at another layer.",
        )

    def _refuse_states_on_the_move(
        self, staged: StagedProgram, found: Assignment
    ) -> None:
        made = {
            v: owner
            for op, owner in zip(staged.program.jaxpr.eqns, found.owners, strict=True)
            for v in op.outvars
        }
        for output, number in zip(
            staged.program.jaxpr.outvars, staged.updates, strict=True
        ):
            if number is None or staged.inputs[number].role != "state":
                continue
            home = found.homes[staged.inputs[number]]
            if output in made and made[output] != {home}:
                raise StrategyError(
                    f"A step of {self._name!r} updates a state in piece "
                    f"{min(made[output])} that lives in piece {home}.",
                    "A state is read and written in one piece.",
                    "Cut the model elsewhere, by the names of layers.",
                )
