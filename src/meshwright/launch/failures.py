"""What went wrong in an attempt: the cause, the rule that it broke, what to change."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.devices.sizes import format_bytes
from meshwright.errors import HangError, NumericError, PeerLostError, RendezvousError
from meshwright.launch.member import Member
from meshwright.launch.watch import Overdue

LASTING = frozenset({2, 3, 4, 5, 130})
"""Exit codes of what comes again after every restart."""

_GOES_ON = "The same command goes on from the last checkpoint."
_MOST_OF_MEMORY = 0.8
_PARTING = -signal.SIGABRT
"""How JAX ends a process that has lost another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an attempt ended."""

    received: str
    rule: str
    change: str
    exit_code: int
    kind: str
    """'killed', 'ended', 'raised', 'hang' or 'lost'."""
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    traceback: str | None = None
    tail: tuple[str, ...] = ()
    """What the worker printed last."""
    is_typed: bool = False
    """Whether it is one of Meshwright's errors, which need no traceback."""
    address_taken: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether it would come again after a restart."""
        return self.exit_code in LASTING

    @property
    def is_numeric(self) -> bool:
        """Whether the loss or the weights were not finite."""
        return self.exit_code == NumericError.exit_code

    def to_json(self) -> dict[str, Any]:
        """What is kept of it."""
        facts = asdict(self)
        return {**facts, "tail": list(self.tail)}


def first_cause(failed: Sequence[Member]) -> Member:
    """The one that the others followed; they come in the order in which they failed.

    Nothing is killed by SIGKILL because another process is gone. A process that JAX
    ends is, and an error about other processes is no cause if there is something else.
    """
    killed = (m for m in failed if m.status == -signal.SIGKILL)
    own = (m for m in failed if not _follows(m))
    return next(killed, None) or next(own, failed[0])


def failure_of(member: Member, run: str) -> Failure:
    """What there is to say of a worker that has failed."""
    told = member.failure
    if told is None:
        return _of_end(member, run)
    code = int(told.get("exit_code", 1))
    if told.get("rule"):
        received, rule, change = (str(told[k]) for k in ("received", "rule", "change"))
    else:
        received, rule, change = _words_of_error(member, told, run)
    step = told.get("step")
    return Failure(
        received=received,
        rule=rule,
        change=change,
        exit_code=code,
        kind="raised",
        rank=member.rank,
        host=member.host,
        step=member.step if step is None else step,
        traceback=told.get("traceback"),
        is_typed=bool(told.get("rule")),
        address_taken=bool(told.get("address_taken")),
    )


def failure_of_hang(
    overdue: Overdue, late: Sequence[Member], because: str, run: str
) -> Failure:
    """What there is to say when a worker was silent for too long."""
    member = late[0] if late else overdue.member
    names = " and ".join(f"rank {m.rank}" for m in late) or "every rank"
    seconds = f"{overdue.limit:g} s"
    if member.is_done and member is not overdue.member:
        received = (
            f"{names.capitalize()} came to the end of the script, and rank "
            f"{overdue.member.rank} waited for it {overdue.member.place()}, for "
            f"{seconds}."
        )
    else:
        received = (
            f"{names.capitalize()} on {member.host} did not go on {member.place()}: "
            f"no sign for {seconds}; {because}."
        )
    return Failure(
        received=received,
        rule="Each part of a run has a time limit; --step-timeout is that of a step.",
        change=f"Look at the stacks of all ranks in {run}/stacks; if steps take that "
        f"long, raise --step-timeout. {_GOES_ON}",
        exit_code=HangError.exit_code,
        kind="hang",
        rank=member.rank,
        host=member.host,
        step=member.step,
    )


def failure_of_lost(host: str, because: str) -> Failure:
    """What there is to say of a host that is gone."""
    return Failure(
        received=f"Host {host} is gone with its workers: {because}.",
        rule="Every host of a run stays until the run has ended.",
        change=f"Look at that host and the network between. {_GOES_ON}",
        exit_code=RendezvousError.exit_code,
        kind="lost",
        host=host,
    )


def _follows(member: Member) -> bool:
    if member.failure is not None:
        return bool(member.failure.get("follows"))
    return member.status in (_PARTING, PeerLostError.exit_code)


def _of_end(member: Member, run: str) -> Failure:
    status = member.status or 0
    if status < 0:
        received = _words_of_signal(member, -status)
        rule = "The processes of a run go on together or not at all."
        code = PeerLostError.exit_code
    else:
        received = (
            f"Rank {member.rank} on {member.host} ended with exit status {status} "
            f"{member.place()}."
        )
        rule = "A script ends by coming to its end in every process."
        code = status or PeerLostError.exit_code
    return Failure(
        received=received,
        rule=rule,
        change=_advice(member, status, run),
        exit_code=code,
        kind="killed" if status < 0 else "ended",
        rank=member.rank,
        host=member.host,
        step=member.step,
        tail=tuple(member.tail),
    )


def _words_of_signal(member: Member, number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    words = f"Rank {member.rank} on {member.host} was killed by {name} {member.place()}"
    if number == signal.SIGKILL and _lacked_memory(member):
        words += ", probably out of memory"
    if member.memory:
        words += f"; it held {format_bytes(member.memory)} at most"
    if member.memory and member.memory_of_host:
        words += f", its host has {format_bytes(member.memory_of_host)}"
    return f"{words}."


def _lacked_memory(member: Member) -> bool:
    enough = _MOST_OF_MEMORY * member.memory_of_host
    return member.killed_for_memory or bool(enough and member.memory >= enough)


def _advice(member: Member, status: int, run: str) -> str:
    if status == -signal.SIGKILL and _lacked_memory(member):
        return (
            "Use smaller batches, remat=True or fewer processes on this host. "
            f"{_GOES_ON}"
        )
    return f"Look at the end of its output in {run}/logs. {_GOES_ON}"


def _words_of_error(
    member: Member, told: Mapping[str, Any], run: str
) -> tuple[str, str, str]:
    where = f" ({told['where']})" if told.get("where") else ""
    name = str(told.get("type", "an error"))
    who = f"Rank {member.rank} on {member.host}"
    if name == "SystemExit":
        received = f"{who} ended its script with {told['received']} {member.place()}."
    elif name == "KeyboardInterrupt":
        received = f"{who} was interrupted {member.place()}."
    else:
        text = str(told.get("received") or "no text")
        received = f"{who} raised {name} {member.place()}: {text}{where}."
    return (
        received,
        "A script ends well if it comes to its end in every process.",
        f"Look at the traceback, or at the logs in {run}/logs. {_GOES_ON}",
    )
