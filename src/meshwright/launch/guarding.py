"""Who tells the guard which processes it is to end when this one is gone."""

import contextlib
import subprocess
import sys
from types import TracebackType
from typing import Self

from meshwright.launch import guard


class Guard:
    """A process that kills process groups when this process ends, however it ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def watch(self, group: int) -> None:
        """From now on, a group ends with this process."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """A group has ended, and its number may be that of another."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Ends the guard; it kills what is not forgotten."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # without a guard, workers watch themselves
            self._process.stdin.write(words.encode())
