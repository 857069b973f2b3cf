"""The workers of another host, through the agent there."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

from meshwright.cluster.orders import Orders
from meshwright.errors import PeerLostError, RendezvousError
from meshwright.launch.crew import Ended, Event, Lost, Printed, Said
from meshwright.launch.job import ranks_of
from meshwright.launch.line import Message
from meshwright.launch.rendezvous import Arrival

EVENTS: dict[str, type[Said] | type[Printed] | type[Ended]] = {
    kind.__name__: kind for kind in (Said, Printed, Ended)
}
"""What an agent passes on, by the name that it has on the line."""

_PATIENCE_SECONDS = 3.0
_LONG_PATIENCE_SECONDS = 30.0
"""For workers to be started, or killed with everything that they have started."""


class RemoteCrew:
    """What an agent does, as a `Crew`.

    Arguments:
        arrival: The agent.
        come_back: Waits for the next agent of that host, when this one is lost.
    """

    def __init__(
        self, arrival: Arrival, come_back: Callable[[Arrival], Arrival] | None = None
    ) -> None:
        self._arrival = arrival
        self._come_back = come_back
        self._events: deque[Event] = deque()
        self._told = False
        self._asked = 0

    @property
    def host(self) -> str:
        """The name of the host."""
        return self._arrival.facts.host

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of its workers."""
        return ranks_of(self._arrival.facts.task, self._arrival.facts.processes)

    def filenos(self) -> Sequence[int]:
        """What to wait for; nothing any more when the loss of the host was told."""
        number = self._arrival.line.fileno()
        return () if self._told or number < 0 else (number,)

    def take_events(self) -> Sequence[Event]:
        """What the agent has passed on, and that it is lost."""
        self._listen()
        taken = [*self._events]
        self._events.clear()
        lost = self._arrival.line.lost
        if lost is not None and not self._told:
            self._told = True
            taken.append(Lost(self.host, lost))
        return taken

    def free_address(self) -> str:
        """`host:port` on the interface by which the agent came."""
        self._be_there()
        return str(self._must("free_address", _PATIENCE_SECONDS))

    def start(self, orders: Sequence[Orders]) -> None:
        """Starts the workers, on a host that has come back if it was lost."""
        self._be_there()
        sent = [asdict(order) for order in orders]
        self._must("start", _LONG_PATIENCE_SECONDS, orders=sent)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to workers that live; to all if none are named."""
        chosen = None if ranks is None else list(ranks)
        self._ask("signal", _PATIENCE_SECONDS, signal=number, ranks=chosen)

    def state_of(self, rank: int) -> str:
        """What the system there says of a worker; 'gone' with its host."""
        answer = self._ask("state_of", _PATIENCE_SECONDS, rank=rank)
        return "gone" if answer is None else str(answer["answer"])

    def stacks_of(self, rank: int) -> str:
        """What the worker has written of its stacks."""
        answer = self._ask("stacks_of", _PATIENCE_SECONDS, rank=rank)
        return "" if answer is None else str(answer["answer"])

    def kill(self) -> None:
        """Kills the workers; the agent stays, and can start others."""
        self._ask("kill", _LONG_PATIENCE_SECONDS)

    def close(self) -> None:
        """Kills the workers; the agent stays until it hears how the run has ended."""
        self.kill()

    def dismiss(self, status: int) -> None:
        """Sends the agent home; its exit status is that of the run."""
        line = self._arrival.line
        line.send({"leave": status})
        deadline = monotonic() + _PATIENCE_SECONDS
        while line.lost is None and monotonic() < deadline:
            line.wait(deadline - monotonic())
            self._listen()
        line.close()

    def _be_there(self) -> None:
        """Waits for a host that was lost."""
        lost = self._arrival.line.lost
        if lost is None:
            return
        self._arrival.line.close()
        if self._come_back is None:
            raise _gone(self.host, lost)
        self._arrival = self._come_back(self._arrival)
        self._events.clear()
        self._told = False

    def _must(self, what: str, seconds: float, **details: Any) -> Any:
        answer = self._ask(what, seconds, **details)
        if answer is None:
            raise _gone(self.host, self._arrival.line.lost or "it does not answer")
        if "failed" in answer:
            received, rule, change = answer["failed"]
            raise RendezvousError(f"On {self.host}: {received}", rule, change)
        return answer["answer"]

    def _ask(self, what: str, seconds: float, **details: Any) -> Message | None:
        """Has the agent do something; None if it is lost before it answers."""
        line = self._arrival.line
        self._asked += 1
        line.send({"do": what, "number": self._asked, **details})
        deadline = monotonic() + seconds
        while True:
            for message in self._listen():
                if message.get("to") == self._asked:
                    if self._events:
                        line.ring()
                    return message
            if line.lost is not None:
                return None
            if monotonic() > deadline:
                line.lose(f"it did not do {what!r} within {seconds:g} s")
                return None
            line.wait(deadline - monotonic())

    def _listen(self) -> list[Message]:
        """Keeps events, and returns answers."""
        answers = []
        for message in self._arrival.line.take():
            if "events" in message:
                self._events += [EVENTS[k](**v) for k, v in message["events"]]
            else:
                answers.append(message)
        return answers


def _gone(host: str, because: str) -> PeerLostError:
    return PeerLostError(
        f"Host {host} is lost: {because}.",
        "All hosts of a run go on together.",
        f"Look at {host}; then start the run again: it goes on from its newest "
        "checkpoint.",
    )
