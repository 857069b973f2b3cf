"""The workers of one host as the launcher sees them, wherever they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshwright.cluster.orders import Orders

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Said:
    """A worker told something through its channel."""

    rank: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Printed:
    """A worker printed a line."""

    rank: int
    stream: Stream
    line: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended."""

    rank: int
    status: int
    """Its exit status; negative for the signal that ended it, as in `subprocess`."""
    memory: int
    """The most bytes that it was seen to hold."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A host is gone, with all of its workers."""

    host: str
    because: str


Event = Said | Printed | Ended | Lost


class Crew(Protocol):
    """The workers of one host.

    A launcher waits for several crews at once, with the file descriptors that they
    give, and takes the events of those that have some.
    """

    @property
    def host(self) -> str:
        """The name of the host."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of its workers."""

    def filenos(self) -> Sequence[int]:
        """What to wait for; may change after each `take_events`."""

    def take_events(self) -> Sequence[Event]:
        """What has happened since the last call; does not wait."""

    def free_address(self) -> str:
        """`host:port` where a coordinator of rank 0 can listen now."""

    def start(self, orders: Sequence[Orders]) -> None:
        """Starts the workers of an attempt, with their orders in the order of ranks."""

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to workers that live; to all if none are named."""

    def state_of(self, rank: int) -> str:
        """What the system says of a worker: 'running', 'stopped', 'gone', ..."""

    def stacks_of(self, rank: int) -> str:
        """What the worker has written of its stacks, newest dump only."""

    def close(self) -> None:
        """Kills what lives, with everything that it has started."""
