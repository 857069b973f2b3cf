"""The devices of a benchmark: those that are here, and more of their kind."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.devices.sizes import is_count
from meshwright.errors import MachineError
from meshwright.planner.machines import Machine, parse_machine


@dataclass(frozen=True, slots=True)
class Fleet:
    """Numbers of devices, and the machine that each of them is part of.

    Attributes:
        counts: The numbers of devices, in ascending order.
        here: The devices that are here; None if others are asked about.
        all: A machine with the greatest of these numbers.
    """

    counts: tuple[int, ...]
    here: Machine | None
    all: Machine

    def part(self, count: int) -> Machine:
        """So many of the devices; those that are here if they suffice."""
        return (self.here if self.is_here(count) and self.here else self.all).part(
            count
        )

    def is_here(self, count: int) -> bool:
        """Whether so many devices are here, and can be measured."""
        return self.here is not None and count <= self.here.num_devices

    @property
    def is_of_stand_ins(self) -> bool:
        """Whether a CPU plays GPUs, for which no times can be predicted."""
        return self.all.kind == "GPU" and self.all.shares_cores

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers of figures of these devices have to know."""
        if self.here is None or not self.here.shares_cores:
            return ()
        found: tuple[str, ...] = (
            "These devices share the cores of one CPU, so measured figures say what "
            "splitting does there, and not what devices of their own would bring.",
        )
        if self.counts == (1,):
            found = ()
        unknown = "No times are predicted for stand-ins, since there is no such GPU."
        return (*found, unknown) if self.is_of_stand_ins else found


def fleet_of(
    counts: Sequence[int] | None = None,
    machine: str | None = None,
    *,
    price: float | None = None,
) -> Fleet:
    """The devices that are asked about.

    Arguments:
        counts: Numbers of devices; 1, 2, 4, ... up to all if left out.
        machine: `'8xH200'`, for devices that are not here.
        price: US dollars for one device for one hour; the catalog's if left out.

    Raises:
        MachineError: A number that is none, or more devices than there can be.

    >>> fleet_of(machine="8xH200").counts
    (1, 2, 4, 8)
    """
    chosen = parse_machine(machine, price=price)
    here = chosen if chosen.is_here and chosen.num_hosts == 1 else None
    numbers = _checked(counts) if counts is not None else chosen.sizes()
    most = numbers[-1]
    if most <= chosen.num_devices:
        return Fleet(numbers, here, chosen)
    if chosen.accelerator is None or here is None:
        raise MachineError(
            f"{most} devices were asked for, and {chosen} has {chosen.num_devices}.",
            "More devices than are here can be predicted for if the catalog knows "
            "their kind.",
            f"Ask for up to {chosen.num_devices}, for a machine as '8xH200', or let a "
            f"CPU play several: MESHWRIGHT_VIRTUAL={most}.",
        )
    larger = parse_machine(f"{most}x{chosen.accelerator.name}", price=price)
    return Fleet(numbers, here, larger)


def _checked(counts: Sequence[int]) -> tuple[int, ...]:
    if not counts or not all(is_count(count) and count > 0 for count in counts):
        raise MachineError(
            f"The numbers of devices received are {list(counts)!r}.",
            "They are whole numbers from 1, at least one of them.",
            "Ask, for example, for 1,2,4,8.",
        )
    return tuple(sorted(set(counts)))
