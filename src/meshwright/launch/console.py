"""What people see of a run: its output, and what the launcher has to say."""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from meshwright.launch.crew import Printed
from meshwright.launch.output import LONGEST_LINE


class Console:
    """Shows the output of workers, and lines of the launcher's between.

    With `all_ranks`, every line bears the number of its process. Otherwise the first
    process is shown as it prints, progress bars included.

    Arguments:
        all_ranks: Whether all processes are shown.
        is_quiet: Whether nothing is shown.
        names: What processes are called, if not by their numbers.
    """

    def __init__(
        self,
        *,
        all_ranks: bool = False,
        is_quiet: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        self._names = names
        self._all_ranks = all_ranks
        self._is_quiet = is_quiet
        self._is_in_line = False
        self._parts: dict[tuple[int, str], str] = {}

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at what is shown."""
        return not self._is_quiet and sys.stdout.isatty() and sys.stderr.isatty()

    def shows(self, rank: int) -> bool:
        """Whether the output of a process is shown."""
        return self._all_ranks or rank == 0

    def show(self, printed: Printed) -> None:
        """Shows something that a worker printed."""
        if not self.shows(printed.rank):
            return
        stream = sys.stdout if printed.stream == "stdout" else sys.stderr
        if not self._all_ranks:
            self._write(stream, printed.line)
            self._is_in_line = not printed.line.endswith("\n")
            return
        key = (printed.rank, printed.stream)
        line = self._parts.pop(key, "") + printed.line
        if line.endswith(("\n", "\r")) or len(line) > LONGEST_LINE:
            self._write(stream, f"[{self._name(printed.rank)}] {line.rstrip()}\n")
        else:
            self._parts[key] = line

    def show_rest(self) -> None:
        """Shows lines that were begun by processes that have ended."""
        for (rank, name), line in self._parts.items():
            stream = sys.stdout if name == "stdout" else sys.stderr
            self._write(stream, f"[{self._name(rank)}] {line.rstrip()}\n")
        self._parts.clear()

    def say(self, text: str) -> None:
        """Says a line on standard output."""
        self._say(sys.stdout, text)

    def warn(self, text: str) -> None:
        """Says a line on standard error."""
        self._say(sys.stderr, text)

    def quote(self, rank: int | None, lines: Sequence[str]) -> None:
        """Shows lines of a process on standard error, with its number."""
        self._end_line(sys.stderr)
        for line in lines:
            self._write(sys.stderr, f"[{self._name(rank)}] {line.rstrip()}\n")

    def _name(self, rank: int | None) -> str:
        return f"rank {rank}" if not self._names or rank is None else self._names[rank]

    def _say(self, stream: TextIO, text: str) -> None:
        self._end_line(stream)
        self._write(stream, f"meshwright: {text}\n")

    def _end_line(self, stream: TextIO) -> None:
        if self._is_in_line:
            self._write(stream, "\n")
            self._is_in_line = False

    def _write(self, stream: TextIO, text: str) -> None:
        """A reader that has gone away, or a full disk, does not end a run."""
        if self._is_quiet:
            return
        try:
            encoding = stream.encoding or "utf-8"
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
        except BrokenPipeError:  # so that Python does not fail at its exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            pass
