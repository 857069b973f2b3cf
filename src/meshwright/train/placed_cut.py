"""The pieces of a model whose layers were put on several devices by hand."""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

from meshwright.devices.scope import (
    HOME_MARK,
    default_device,
    home_of,
    homes_of,
    marking_homes,
)
from meshwright.devices.strategy_hooks import PLACED_MARK
from meshwright.models.parts import Owners, bytes_of
from meshwright.models.scattering import Unit, scatter
from meshwright.models.stages import (
    Input,
    Role,
    StagedProgram,
    layers_of_pieces,
    scopes_of,
    shares_of_pieces,
)
from meshwright.train.cut import Act, PieceMap, Room

from jax.extend.core import Var
from jax.sharding import NamedSharding

_MARK = re.compile(rf"{HOME_MARK}(\w+:\d+)")


class PlacedCut:
    """Every layer computes on the device that it was made for; each device is a stage.

    What lies on one device between two arrivals from others is a piece. What no layer
    does (a loss, a penalty) is done where the variables are that it reads, or where the
    most of its inputs is. Metrics and the optimizer's own numbers are on the default
    device, if the model has a part there.

    Arguments:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self.devices = list(dict.fromkeys(name for _, name in homes_of(model)))
        self.layers: list[list[str]] = []
        self.shares: list[float] = []
        self.because = "layers were put on other devices"
        self._model = model
        self._default = default_device()
        self._homes: dict[Input, int] = {}

    def keep_for(self, variables: Sequence[Any]) -> None:
        """Asks the variables where they live."""
        lists: dict[Role, Any] = {
            "weight": self._model.trainable_variables,
            "state": self._model.non_trainable_variables,
        }
        self._homes = {
            Input(role, i): self.devices.index(home_of(variable) or self._default)
            for role, group in lists.items()
            for i, variable in enumerate(group)
        }

    def stage(self, given: Input) -> int | None:
        """The stage of the device that a variable lives on."""
        return self._homes.get(given, self._stage_of_the_rest)

    @property
    def _stage_of_the_rest(self) -> int:
        return self.devices.index(self._default) if self._default in self.devices else 0

    def name_of(self, stage: int) -> str:
        """The device."""
        return self.devices[stage]

    def relief(self, is_fixed: bool, has_gradients: bool) -> str:
        """What helps if a stage needs too much memory."""
        more = "put layers on other devices"
        if is_fixed:
            return f"No batch size helps: {more}"
        return f"Use a smaller batch_size, {more}"

    def assign(self, staged: StagedProgram, room: Room | None = None) -> PieceMap:
        """Decides which piece computes which operation of a step."""
        homes = [self._home(each) for each in staged.inputs]
        told, number = self._told(staged, homes), len(self.devices)
        units, owners = scatter(staged.program, homes, number, told)
        units, owners = _without_empty(units, owners)
        self.layers = layers_of_pieces(staged, owners, len(units))
        self.shares = shares_of_pieces(staged, owners, len(units))
        places = [unit.place for unit in units]
        return PieceMap(owners, places, [unit.phase for unit in units])

    def _home(self, given: Input) -> int | None:
        return None if given.role == "data" else self.stage(given)

    def _told(
        self, staged: StagedProgram, places: Sequence[int | None]
    ) -> dict[int, int]:
        """The stages of operations of placed layers, and of those of variables."""
        jaxpr = staged.program.jaxpr
        pairs = zip(jaxpr.invars, places, strict=True)
        homes = {v: place for v, place in pairs if place is not None}
        known = enumerate(self.devices)
        stages = {name.removeprefix("/device:"): stage for stage, name in known}
        found = {}
        for number, operation in enumerate(jaxpr.eqns):
            marks = _MARK.findall("/".join(scopes_of(operation)))
            inputs = [v for v in operation.invars if isinstance(v, Var)]
            read = [v for v in inputs if v in homes]
            if marks and marks[-1] in stages:
                found[number] = stages[marks[-1]]
            elif read:
                found[number] = homes[max(read, key=bytes_of)]
        return found

    def ticks(self, num_microbatches: int, phases: Sequence[int]) -> list[list[Act]]:
        """All forward, then all back; what does not wait for others, side by side."""
        groups = groupby(range(len(phases)), key=lambda piece: phases[piece])
        together = [list(group) for _, group in groups]
        forward = [[("forward", piece, 0) for piece in each] for each in together]
        back = [[("backward", piece, 0) for piece in each] for each in together[::-1]]
        return [*forward, *back]

    def mark(self, variable: Any, place: NamedSharding) -> None:
        """Tells eager work that a step has fixed the variable's value to its device."""
        setattr(variable, PLACED_MARK, True)

    def tracing(self) -> AbstractContextManager[None]:
        """Operations carry the name of the device that their layer was made for."""
        return marking_homes()


def _without_empty(units: list[Unit], owners: Owners) -> tuple[list[Unit], Owners]:
    """Units that compute something, numbered anew."""
    busy = sorted({number for owner in owners for number in owner})
    new = {old: number for number, old in enumerate(busy)}
    renumbered = [frozenset(new[number] for number in owner) for owner in owners]
    return [units[number] for number in busy], renumbered
