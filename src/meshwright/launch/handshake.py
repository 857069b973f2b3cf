"""How two launchers prove to each other that they belong to the same run.

The head speaks first. All messages have fixed sizes, so that a stranger cannot make
it wait for, or hold, more than that:

    head  → agent   greeting, a nonce
    agent → head    greeting, its nonce, which run it wants, a proof
    head  → agent   whether it may stay, a proof

A proof is an HMAC over both nonces and the run, with the secret; proofs of the two
sides differ, so none can be sent back. The keys of the messages that follow are made
of the same: whoever listens can read them, but nobody can put in, change, repeat or
swap any.
"""

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

PATIENCE_SECONDS = 3.0
"""How long a stranger may take to show that it is none."""

_GREETING = b"meshwright run 1"
_NONCE = 32
_DIGEST = 32
_RUN = 16
_WELCOME, _OTHER_SECRET, _OTHER_RUN = range(3)


class Refused(Exception):
    """The other side is not one of this run's, or does not take this one for one."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What the messages of a connection are signed with, for each direction."""

    outgoing: bytes
    incoming: bytes


def admit(
    connection: socket.socket,
    secret: bytes,
    run: str,
    seconds: float = PATIENCE_SECONDS,
) -> Keys:
    """The head's side; raises `Refused` with the reason if it is a stranger."""
    deadline = time.monotonic() + seconds
    mine = secrets.token_bytes(_NONCE)
    _send(connection, _GREETING + mine, deadline)
    answer = _receive(
        connection, _GREETING, len(_GREETING) + _NONCE + _RUN + _DIGEST, deadline
    )
    theirs, asked, proof = (
        answer[len(_GREETING) :][:_NONCE],
        answer[-_RUN - _DIGEST : -_DIGEST],
        answer[-_DIGEST:],
    )
    nonces = mine + theirs
    if asked != _name_of(run):
        _send(connection, bytes([_OTHER_RUN]) + bytes(_DIGEST), deadline)
        raise Refused("it belongs to another run")
    if not hmac.compare_digest(proof, _sign(secret, b"agent", nonces, run)):
        _send(connection, bytes([_OTHER_SECRET]) + bytes(_DIGEST), deadline)
        raise Refused("it does not know the run's secret")
    _send(connection, bytes([_WELCOME]) + _sign(secret, b"head", nonces, run), deadline)
    return Keys(
        outgoing=_sign(secret, b"from the head", nonces, run),
        incoming=_sign(secret, b"from the agent", nonces, run),
    )


def introduce(
    connection: socket.socket,
    secret: bytes,
    run: str,
    seconds: float = PATIENCE_SECONDS,
) -> Keys:
    """The agent's side; raises `Refused` if it may not stay, or is at a stranger's."""
    deadline = time.monotonic() + seconds
    greeting = _receive(connection, _GREETING, len(_GREETING) + _NONCE, deadline)
    mine = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_GREETING) :] + mine
    proof = _sign(secret, b"agent", nonces, run)
    _send(connection, _GREETING + mine + _name_of(run) + proof, deadline)
    answer = _receive(connection, b"", 1 + _DIGEST, deadline)
    if answer[0] == _OTHER_RUN:
        raise Refused("the launcher there belongs to another run")
    if answer[0] != _WELCOME:
        raise Refused("the launcher there has another secret")
    if not hmac.compare_digest(answer[1:], _sign(secret, b"head", nonces, run)):
        raise Refused("whoever listens there does not know the run's secret")
    return Keys(
        outgoing=_sign(secret, b"from the agent", nonces, run),
        incoming=_sign(secret, b"from the head", nonces, run),
    )


def _name_of(run: str) -> bytes:
    return hashlib.sha256(run.encode()).digest()[:_RUN]


def _sign(secret: bytes, purpose: bytes, nonces: bytes, run: str) -> bytes:
    """Parts of fixed size come first, so that no two messages read the same."""
    words = hashlib.sha256(purpose).digest() + nonces + run.encode()
    return hmac.digest(secret, words, "sha256")


def _send(connection: socket.socket, words: bytes, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        connection.sendall(words)
    except OSError as error:
        raise Refused(f"the connection broke: {error}") from error


def _receive(
    connection: socket.socket, beginning: bytes, size: int, deadline: float
) -> bytes:
    """Waits for a whole message, but not for the rest of one that begins wrong."""
    words = b""
    while len(words) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            more = connection.recv(size - len(words))
        except TimeoutError as error:
            raise Refused(f"it said {len(words)} of {size} bytes in time") from error
        except OSError as error:
            raise Refused(f"the connection broke: {error}") from error
        if not more:
            raise Refused(f"it left after {len(words)} of {size} bytes")
        words += more
        known = min(len(words), len(beginning))
        if words[:known] != beginning[:known]:
            raise Refused(f"it began with {words[:20]!r}, which is no greeting")
    return words
