"""What a launcher knows of one worker of an attempt."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from meshwright.cluster.channel import Section

IN_A_FIT: frozenset[Section] = frozenset({"compile", "step", "checkpoint"})
"""Where a worker is in something that needs all the others."""

_TAIL_LINES = 20
_SECTIONS = frozenset(get_args(Section))


@dataclass(slots=True, kw_only=True)
class Member:
    """A worker as its facts and its end show it.

    Attributes:
        seen_at: When it last gave a sign of life; `time.monotonic` is the clock.
        step: The last step that it has finished; None if none in this attempt.
        failure: What it told of the reason for its end.
        status: Its exit status, when it has ended.
    """

    rank: int
    host: str
    section: Section = "start"
    entered_at: float = field(default_factory=time.monotonic)
    seen_at: float = field(default_factory=time.monotonic)
    step: int | None = None
    failure: Mapping[str, Any] | None = None
    status: int | None = None
    memory: int = 0
    memory_of_host: int = 0
    killed_for_memory: bool = False
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    """The last lines that it printed."""

    @property
    def is_done(self) -> bool:
        """Whether it has come to the end of its script, or of its life."""
        return self.section == "end" or self.status is not None

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong with it."""
        if self.failure is not None:
            return True
        if self.status == 0:  # os._exit(0) in a fit is no good end
            return self.section in IN_A_FIT or self.section == "start"
        return self.status is not None and not self.was_stopped

    @property
    def was_stopped(self) -> bool:
        """Whether it has ended because it was asked to, by SIGTERM."""
        return self.status in STOPPED

    def hear(self, facts: Mapping[str, Any]) -> None:
        """Takes in what it tells."""
        now = time.monotonic()
        self.seen_at = now
        if facts.get("section") in _SECTIONS and facts["section"] != self.section:
            self.section = facts["section"]
            self.entered_at = now
        if isinstance(facts.get("step"), int):
            self.step = facts["step"]
        if isinstance(facts.get("failure"), dict) and self.failure is None:
            self.failure = facts["failure"]

    def place(self) -> str:
        """Where it is, in words."""
        after = "" if self.step is None else f" after step {self.step}"
        where = {
            "start": "at its start",
            "script": f"in its script{after}",
            "compile": f"while it compiled{after}",
            "step": f"in a step{after}" if after else "in its first step",
            "checkpoint": f"while it saved{after}",
            "end": f"at the end of its script{after}",
        }
        return where[self.section]


PREEMPTED = 75
STOPPED = frozenset({PREEMPTED, -15, 143})
"""Exit statuses of those that were asked to stop; some had nothing to save."""
