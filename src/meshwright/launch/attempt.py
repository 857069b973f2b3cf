"""One attempt: all workers from their start to the end of the last of them."""

import select
import signal
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.cluster.channel import Section
from meshwright.cluster.orders import Orders
from meshwright.launch.console import Console
from meshwright.launch.crew import Crew, Ended, Event, Lost, Printed, Said
from meshwright.launch.failures import (
    Failure,
    failure_of,
    failure_of_hang,
    failure_of_lost,
    first_cause,
)
from meshwright.launch.member import Member
from meshwright.launch.run_folder import RunFolder
from meshwright.launch.stop import StopRequests
from meshwright.launch.stragglers import Stragglers
from meshwright.launch.watch import (
    Limits,
    Overdue,
    find_overdue,
    main_thread,
    who_did_not_come,
)

_TICK_SECONDS = 0.25
_SETTLE_SECONDS = 0.7
"""After a failure, the others have so long to show that they were before it."""
_FAREWELL_SECONDS = 10.0
"""So long may a process that told why it fails take to end by itself."""
_DUMP_SECONDS = 0.5
_FRAMES = 8
"""Of each stack so many are shown; the rest is in the run folder."""
_GAP_SECONDS = 5.0
"""A launcher that was stopped for longer has seen nothing, and blames nobody for it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    how: Literal["finished", "stopped", "failed"]
    failure: Failure | None = None


class Attempt:
    """Watches the workers of an attempt until it is over; `run` returns how.

    Attributes:
        saved: The newest step whose checkpoint is complete, as far as it was told.
    """

    def __init__(
        self,
        crews: Sequence[Crew],
        orders: Sequence[Orders],
        *,
        folder: RunFolder,
        console: Console,
        limits: Limits,
        stop: StopRequests,
    ) -> None:
        self._crews = crews
        self._orders = orders
        self._folder = folder
        self._console = console
        self._limits = limits
        self._stop = stop
        hosts = {rank: crew.host for crew in crews for rank in crew.ranks}
        self._members = {r: Member(rank=r, host=h) for r, h in sorted(hosts.items())}
        self._stragglers = Stragglers(hosts)
        self._failed: list[Member] = []
        self._failed_at: float | None = None
        self._lost: Lost | None = None
        self._asked_at: float | None = None
        self._looked_at = time.monotonic()
        self.saved: int | None = None

    @property
    def step(self) -> int | None:
        """The last step that any worker has finished."""
        steps = [m.step for m in self._members.values() if m.step is not None]
        return max(steps, default=None)

    def run(self) -> Ending:
        """Starts the workers, watches them, and leaves none of them behind."""
        try:
            for crew in self._crews:
                crew.start([self._orders[rank] for rank in crew.ranks])
            while True:
                self._pump()
                ending = self._look()
                if ending is not None:
                    return ending
        finally:
            for crew in self._crews:
                crew.kill()
            self._take_events()
            self._console.show_rest()

    def _pump(self) -> None:
        """Waits for something to happen, and takes it in."""
        poll = select.poll()
        poll.register(self._stop.fileno(), select.POLLIN)
        for crew in self._crews:
            for number in crew.filenos():
                poll.register(number, select.POLLIN)
        poll.poll(_TICK_SECONDS * 1000)
        self._stop.drain()
        self._folder.beat()
        self._take_events()
        self._forgive_own_absence()

    def _forgive_own_absence(self) -> None:
        now = time.monotonic()
        gap = now - self._looked_at - _TICK_SECONDS
        self._looked_at = now
        if gap > _GAP_SECONDS:
            for member in self._members.values():
                member.seen_at = min(member.seen_at + gap, now)

    def _take_events(self) -> None:
        for crew in self._crews:
            for event in crew.take_events():
                self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Lost):
            self._lost = self._lost or event
            self._failed_at = self._failed_at or time.monotonic()
            return
        member = self._members[event.rank]
        if isinstance(event, Printed):
            member.tail.append(event.line)
            self._console.show(event)
            return
        if isinstance(event, Said):
            self._hear(member, event)
        elif isinstance(event, Ended):
            member.status = event.status
            member.memory = event.memory
            member.memory_of_host = event.memory_of_host
            member.killed_for_memory = event.killed_for_memory
            self._note("ended", rank=event.rank, status=event.status)
        if member.has_failed and member not in self._failed:
            self._failed.append(member)
            self._failed_at = self._failed_at or time.monotonic()

    def _hear(self, member: Member, said: Said) -> None:
        facts = said.facts
        member.hear(facts)
        if isinstance(facts.get("saved"), int) and facts["saved"] > (self.saved or 0):
            self.saved = facts["saved"]
            self._note("saved", step=self.saved)
        if isinstance(facts.get("resumed"), int) and member.rank == 0:
            self._note("resumed", step=facts["resumed"])
            if facts["resumed"]:
                self.saved = max(facts["resumed"], self.saved or 0)
                self._console.say(f"goes on after step {facts['resumed']}")
        if "notice" in facts:
            self._note("notice", rank=member.rank, text=str(facts["notice"]))
            self._console.warn(str(facts["notice"]))
        if member.failure is not None and "failure" in facts:
            self._note("failure", rank=member.rank, **facts["failure"])
        if isinstance(facts.get("host"), int | float):
            notice = self._stragglers.hear(member.rank, float(facts["host"]))
            if notice is not None:
                self._note("straggler", rank=member.rank, text=notice)
                self._console.warn(notice)

    def _look(self) -> Ending | None:
        """Whether it is over."""
        members = list(self._members.values())
        if self._stop.is_urgent:
            self._note("stopped at once")
            return Ending("stopped")
        if self._failed_at is not None:
            return self._look_at_failure(members)
        if all(member.status is not None for member in members):
            stopped = any(member.was_stopped for member in members)
            return Ending("stopped" if stopped else "finished")
        if self._stop.is_wanted or any(member.was_stopped for member in members):
            return self._look_at_stopping(members)
        overdue = self._find_overdue(members)
        return None if overdue is None else self._end_of_hang(overdue)

    def _look_at_failure(self, members: Sequence[Member]) -> Ending | None:
        assert self._failed_at is not None
        over = len(self._failed) == len(members)
        if not over and time.monotonic() - self._failed_at < _SETTLE_SECONDS:
            return None
        failure = self._cause()
        self._report(failure)
        self._pump_until(
            lambda: all(m.status is not None for m in self._failed), _FAREWELL_SECONDS
        )
        return Ending("failed", failure)

    def _cause(self) -> Failure:
        if self._lost is not None:
            return failure_of_lost(self._lost.host, self._lost.because)
        return failure_of(first_cause(self._failed), str(self._folder.path))

    def _look_at_stopping(self, members: Sequence[Member]) -> Ending | None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._note("stop", after_step=self.step)
            self._console.say("stopping: workers save and end; again to stop at once")
            for crew in self._crews:
                crew.signal(signal.SIGTERM)
        for member in members:
            patience = self._patience(member.section)
            if member.status is None and (
                now - max(self._asked_at, member.entered_at) > patience
            ):
                self._console.warn(
                    f"rank {member.rank} did not end {member.place()} within "
                    f"{patience:g} s of being asked to, and was ended"
                )
                return Ending("stopped")
        return None

    def _patience(self, section: Section) -> float:
        """How long somebody who was asked to stop may stay in a section."""
        return {
            "start": 2.0,
            "script": 10.0,
            "compile": 120.0,
            "step": self._limits.step,
            "checkpoint": self._limits.checkpoint,
            "end": self._limits.end,
        }[section]

    def _find_overdue(self, members: Sequence[Member]) -> Overdue | None:
        now = time.monotonic()
        overdue = find_overdue(members, self._limits, now)
        if overdue is not None:
            return overdue
        for member in members:  # a script may take as long as it likes, if it runs
            silent = now - member.seen_at
            is_silent = member.section == "script" and silent > self._limits.step
            if is_silent and self._state_of(member) == "stopped":
                return Overdue(member, silent, self._limits.step)
        return None

    def _end_of_hang(self, overdue: Overdue) -> Ending:
        # As they are now: the signal wakes up some of those that hang.
        members = [copy(member) for member in self._members.values()]
        for crew in self._crews:
            crew.signal(signal.SIGUSR1)
        self._pump_until(lambda: False, _DUMP_SECONDS)
        overdue = replace(overdue, member=members[overdue.member.rank])
        states = {m.rank: self._state_of(m) for m in members}
        stacks = {
            rank: crew.stacks_of(rank) for crew in self._crews for rank in crew.ranks
        }
        late, because = who_did_not_come(members, states, stacks)
        failure = failure_of_hang(overdue, late, because, str(self._folder.path))
        self._note("stacks", states=states, stacks=stacks)
        self._report(failure)
        for rank, dump in stacks.items():
            self._console.quote(rank, main_thread(dump).splitlines()[:_FRAMES])
        return Ending("failed", failure)

    def _state_of(self, member: Member) -> str:
        if member.status is not None:
            return "gone"
        crew = next(crew for crew in self._crews if member.rank in crew.ranks)
        return crew.state_of(member.rank)

    def _report(self, failure: Failure) -> None:
        self._note("failed", **failure.to_json())
        if not failure.is_lasting:  # that one is the headline in a moment
            self._console.warn(failure.received)
        if failure.traceback and not failure.is_typed:
            self._console.quote(failure.rank, failure.traceback.splitlines())
        elif failure.rank and not self._console.shows(failure.rank):
            self._console.quote(failure.rank, "".join(failure.tail).splitlines())

    def _pump_until(self, is_over: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_over() and time.monotonic() < deadline:
            if self._stop.is_urgent:
                return
            self._pump()

    def _note(self, event: str, **facts: object) -> None:
        self._folder.note(event, attempt=self._orders[0].attempt, **facts)
