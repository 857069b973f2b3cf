"""One worker on this host: its process, what it tells, what it prints."""

import contextlib
import fcntl
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cluster import channel, orders
from meshwright.cluster.orders import Orders
from meshwright.launch.crew import Ended, Event, Printed, Said, Stream
from meshwright.launch.output import Output

import psutil

_MOST_AT_ONCE = 2**20
_LONGEST_FACT = 2**22
_ANSWER_SECONDS = 2.0
_LOG = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalWorker:
    """A process that was started to be worker `rank`, in a session of its own.

    Arguments:
        command: What is run.
        order: What it is to do.
        environment: Its variables, without orders.
        cores: Those that it may use; any if there are none.
        terminal: Whether what it prints goes to a terminal in the end.
    """

    def __init__(
        self,
        command: Sequence[str],
        order: Orders,
        environment: Mapping[str, str],
        cores: Sequence[int] = (),
        *,
        terminal: bool = False,
    ) -> None:
        self.rank = order.rank
        self.has_ended = False
        self._told = b""
        self._stacks = order.folder / f"stacks/{order.attempt}-{order.rank}.txt"
        self._stacks_seen = 0
        self._log = os.open(
            order.folder / f"logs/{order.attempt}-{order.rank}.txt", _LOG, 0o600
        )
        self._line, theirs = socket.socketpair()
        self._line.setblocking(False)
        sources, sinks = _open_terminal() if terminal else _open_pipes()
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sinks[0],
                stderr=sinks[-1],
                env={
                    **environment,
                    orders.VARIABLE: order.as_text(),
                    channel.VARIABLE: str(theirs.fileno()),
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
            for sink in sinks:
                os.close(sink)
        self._end = _open_end(self.process.pid)
        streams: tuple[Stream, ...] = ("stdout", "stderr")
        self._outputs = {
            stream: Output(source, self._log)
            for stream, source in zip(streams, sources, strict=False)
        }
        if cores and hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # it may have ended already
                os.sched_setaffinity(self.process.pid, cores)

    def filenos(self) -> list[int]:
        """What has something to read when something has happened."""
        outputs = [output.source for output in self._outputs.values()]
        numbers = (self._line.fileno(), self._end, *outputs)
        return [number for number in numbers if number is not None and number >= 0]

    def take_events(self) -> list[Event]:
        """What has happened since the last call; does not wait."""
        status, usage = self._look_for_end()
        events: list[Event] = []
        for stream, output in self._outputs.items():
            lines = output.take() if status is None else output.take_last()
            events += [Printed(self.rank, stream, line) for line in lines]
            if trouble := output.take_trouble():
                events.append(self._complain(trouble))
        events += [Said(self.rank, facts) for facts in self._read_facts()]
        if status is not None:
            self.has_ended = True
            events.append(Ended(self.rank, status, _peak_bytes(usage)))
        return events

    def answer(self, facts: Mapping[str, Any]) -> None:
        """Tells it something that it waits for; it may have ended."""
        with contextlib.suppress(OSError):
            self._line.settimeout(_ANSWER_SECONDS)  # it reads, unless it was stopped
            self._line.sendall(f"{json.dumps(facts)}\n".encode())
            self._line.setblocking(False)

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        if number == signal.SIGUSR1:
            with contextlib.suppress(OSError):
                self._stacks_seen = self._stacks.stat().st_size
        if not self.has_ended:
            self.process.send_signal(number)

    def state(self) -> str:
        """What the system says of it."""
        try:
            state = str(psutil.Process(self.process.pid).status())
        except psutil.Error:
            return "gone"
        return "gone" if state == psutil.STATUS_ZOMBIE else state

    def stacks(self) -> str:
        """The newest dump of its stacks, or where the system says that it is."""
        with contextlib.suppress(OSError), self._stacks.open(errors="replace") as file:
            file.seek(self._stacks_seen)
            if dump := file.read().strip():
                return dump
        call = _words(self.process.pid, "syscall").split()[:1]
        place = _words(self.process.pid, "wchan")
        return (
            "It wrote no stacks. The system says: "
            f"{self.state()}, system call {' '.join(call) or 'unknown'}, "
            f"waits in {place if place.strip('0') else 'no place that it tells'}."
        )

    def kill(self) -> None:
        """Ends it with everything that it has started, and waits until that is done."""
        others = _started_by(self.process.pid)
        for process in others:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if self._is_gone() and not any(map(_lives, others)):
                break
            time.sleep(0.005)
        self.has_ended = True

    def close(self) -> list[Event]:
        """Lets go of it; returns the last of what it printed."""
        last: list[Event] = [
            Printed(self.rank, stream, line)
            for stream, output in self._outputs.items()
            for line in output.take_last()
        ]
        for output in self._outputs.values():
            output.close()
        self._line.close()
        os.close(self._log)
        if self._end is not None:
            os.close(self._end)
        return last

    def _is_gone(self) -> bool:
        return self.has_ended or self._look_for_end()[0] is not None

    def _look_for_end(self) -> tuple[int | None, "resource.struct_rusage | None"]:
        if self.process.returncode is not None:
            return (None if self.has_ended else self.process.returncode), None
        try:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has waited for it
            pid, status, usage = self.process.pid, 0, None
        if pid == 0:
            return None, None
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return self.process.returncode, usage

    def _read_facts(self) -> list[dict[str, Any]]:
        if self._line.fileno() < 0:
            return []
        try:
            data = self._line.recv(_MOST_AT_ONCE)
            while data:
                self._told += data
                data = self._line.recv(_MOST_AT_ONCE)
            self._line.close()
        except BlockingIOError:
            pass
        except OSError:
            self._line.close()
        *whole, self._told = self._told.split(b"\n")
        if len(self._told) > _LONGEST_FACT:
            self._told = b""
        return [facts for line in whole if (facts := _parse(line)) is not None]

    def _complain(self, error: OSError) -> Said:
        text = f"what rank {self.rank} prints is no longer kept in its log: {error}"
        return Said(self.rank, {"notice": text})


def _open_end(pid: int) -> int | None:
    """What has something to read when a process ends, where the system has that."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _open_pipes() -> tuple[list[int], list[int]]:
    pairs = [os.pipe(), os.pipe()]
    for source, _ in pairs:
        os.set_blocking(source, False)
    return [source for source, _ in pairs], [sink for _, sink in pairs]


def _open_terminal() -> tuple[list[int], list[int]]:
    """A terminal like ours, so that progress bars and colours stay as they are."""
    ours, theirs = pty.openpty()
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(sys.__stdout__ or 1, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    os.set_blocking(ours, False)
    return [ours], [theirs]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None


def _peak_bytes(usage: "resource.struct_rusage | None") -> int:
    if usage is None:
        return 0
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _started_by(pid: int) -> list[psutil.Process]:
    """Its descendants, and what is left of its group where it has ended before."""
    found: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        found.update(psutil.Process(pid).children(recursive=True))
    for other in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if other != pid and os.getpgid(other) == pid:
                found.add(psutil.Process(other))
    return list(found)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _words(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    except OSError:
        return ""
