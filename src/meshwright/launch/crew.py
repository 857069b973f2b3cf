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
    """A worker printed something."""

    rank: int
    stream: Stream
    line: str
    """A line with its end, a line feed or a carriage return; without one if the worker
    has not gone on for a while, or if the line is a very long one."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker has ended."""

    rank: int
    status: int
    """Its exit status; negative for the signal that ended it, as in `subprocess`."""
    memory: int
    """The most bytes that it was seen to hold."""
    memory_of_host: int = 0
    """What its host has, or its control group may use; 0 if that is not known."""
    killed_for_memory: bool = False
    """Whether the system ended a process for lack of memory since the start."""


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
        """What the worker wrote of its stacks after the newest SIGUSR1.

        If it could not, what the system says about where it is.
        """

    def kill(self) -> None:
        """Kills what lives, with all that it has started; `start` may come again."""

    def close(self) -> None:
        """Kills what lives, and lets go of the host."""
