"""Which member works on which device."""

from collections.abc import Sequence
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.devices.device import Device
from meshwright.errors import EnsembleError
from meshwright.strategies.strategy import choose_devices
from meshwright.trials.ensemble_members import describe_member, home_of_member
from meshwright.trials.ensemble_seat import Seat


def seat_members(
    members: Sequence[Any], devices: Sequence[str | Device] | None
) -> list[Seat]:
    """Deals members out to devices; those that were put on one by hand stay there.

    In a run of several processes each gets about as many: the members go to the first
    device of every process, then to the second, and so on.

    Raises:
        EnsembleError: These devices do not suit the members.
    """
    names = _names_of(devices)
    if devices is not None and len(names) > len(members):
        raise EnsembleError(
            f"Ensemble received {len(names)} devices for {len(members)} members: "
            f"{', '.join(names)}.",
            "A member works on one device, and each device that is named gets one.",
            f"Name {len(members)} devices at the most, or leave them out.",
        )
    seats = []
    num_processes = process_count()
    for number, member in enumerate(members):
        turn, process = divmod(number, num_processes)
        device = names[turn % len(names)]
        home = home_of_member(number, member)
        if home is not None and devices is not None and home not in names:
            raise EnsembleError(
                f"Ensemble received devices={names} and "
                f"{describe_member(number, member)}, which was built on {home}.",
                "What was made on a device by hand stays there.",
                f"Name {home} as well, or build the member outside of mw.device.",
            )
        seats.append(Seat(number, member, home or device, process))
    return seats


def _names_of(devices: Sequence[str | Device] | None) -> list[str]:
    """Names as this process knows them; a device may be named several times."""
    if devices is None or isinstance(devices, str) or not len(devices):
        return _own_names(choose_devices(devices))
    return [_own_names(choose_devices([device]))[0] for device in devices]


def _own_names(chosen: Sequence[str]) -> list[str]:
    """Every process has devices of the same names, so those of the first will do."""
    own = [name for name in chosen if not name.startswith("/process:")]
    prefix = "/process:0"
    first = [n.removeprefix(prefix) for n in chosen if n.startswith(f"{prefix}/")]
    return own or first
