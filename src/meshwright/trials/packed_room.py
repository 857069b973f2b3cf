"""Whether packed members fit on their devices."""

from typing import Any

from meshwright.devices.memory import StepMemory, is_out_of_memory
from meshwright.devices.settings import current_settings
from meshwright.devices.sizes import format_bytes
from meshwright.errors import MemoryLimitError
from meshwright.parallel.turns import run_in_turn
from meshwright.trials.packed_places import Places

import jax


class Room:
    """Runs programs over all members, unless they need more memory than there is.

    Arguments:
        places: Where the members are.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._fitting: set[Any] = set()

    def run(self, program: Any, *args: Any) -> Any:
        """Runs a program, a function under `jax.jit`.

        Raises:
            MemoryLimitError: It needs more than the limit that was set, or than the
                allocator has.
        """
        try:
            self._compare(program, args)
            return run_in_turn(self._places.mesh, program, *args)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            first = str(error).splitlines()[0].rstrip(".")
            raise _no_room(self._places, f"found no room: {first}") from error

    def _compare(self, program: Any, args: tuple[Any, ...]) -> None:
        limit = current_settings().memory_limit
        looked_at = program, self._places.size, limit
        if limit is None or looked_at in self._fitting:
            return
        memory = StepMemory.of(program.lower(*args).compile(), {})
        if memory.needed > limit:
            needed = f"need {format_bytes(memory.needed)} per device"
            told = f"{needed}; the limit is {format_bytes(limit)}"
            raise _no_room(self._places, told, memory.needed, limit)
        self._fitting.add(looked_at)


def _no_room(
    places: Places, told: str, needed: int = 0, limit: int = 0
) -> MemoryLimitError:
    each = places.size // places.mesh.size
    return MemoryLimitError(
        f"{len(places.members)} packed members, {each} on a device, {told}.",
        "The state of all members of a device, the data, and what a step of all of "
        "them computes are there at the same time.",
        f"Pack fewer at a time, for example configs[:{max(len(places.members) // 2, 1)}"
        "], or pass more devices.",
        needed=needed,
        limit=limit,
    )
