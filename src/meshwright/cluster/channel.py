"""The line from a process to the launcher that watches it.

The launcher hears what the process is doing, one JSON object a line. It only listens:
signals are what goes the other way. When the launcher is gone, so is the process.
"""

import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

VARIABLE = "MESHWRIGHT_CHANNEL"
"""The environment variable with the number of the socket that was inherited."""

Section = Literal["start", "script", "compile", "step", "checkpoint", "end"]
"""What a process can be at; each has a time limit of its own."""

ORPHANED = 6
"""The exit status of a process whose launcher is gone."""


class Channel:
    """What a process tells its launcher; without one nobody hears it.

    Saying the same section again costs nothing. Threads may say things at any time.

    Attributes:
        visits: How many times each section was entered.
    """

    def __init__(self, line: socket.socket | None) -> None:
        self._line = line
        self._speaking = threading.Lock()
        self._section: Section | None = None
        self.visits: Counter[Section] = Counter()
        if line is not None:
            threading.Thread(target=self._follow, daemon=True).start()

    @property
    def is_heard(self) -> bool:
        """Whether there is a launcher."""
        return self._line is not None

    def enter(self, section: Section) -> None:
        """Says what comes next."""
        if section != self._section:
            self._section = section
            self.visits[section] += 1
            self.say(section=section)

    def finish_step(self, step: int, host: float = 0.0) -> None:
        """Says that a step is done.

        Arguments:
            step: Its number, counted over the whole run.
            host: Seconds that this host spent on its own for each step since the last
                one that it told.
        """
        self.say(step=step, host=round(host, 6))

    def live(self) -> None:
        """Says that work goes on that no step counts."""
        self.say(alive=True)

    def say(self, **facts: Any) -> None:
        """Says anything that fits into JSON."""
        if self._line is None:
            return
        words = f"{json.dumps(facts)}\n".encode()
        with self._speaking:
            try:
                self._line.sendall(words)
            except OSError:
                os._exit(ORPHANED)

    def _follow(self) -> None:
        """Waits for the end of the launcher, which never says anything."""
        assert self._line is not None
        try:
            while self._line.recv(1):
                pass
        finally:
            os._exit(ORPHANED)


@cache
def channel() -> Channel:
    """That of this process."""
    number = os.environ.get(VARIABLE)
    return Channel(None if number is None else socket.socket(fileno=int(number)))


@contextmanager
def telling_of_compiling(is_new: bool) -> Iterator[None]:
    """Says that what happens inside compiles, if it is new; then a step goes on."""
    if is_new:
        channel().enter("compile")
    yield
    if is_new:
        channel().enter("step")
