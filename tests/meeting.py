"""Launchers of a run on addresses of this machine, for tests."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from meshwright.launch.agent import join
from meshwright.launch.facts import Facts
from meshwright.launch.line import Line
from meshwright.launch.rendezvous import Rendezvous

SECRET = b"known to this run only"
RUN = "run 7"

HEAD = Facts(
    host="a",
    task=0,
    tasks=2,
    processes=1,
    script="train.py (123456789abc)",
    arguments=("--epochs", "3"),
    versions={"python": "3.12.1", "keras": "3.15.1", "jax": "0.12.0"},
    devices="8 x GPU H200",
    folder=RUN,
)


def facts_of(host: str, task: int, **changes: Any) -> Facts:
    return replace(HEAD, host=host, task=task, **changes)


class Open:
    """A rendezvous, and what it has logged."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.logged: list[str] = []
        self.rendezvous = Rendezvous(
            address, secret=SECRET, run=RUN, log=self.logged.append
        )
        self._lines: list[Line] = []

    def arrive(self, facts: Facts, *, secret: bytes = SECRET, run: str = RUN) -> Line:
        """A launcher that comes; it does not wait for the others."""
        address = self.rendezvous.address
        line = join(address, secret=secret, run=run, facts=facts)
        self._lines.append(line)
        return line

    def stranger(self, source: str = "127.0.0.9") -> socket.socket:
        """A connection from an address, without a word."""
        return socket.create_connection(
            (self.rendezvous.host, self.rendezvous.port), 5, (source, 0)
        )

    def close(self) -> None:
        for line in self._lines:
            line.close()
        seats, doubles = self.rendezvous._seats, self.rendezvous._doubles
        for arrival in (*seats.values(), *(double for double, _ in doubles)):
            arrival.line.close()
        self.rendezvous.close()


@contextmanager
def open_door(address: str = "127.0.0.1") -> Iterator[Open]:
    opened = Open(address)
    try:
        yield opened
    finally:
        opened.close()
