"""`head.json`: where the launcher of a run listens for those of other hosts."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.cluster.records import write_json
from meshwright.errors import RendezvousError

_NAME = "head.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Where the head of a run is."""

    run: str
    """What this launch is called: the same for all that take part in it."""
    address: str
    """`address:port` where it listens."""
    host: str
    """The name of its host."""


@contextmanager
def announce_head(folder: Path, head: Head) -> Iterator[None]:
    """Writes the file, and takes it away at the end."""
    write_json(folder / _NAME, asdict(head))
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / _NAME).unlink()


def read_head(folder: Path) -> Head | None:
    """What the file says now; None if there is none."""
    with suppress(OSError, ValueError, TypeError):
        os.listdir(folder)  # or NFS may remember for a while that there was no file
        return Head(**json.loads((folder / _NAME).read_text()))
    return None


def wait_for_head(folder: Path, deadline: float) -> Head:
    """Waits until the head has said where it is."""
    while (head := read_head(folder)) is None:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"There is no {folder / _NAME}.",
                "The launcher of task 0 writes there where it listens, and all tasks "
                "see the same run folder.",
                "Put the run folder on a disk that all hosts share, and look at the "
                "output of task 0.",
            )
        time.sleep(0.1)
    return head
