"""Being asked to stop, as the launcher is: Ctrl-C, SIGTERM, a terminal that closes."""

import contextlib
import signal
import socket
import threading
from types import FrameType, TracebackType
from typing import Any, Self

PREEMPTED, INTERRUPTED = 75, 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequests:
    """Counts requests to stop, and wakes up whoever waits for `fileno`.

    The first one is a wish to stop in good order, the second one to stop at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._before: dict[int, Any] = {}
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python lets only the main thread hear of signals
        for number in _SIGNALS:
            # Under nohup it stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        """What has something to read after a request."""
        return self._ours.fileno()

    def drain(self) -> None:
        """Forgets that it had something to read."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    @property
    def is_wanted(self) -> bool:
        """Whether somebody asked to stop."""
        return self.count > 0

    @property
    def is_urgent(self) -> bool:
        """Whether somebody asked again."""
        return self.count > 1

    @property
    def exit_code(self) -> int:
        """The status that says how it was asked for."""
        return INTERRUPTED if self.first == signal.SIGINT else PREEMPTED

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        with contextlib.suppress(OSError):
            self._theirs.send(b"!")
