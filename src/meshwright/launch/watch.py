"""How long a worker may say nothing, and which one keeps the others waiting."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.cluster.channel import Section
from meshwright.launch.member import Member

STEP_SECONDS = 600.0

_WAITING = re.compile(
    r"/jax/_src/|/jaxlib/|/keras/src/"
    r"|/meshwright/(?:train|parallel|strategies)/|/meshwright/cluster/store\.py$"
)
"""Files in which a process is when it waits for values that others have a part in."""
_FRAME = re.compile(
    r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.M
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Seconds without a sign of life, by section; `script` has none."""

    start: float = 300.0
    compile: float = 3600.0
    step: float = STEP_SECONDS
    checkpoint: float = 1800.0
    end: float = 300.0
    alone: float = 30.0
    """For those in a step, when another one has come to the end of its script."""

    def of(self, section: Section) -> float | None:
        """The limit of a section."""
        return None if section == "script" else float(getattr(self, section))


@dataclass(frozen=True, slots=True)
class Overdue:
    """A worker that has said nothing for longer than its section may take."""

    member: Member
    seconds: float
    limit: float


def find_overdue(
    members: Sequence[Member], limits: Limits, now: float
) -> Overdue | None:
    """The worker that has been silent too long, if there is one."""
    for member in members:
        limit = _limit_of(member, members, limits)
        silent = now - member.seen_at
        if member.status is None and limit is not None and silent > limit:
            return Overdue(member, silent, limit)
    return None


def _limit_of(
    member: Member, members: Sequence[Member], limits: Limits
) -> float | None:
    others = [other for other in members if other is not member]
    if member.section == "end" and not all(other.is_done for other in others):
        return None  # it waits for those that still work
    if member.section == "step" and any(other.is_done for other in others):
        return min(limits.step, limits.alone)
    return limits.of(member.section)


def who_did_not_come(
    members: Sequence[Member], states: Mapping[int, str], stacks: Mapping[int, str]
) -> tuple[list[Member], str]:
    """Those that keep the others waiting, and how that is known.

    Arguments:
        members: All workers of the attempt.
        states: What the system says of each.
        stacks: What each wrote of its stacks.
    """
    stopped = [m for m in members if states.get(m.rank) in ("stopped", "tracing-stop")]
    if stopped:
        return stopped, "it is stopped (SIGSTOP)"
    early = [m for m in members if m.is_done]
    if early and len(early) < len(members):
        return early, "it has come to the end of its script while the others work"
    if len(members) == 1:
        return list(members), _waits_in(stacks.get(members[0].rank, ""))
    steps = {m.step or 0 for m in members}
    if len(steps) > 1:
        late = [m for m in members if (m.step or 0) == min(steps)]
        return late, f"the others have finished step {max(steps)}"
    sections = {m.section for m in members}
    if len(sections) > 1 and "script" in sections:
        return [m for m in members if m.section == "script"], "it is in its script"
    busy = [m for m in members if not _waits_for_others(stacks.get(m.rank, ""))]
    if busy and len(busy) < len(members):
        return busy, _waits_in(stacks.get(busy[0].rank, ""))
    return [], "all are at the same place"


def _waits_for_others(dump: str) -> bool:
    """Whether the innermost frame of the main thread is one of JAX's."""
    frame = _FRAME.search(main_thread(dump))
    return frame is not None and bool(_WAITING.search(frame["file"]))


def _waits_in(dump: str) -> str:
    frame = _FRAME.search(main_thread(dump))
    if frame is None:
        return dump or "it wrote no stacks"
    return f"it is in {frame['name']}, {frame['file']}, line {frame['line']}"


def main_thread(dump: str) -> str:
    """The last one of a dump: `faulthandler` writes the newest threads first."""
    return re.split(r"^(?:Current thread|Thread) .*\n", dump, flags=re.M)[-1]
