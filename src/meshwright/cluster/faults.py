"""Faults that are injected on purpose, to see that a run survives them.

`MESHWRIGHT_FAULT="kill@rank=1,step=37; slow:3x@step=5"`: a kind, and where it strikes.
Without a rank it is the first process; a fault without a step strikes at the first one.
Each strikes once in the life of a run; `slow` stays until its process ends.
"""

import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from meshwright.cluster.records import append_json, read_lines
from meshwright.errors import ConfigurationError

VARIABLE = "MESHWRIGHT_FAULT"
"""The environment variable with the faults of a run."""

Kind = Literal[
    "kill", "hang", "gil", "slow", "nan", "raise", "disk-full", "corrupt-last", "term"
]
KINDS: tuple[Kind, ...] = get_args(Kind)

FULL_BYTES = 4096
"""Files may grow so far on a disk that is made full."""

_SPELLING = re.compile(
    r"(?P<kind>[a-z-]+)(:(?P<factor>\d+(\.\d+)?)x)?(@(?P<where>[a-z]+=\d+(,[a-z]+=\d+)*))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault.

    >>> Fault.parse("slow:3x@rank=1,step=5")
    Fault(kind='slow', rank=1, step=5, factor=3.0)
    """

    kind: Kind
    rank: int = 0
    step: int = 1
    """Strikes before the dispatch of the step of this number, counted over the run."""
    factor: float = 1.0
    """How many times as long as before a step takes on a slow host."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """A fault as it is spelled."""
        found = _SPELLING.fullmatch(text.strip())
        kind = found["kind"] if found else None
        pairs = (found["where"] or "").split(",") if found else []
        where = dict(pair.split("=") for pair in pairs if pair)
        is_slow = kind == "slow"
        if (
            found is None
            or kind not in KINDS
            or not where.keys() <= {"rank", "step"}
            or is_slow != bool(found["factor"])
        ):
            raise ConfigurationError(
                f"{VARIABLE} received {text.strip()!r}.",
                f"A fault is one of {', '.join(KINDS)}, where slow has a factor "
                "(slow:3x), then @ and its rank and step; several are divided by ;.",
                f"Write, for example, {VARIABLE}='kill@rank=1,step=37'.",
            )
        numbers = {name: int(number) for name, number in where.items()}
        factor = float(found["factor"]) if is_slow else 1.0
        return cls(kind=kind, factor=factor, **numbers)

    def __str__(self) -> str:
        factor = f":{self.factor:g}x" if self.kind == "slow" else ""
        return f"{self.kind}{factor}@rank={self.rank},step={self.step}"


def parse_faults(text: str) -> tuple[Fault, ...]:
    """All faults of a run.

    >>> [str(fault) for fault in parse_faults("kill@step=3; nan")]
    ['kill@rank=0,step=3', 'nan@rank=0,step=1']
    """
    return tuple(Fault.parse(part) for part in text.split(";") if part.strip())


class Injector:
    """Lets the faults of one process strike.

    Arguments:
        faults: Those of the run.
        rank: The number of this process.
        run: The run folder, which knows what has struck before.
    """

    def __init__(self, faults: Sequence[Fault], rank: int, run: Path) -> None:
        self._record = run / "faults.jsonl"
        self._checkpoints = run / "checkpoints"
        struck = {each["fault"] for each in read_lines(self._record)}
        # A poisoned weight is the same in all processes, as it is after a real one.
        self._waiting = [
            fault
            for fault in faults
            if (fault.rank == rank or fault.kind == "nan") and str(fault) not in struck
        ]
        self._rank = rank
        self._slow = 1.0
        self._limit: tuple[int, int] | None = None

    def strike(self, first: int, last: int) -> bool:
        """Before the dispatch of some steps: lets happen what belongs there.

        Arguments:
            first: The number of the first of them.
            last: The number of the last.

        Returns:
            Whether the weights are to become NaN.
        """
        due = [fault for fault in self._waiting if fault.step <= last]
        self._waiting = [fault for fault in self._waiting if fault not in due]
        poisons = False
        for fault in due:
            if fault.kind != "nan" or fault.rank == self._rank:
                self._remember(fault, first)
            poisons |= fault.kind == "nan"
            self._do(fault)
        return poisons

    def drag(self, seconds: float) -> None:
        """Makes what took so long take longer, on a slow host."""
        if self._slow > 1:
            time.sleep((self._slow - 1) * seconds)

    def make_room(self) -> None:
        """Ends a full disk, after a save has met it."""
        if self._limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limit)
            self._limit = None

    def _do(self, fault: Fault) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "hang":
            while True:
                time.sleep(3600)
        elif fault.kind == "gil":
            # A signal would wake it up; those that come go to other threads.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            ctypes.PyDLL(None).sleep(2**31 - 1)
        elif fault.kind == "slow":
            self._slow = fault.factor
        elif fault.kind == "raise":
            raise RuntimeError(f"injected fault: {fault}")
        elif fault.kind == "disk-full":
            self._fill_disk()
        elif fault.kind == "corrupt-last":
            flip_bit(self._checkpoints)
            os.kill(os.getpid(), signal.SIGKILL)

    def _fill_disk(self) -> None:
        # The system then lets no file of this process grow, as a full disk does. It
        # sends a signal as well, which Python ignores.
        self._limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, self._limit[1]))

    def _remember(self, fault: Fault, step: int) -> None:
        """Before it strikes: a process that is killed cannot do it afterwards."""
        words = {"fault": str(fault), "before_step": step, "time": time.time()}
        append_json(self._record, words)


def flip_bit(checkpoints: Path) -> None:
    """Flips one bit in the largest file of the newest checkpoint, if there is any."""
    steps = [int(p.name) for p in checkpoints.glob("[0-9]*") if p.name.isdecimal()]
    if not steps:
        return
    files = [p for p in (checkpoints / str(max(steps))).rglob("*") if p.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
