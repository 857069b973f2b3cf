"""Several scripts at once, each on its own part of this host.

They have nothing to do with each other: if one fails, the others go on.
"""

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ConfigurationError, RunError
from meshwright.launch.console import Console
from meshwright.launch.crew import Printed, Stream
from meshwright.launch.guarding import Guard
from meshwright.launch.output import Output
from meshwright.launch.shares import Share, shares_of_host
from meshwright.launch.stop import StopRequests

GRACE_SECONDS = 30.0
"""How long scripts may take to end after they were asked to."""

_LOOK_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptEnd:
    """How a script ended."""

    command: str
    """The script and its arguments."""
    name: str
    """What its lines begin with."""
    share: str
    """The devices that it had."""
    status: int
    """Its exit status; negative for the signal that ended it, as in `subprocess`."""
    seconds: float
    """How long it ran."""

    @property
    def exit_code(self) -> int:
        """Its exit status as shells count."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def how(self) -> str:
        """Its end in words."""
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        return f"was ended by {signal.Signals(-self.status).name}"


def parse_commands(given: Sequence[str]) -> list[list[str]]:
    """Scripts with their arguments, each written as one word of a command line.

    Raises:
        RunError: One of the scripts is not there.
    """
    commands = [[word] if Path(word).is_file() else shlex.split(word) for word in given]
    for word, command in zip(given, commands, strict=True):
        if not command or not Path(command[0]).is_file():
            raise RunError(
                f"each received {word!r}, and {(command or [''])[0]!r} is no file.",
                "Every word is a script, or a script with its arguments in quotes.",
                "Write, for example: meshwright each a.py 'b.py --epochs 3'",
            )
    return commands


def name_scripts(commands: Sequence[Sequence[str]]) -> list[str]:
    """What the lines of each script begin with.

    >>> name_scripts([["a.py"], ["b/c.py"], ["c.py", "-x"]])
    ['a', 'c 1', 'c 2']
    """
    stems = [Path(command[0]).stem for command in commands]
    return [
        stem if stems.count(stem) == 1 else f"{stem} {stems[: index + 1].count(stem)}"
        for index, stem in enumerate(stems)
    ]


def run_each(
    commands: Sequence[Sequence[str]], console: Console, stop: StopRequests
) -> list[ScriptEnd]:
    """Runs scripts side by side until the last of them has ended.

    Arguments:
        commands: Each a script and its arguments.
        console: Shows what they print; knows them by their numbers.
        stop: A request is passed on to all of them; a second one kills them.

    Returns:
        How they ended, in the order in which they did.

    Raises:
        ConfigurationError: The GPUs of this host cannot be divided between them.
    """
    shares, names = _divide_host(len(commands)), name_scripts(commands)
    guard = Guard()
    running: list[_Running] = []
    ends: list[ScriptEnd] = []
    try:
        for number, (command, share) in enumerate(zip(commands, shares, strict=True)):
            running.append(_Running(number, names[number], command, share))
            guard.watch(running[-1].group)
            console.say(f"[{names[number]}] is {shlex.join(command)} on {share.says}")
        _follow(running, ends, console, stop)
    finally:
        for script in running:
            script.kill()
        guard.close()
    console.show_rest()
    return ends


class _Running:
    """A script that runs, in a session of its own."""

    def __init__(
        self, number: int, name: str, command: Sequence[str], share: Share
    ) -> None:
        self.number = number
        self._name = name
        self._command = shlex.join(command)
        self._share = share.says
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **share.environment},
            start_new_session=True,
        )
        if share.cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it may have ended already
                os.sched_setaffinity(self._process.pid, share.cores)
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._outputs: dict[Stream, Output] = {}
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        for stream in streams:
            pipe = pipes[stream]
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._outputs[stream] = Output(os.dup(pipe.fileno()), self._nowhere)
            pipe.close()

    def sources(self) -> list[int]:
        """What has something to read when it has printed something."""
        outputs = self._outputs.values()
        return [output.source for output in outputs if output.source is not None]

    def show(self, console: Console, *, is_last: bool = False) -> None:
        """Shows what it has printed."""
        for stream, output in self._outputs.items():
            for line in output.take_last() if is_last else output.take():
                console.show(Printed(self.number, stream, line))

    def end(self) -> ScriptEnd | None:
        """How it ended; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        return ScriptEnd(
            command=self._command,
            name=self._name,
            share=self._share,
            status=status,
            seconds=time.monotonic() - self._began,
        )

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it with everything that it has started, and lets go of it."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for output in self._outputs.values():
            output.close()
        with contextlib.suppress(OSError):
            os.close(self._nowhere)

    @property
    def group(self) -> int:
        """The processes that end with it."""
        return self._process.pid


def _follow(
    running: Sequence[_Running],
    ends: list[ScriptEnd],
    console: Console,
    stop: StopRequests,
) -> None:
    """Shows what scripts print until all have ended, and passes requests on."""
    alive = list(running)
    asked_at: float | None = None
    while alive:
        _wait([stop.fileno(), *(n for script in alive for n in script.sources())])
        stop.drain()
        if stop.is_wanted and asked_at is None:
            asked_at = time.monotonic()
            for script in alive:
                script.signal(stop.first or signal.SIGTERM)
        is_late = asked_at and time.monotonic() - asked_at > GRACE_SECONDS
        if stop.is_urgent or is_late:
            for script in alive:
                script.signal(signal.SIGKILL)
        for script in list(alive):
            end = script.end()
            script.show(console, is_last=end is not None)
            if end is not None:
                alive.remove(script)
                ends.append(end)
                if end.status and alive and not stop.is_wanted:
                    console.warn(f"[{end.name}] {end.how}; the others go on")


def _wait(sources: Sequence[int]) -> None:
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        selector.select(_LOOK_SECONDS)


def _divide_host(number: int) -> tuple[Share, ...]:
    try:
        return shares_of_host(number, os.environ)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"each received {number} scripts. {error.received}",
            "Every script gets as many GPUs as the others, and none is shared.",
            "Run another number of scripts, or make other GPUs visible with "
            "CUDA_VISIBLE_DEVICES; JAX_PLATFORMS=cpu computes on the CPU.",
        ) from error
