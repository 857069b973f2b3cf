"""What the launchers of a run prove to each other that they know."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import RendezvousError

VARIABLE = "MESHWRIGHT_SECRET_FILE"
"""The environment variable with the path of a secret that is not in the run folder."""

_FEWEST, _MOST = 16, 4096


def secret_of_run(folder: Path, environment: Mapping[str, str]) -> bytes:
    """The secret of a run: the file that the environment names, or its own."""
    return read_secret(Path(environment.get(VARIABLE) or folder / "secret"))


def read_secret(path: Path) -> bytes:
    """Reads a secret that nobody else can read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousError(
            f"The secret {path} cannot be read: {error.strerror}.",
            "Hosts of a run prove to each other that they know its secret.",
            f"Make the run folder, or the file that {VARIABLE} names, reachable from "
            "all hosts, as a plain file and no link.",
        ) from error
    with open(descriptor, "rb") as file:
        _check_private(path, os.fstat(file.fileno()))
        secret = file.read(_MOST + 1).strip()
    if not _FEWEST <= len(secret) <= _MOST:
        raise RendezvousError(
            f"The secret {path} has {len(secret)} bytes.",
            f"A secret has at least {_FEWEST} bytes and at most {_MOST}.",
            f"Make one: umask 077; openssl rand -hex 32 > {path}",
        )
    return secret


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or mode & 0o077:
        raise RendezvousError(
            f"The secret {path} has mode {mode:04o}.",
            "A secret is a plain file that only its owner can read.",
            f"Run chmod 600 {path}, and make a new one if others may have read it.",
        )
    if status.st_uid != os.geteuid():
        raise RendezvousError(
            f"The secret {path} belongs to user {status.st_uid}, not {os.geteuid()}.",
            "A secret is the file of the user who trains.",
            f"Start the run as that user, or set {VARIABLE} to a file of your own.",
        )
