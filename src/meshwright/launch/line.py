"""The connection between two launchers: signed messages, and a pulse.

Both sides send something every second. Who hears nothing for four seconds, or
something that is not signed as it should be, has lost the other.
"""

import hmac
import json
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from meshwright.launch.handshake import Keys

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 4.0

_MOST_BYTES = 64 * 2**20
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_TAG = 32

Message = dict[str, Any]


class Line:
    """Messages to and from another launcher, which a thread attends to.

    Arguments:
        connection: Open, and past its handshake.
        keys: What the handshake gave.
        silence: Seconds without a word after which the other side is lost.
    """

    def __init__(
        self, connection: socket.socket, keys: Keys, silence: float = SILENCE_SECONDS
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._silence = silence
        self._received: deque[Message] = deque()
        self._sent = self._read = 0
        self._bytes = b""
        self._speaking = threading.Lock()
        self._because: str | None = None
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(silence)
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """Why the other side is lost; None while it is there."""
        return self._because

    @property
    def address(self) -> str:
        """That of this host on the connection."""
        return str(self._connection.getsockname()[0])

    def fileno(self) -> int:
        """Readable when there are messages, or the other side is lost; -1 if closed."""
        return self._bell.fileno()

    def take(self) -> list[Message]:
        """The messages since the last call; does not wait."""
        with suppress(OSError):  # there is no more, or the line is closed
            while self._bell.recv(4096):
                pass
        taken: list[Message] = []
        while self._received:
            taken.append(self._received.popleft())
        return taken

    def take_first(self) -> Message | None:
        """The first of the messages, if there is one; the others stay."""
        return self._received.popleft() if self._received else None

    def wait(self, seconds: float) -> None:
        """Waits until there may be something to take."""
        if not self._received and self._because is None:
            select.select([self], [], [], max(seconds, 0))
            with suppress(OSError):
                self._bell.recv(1)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; nothing happens if the other side is lost."""
        if self._because is not None:
            return
        words = json.dumps(message).encode()
        assert len(words) <= _MOST_BYTES
        with self._speaking:
            tag = _sign(self._keys.outgoing, self._sent, words)
            self._sent += 1
            try:
                self._connection.sendall(_LENGTH.pack(len(words)) + tag + words)
            except OSError as error:
                self.lose(_explain(error))

    def close(self) -> None:
        """Hangs up."""
        self.lose("this side hung up")
        if threading.current_thread() is not self._thread:
            self._thread.join(self._silence)
        for end in (self._connection, self._bell, self._ring):
            end.close()

    def lose(self, because: str) -> None:
        """Gives the other side up."""
        if self._because is None:
            self._because = because
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self.ring()

    def ring(self) -> None:
        """Makes the line readable."""
        with suppress(OSError):  # it rings already
            self._ring.send(b"!")

    def _attend(self) -> None:
        heard = beaten = time.monotonic()
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while self._because is None:
            until = min(beaten + BEAT_SECONDS, heard + self._silence)
            if poll.poll(max(until - time.monotonic(), 0) * 1000):
                heard = time.monotonic()
                self._read_some()
            elif time.monotonic() - heard >= self._silence:
                self.lose(f"it said nothing for {self._silence:g} s")
            if time.monotonic() - beaten >= BEAT_SECONDS:
                beaten = time.monotonic()
                self.send({})

    def _read_some(self) -> None:
        try:
            more = self._connection.recv(1 << 16)
        except OSError as error:
            self.lose(_explain(error))
            return
        if not more:
            self.lose("it closed the connection")
            return
        self._bytes += more
        try:
            while self._because is None and self._read_message():
                pass
        except ValueError as error:
            self.lose(f"the connection brought {error}")

    def _read_message(self) -> bool:
        """Takes one message off the bytes that have come; False if none is whole."""
        if len(self._bytes) < _LENGTH.size:
            return False
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > _MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        start = _LENGTH.size + _TAG
        if len(self._bytes) < start + length:
            return False
        tag, words = self._bytes[_LENGTH.size : start], self._bytes[start:][:length]
        if not hmac.compare_digest(tag, _sign(self._keys.incoming, self._read, words)):
            raise ValueError("a message that the other side has not signed")
        self._bytes = self._bytes[start + length :]
        self._read += 1
        if message := json.loads(words):
            self._received.append(message)
            self.ring()
        return True


def _explain(error: OSError) -> str:
    if isinstance(error, ConnectionError):
        return "it closed the connection"
    return f"the connection broke: {error.strerror or error}"


def _sign(key: bytes, number: int, words: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + words, "sha256")
