"""Where the launchers of a run meet: the head listens, those of other hosts come.

Whoever cannot prove that it belongs to the run is refused, logged, and disturbs
nobody.
"""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from meshwright.errors import MeshwrightError, PeerLostError, RendezvousError
from meshwright.launch.facts import (
    Facts,
    check_folder,
    check_reachable,
    check_same,
    describe_skew,
    find_differences,
    names_of,
    parts_of_gpus,
)
from meshwright.launch.handshake import PATIENCE_SECONDS, Refused, admit
from meshwright.launch.interfaces import is_loopback, is_wildcard, joined, own_address
from meshwright.launch.line import Line

GATHER_SECONDS = 7.0
"""How long launchers may take to come together."""

_MOST_STRANGERS = 64
"""So many may be in the doorway at once; then the first of them has to leave."""
_MOST_LOGGED = 20


@dataclass(frozen=True, slots=True)
class Arrival:
    """A launcher that has proved itself, and said what it is."""

    facts: Facts
    line: Line
    address: str
    skew: float
    """How many seconds its clock is ahead of this one's."""
    uncertain: float
    """By how many seconds that may be wrong."""


class Rendezvous:
    """The head's open door, from before the start until after the end.

    Arguments:
        address: Of this host, to listen on; `host` is what others are told.
        secret: What others must know.
        run: What this launch is called; others must want the same.
        log: Takes lines about strangers and clocks.
        port: 0 for any that is free.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        run: str,
        log: Callable[[str], None],
        port: int = 0,
    ) -> None:
        self._secret, self._run, self._log = secret, run, log
        self._listener = _listen(address, port)
        self.host = own_address() if is_wildcard(address) else address
        self.port = int(self._listener.getsockname()[1])
        self._changed = threading.Condition()
        self._seats: dict[int, Arrival] = {}
        self._doubles: list[tuple[Arrival, str]] = []
        self._gathered = False
        self._parts: dict[int, tuple[int, int]] = {}
        self._refused: list[str] = []
        self._doorway: deque[socket.socket] = deque()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """`address:port` where it listens."""
        return joined(self.host, self.port)

    def gather(
        self,
        expected: Mapping[int, str],
        own: Facts | None = None,
        *,
        seconds: float = GATHER_SECONDS,
        watch: Callable[[], None] = lambda: None,
    ) -> list[Arrival]:
        """Waits until everybody is there, and everybody is the same.

        Arguments:
            expected: Names of the launchers that are to come, by number.
            own: Facts of this launcher, if it has workers too.
            seconds: How long they may take.
            watch: Called now and then; may raise what is known about somebody missing.

        Returns:
            The launchers that came, by number.
        """
        try:
            found = self._wait_for(expected, own, seconds, watch)
            everybody = [*([own] if own else []), *(a.facts for a in found)]
            check_same(everybody)
            check_folder(everybody, self._run)
            if not is_loopback(self.host):
                check_reachable(everybody)
            self._parts = parts_of_gpus(everybody)
        except MeshwrightError as error:
            self.dismiss(error)
            raise
        with self._changed:
            self._gathered = True
        for arrival, name in zip(
            found, names_of([a.facts for a in found]), strict=True
        ):
            arrival.line.send({"welcome": self.part_of(arrival.facts.task)})
            if notice := describe_skew(name, arrival.skew, arrival.uncertain):
                self._log(notice)
        return found

    def part_of(self, task: int) -> tuple[int, int] | None:
        """Which part of the GPUs that it sees a launcher takes; None for all."""
        return self._parts.get(task)

    def come_back(
        self,
        before: Arrival,
        seconds: float,
        watch: Callable[[], None] = lambda: None,
    ) -> Arrival:
        """Waits until a launcher that was lost comes again, or one in its place."""
        task = before.facts.task
        deadline = time.monotonic() + seconds
        while (found := self._seats[task]) is before:
            watch()
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"Host {before.facts.host} was lost ({before.line.lost}), and did "
                    f"not come back within {seconds:g} s.",
                    "All hosts of a run go on together.",
                    f"Look at {before.facts.host}; then start the run again: it goes "
                    "on from its newest checkpoint.",
                )
            with self._changed:
                self._changed.wait(0.1)
        check_same([before.facts, found.facts])
        found.line.send({"welcome": self.part_of(task)})
        return found

    def dismiss(self, error: MeshwrightError) -> None:
        """Sends everybody away, with the reason."""
        beats = [error.received, error.rule, error.change]
        with self._changed:
            everybody = [*self._seats.values(), *(a for a, _ in self._doubles)]
        for arrival in everybody:
            arrival.line.send({"refused": beats})
            arrival.line.close()

    def close(self) -> None:
        """Closes the door; those who are inside stay."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _wait_for(
        self,
        expected: Mapping[int, str],
        own: Facts | None,
        seconds: float,
        watch: Callable[[], None],
    ) -> list[Arrival]:
        deadline = time.monotonic() + seconds
        told = time.monotonic() + GATHER_SECONDS
        while True:
            with self._changed:
                self._check_numbers(expected, own)
                missing = [t for t in expected if not self._is_there(t)]
                if not missing:
                    return [self._seats[task] for task in sorted(expected)]
                self._changed.wait(0.1)
            watch()
            if time.monotonic() > deadline:
                raise self._missing(expected, missing, own, seconds)
            if time.monotonic() > told:
                told = deadline
                self._log(f"still waiting for {_named(expected, missing)}")

    def _is_there(self, task: int) -> bool:
        return task in self._seats and self._seats[task].line.lost is None

    def _check_numbers(self, expected: Mapping[int, str], own: Facts | None) -> None:
        """Whoever has a number that is taken, or that nobody should have."""
        for second, first in self._doubles:
            raise _double(second, first)
        for task, arrival in self._seats.items():
            if own is not None and task == own.task:
                raise _double(arrival, f"{own.host} (this launcher)")
            if task not in expected:
                all_facts = [*([own] if own else []), arrival.facts]
                check_same(all_facts)
                raise RendezvousError(
                    f"{arrival.facts.host} ({arrival.address}) came as task {task}, "
                    f"and the run has tasks {min(expected)} to {max(expected)}.",
                    "All launchers of a run know how many there are.",
                    "Start all of them with the same command.",
                )

    def _missing(
        self,
        expected: Mapping[int, str],
        missing: Sequence[int],
        own: Facts | None,
        seconds: float,
    ) -> RendezvousError:
        there = [a.facts for t, a in sorted(self._seats.items()) if self._is_there(t)]
        there = [*([own] if own else []), *there]
        parts = [
            f"After {seconds:g} s {_named(expected, missing)} had not come to "
            f"{self.address}; there: {', '.join(names_of(there)) or 'nobody'}."
        ]
        if differences := find_differences(there):
            parts.append(f"Those differ too: {'; '.join(differences)}.")
        if self._refused:
            parts.append(f"Refused: {'; '.join(self._refused[:3])}.")
        return RendezvousError(
            " ".join(parts),
            "All launchers of a run come together before it starts.",
            f"Look at the output there; try `nc -vz {self.host} {self.port}` from "
            "there while this one waits (a firewall?), or choose another network with "
            "MESHWRIGHT_INTERFACE.",
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return  # closed
            self._doorway.append(connection)
            if len(self._doorway) > _MOST_STRANGERS:
                with suppress(OSError, IndexError):
                    self._doorway.popleft().shutdown(socket.SHUT_RDWR)
            address = joined(str(peer[0]), int(peer[1]))
            threading.Thread(
                target=self._receive, args=(connection, address), daemon=True
            ).start()

    def _receive(self, connection: socket.socket, address: str) -> None:
        line = None
        try:
            keys = admit(connection, self._secret, self._run)
            began = time.time()
            line = Line(connection, keys)
            arrival = _hear(line, address, began)
        except (Refused, ValueError, TypeError, KeyError) as error:
            self._refuse(address, error)
            if line is not None:
                line.close()
            connection.close()
        else:
            self._seat(arrival)
        finally:
            with suppress(ValueError):
                self._doorway.remove(connection)

    def _refuse(self, address: str, error: Exception) -> None:
        with self._changed:
            self._refused.append(f"{address}: {error}")
            number = len(self._refused)
        if number <= _MOST_LOGGED:
            more = "; no more are told of" if number == _MOST_LOGGED else ""
            self._log(f"refused a connection from {address}: {error}{more}")

    def _seat(self, arrival: Arrival) -> None:
        task = arrival.facts.task
        with self._changed:
            if not self._is_there(task):
                if task in self._seats:
                    self._seats[task].line.close()
                self._seats[task] = arrival
                self._changed.notify_all()
                return
            first = self._seats[task]
            if not self._gathered:
                name = f"{first.facts.host} ({first.address})"
                self._doubles.append((arrival, name))
                self._changed.notify_all()
                return
        error = _double(arrival, f"{first.facts.host} ({first.address})")
        self._log(f"refused a launcher: {error.received}")
        arrival.line.send({"refused": [error.received, error.rule, error.change]})
        arrival.line.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("" if address == "*" else address, port))
        listener.listen(_MOST_STRANGERS * 2)
    except OSError as error:
        listener.close()
        raise RendezvousError(
            f"The launcher cannot listen on {joined(address, port)}: {error.strerror}.",
            "It listens on an address of its own host, on a port that nobody uses.",
            "Choose an interface with MESHWRIGHT_INTERFACE, or look at "
            f"`ss -ltnp sport = :{port}` for who has the port.",
        ) from error
    return listener


def _hear(line: Line, address: str, began: float) -> Arrival:
    """What the launcher says of itself; it says that first."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (words := line.take_first()) is None:
        if line.lost is not None or time.monotonic() > deadline:
            raise Refused(line.lost or "it did not say what it is")
        line.wait(deadline - time.monotonic())
    now = time.time()
    return Arrival(
        facts=Facts.from_json(words["facts"]),
        line=line,
        address=address,
        skew=float(words["clock"]) - (began + now) / 2,
        uncertain=(now - began) / 2,
    )


def _double(second: Arrival, first: str) -> RendezvousError:
    facts = second.facts
    return RendezvousError(
        f"Task {facts.task} came twice: {first}, and {facts.host} ({second.address}).",
        "Each launcher of a run has a number of its own.",
        "Look for a second copy of the job, a host that is named twice, or variables "
        "with the task's number that were copied.",
    )


def _named(expected: Mapping[int, str], tasks: Sequence[int]) -> str:
    return ", ".join(expected[task] for task in tasks)
