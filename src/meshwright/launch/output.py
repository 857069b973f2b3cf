"""What a process prints, cut into lines and kept whole in a file."""

import codecs
import os
import re
import time
from itertools import pairwise

LONGEST_LINE = 65_536
"""Characters after which a line is passed on in parts."""

_PATIENCE_SECONDS = 0.2
_MOST_AT_ONCE = 2**20
_MOST_LAST_READS = 64
_END = re.compile(r"\r\n|\n|\r(?!\Z)")
"""The end of a line; a carriage return that comes last may be half of one."""


class Lines:
    """Cuts bytes into lines, whatever the bytes are.

    >>> lines = Lines()
    >>> lines.feed(b"one\\n 10%\\r 2"), lines.feed(b"0%\\r\\n\\xff\\n")
    (['one\\n', ' 10%\\r'], [' 20%\\n', '\\ufffd\\n'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now."""
        text = self._rest + self._decoder.decode(data)
        ends = [0, *(found.end() for found in _END.finditer(text))]
        lines = [text[begin:end] for begin, end in pairwise(ends)]
        self._rest = text[ends[-1] :]
        while len(self._rest) > LONGEST_LINE:
            lines.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return [line.replace("\r\n", "\n") for line in lines]

    def flush(self) -> list[str]:
        """What there is of a line that is not complete."""
        rest, self._rest = self._rest, ""
        return [rest] if rest else []


class Output:
    """The reading end of what a process prints.

    Arguments:
        source: The descriptor to read from, which does not block; closed at its end.
        log: The descriptor of the file that gets every byte.
    """

    def __init__(self, source: int, log: int) -> None:
        self.source: int | None = source
        self._log = log
        self._lines = Lines()
        self._read_at = time.monotonic()
        self._trouble: OSError | None = None
        self._is_kept = True

    def take(self) -> list[str]:
        """The lines that have come; does not wait."""
        data = self._read()
        if data:
            self._read_at = time.monotonic()
            return self._lines.feed(data)
        if time.monotonic() - self._read_at > _PATIENCE_SECONDS:
            return self._lines.flush()
        return []

    def take_last(self) -> list[str]:
        """Everything that is left."""
        lines: list[str] = []
        for _ in range(_MOST_LAST_READS):  # what it has started may still print
            lines += self._lines.feed(self._read())
        return lines + self._lines.flush()

    def take_trouble(self) -> OSError | None:
        """Why the file does not have everything; said once."""
        trouble, self._trouble = self._trouble, None
        return trouble

    def close(self) -> None:
        """Stops to read."""
        if self.source is not None:
            os.close(self.source)
            self.source = None

    def _read(self) -> bytes:
        if self.source is None:
            return b""
        try:
            data = os.read(self.source, _MOST_AT_ONCE)
        except BlockingIOError:
            return b""
        except OSError:  # a terminal whose other end is closed
            data = b""
        if not data:
            self.close()
        elif self._is_kept:
            self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._log, data) :]
        except OSError as error:  # a full disk does not end a run
            self._is_kept = False
            self._trouble = error
