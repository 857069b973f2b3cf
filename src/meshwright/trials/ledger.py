"""Which trials a study has, who works on them, and what came of each.

A point of the search may take several attempts, each a trial of Optuna's; what it keeps
for retries of its own (`failed_trial`, `retry_history`) says which belong together.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cluster.records import append_json, read_lines
from meshwright.trials.results import TrialRecord
from meshwright.trials.storage import Database, need_optuna

import psutil

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

_ORIGIN, _HISTORY = "failed_trial", "retry_history"
_OWNER, _BEAT, _DEVICE, _BECAUSE, _SURPLUS = (
    f"meshwright:{name}" for name in ("owner", "beat", "device", "because", "surplus")
)
_JOURNAL = "results.jsonl"
_LONGEST = 500
"""PostgreSQL and SQLite keep longer texts of an attribute, people do not read them."""

How = Literal["complete", "pruned", "failed", "lost", "returned"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attempt.

    `lost` may be tried again; `returned` does not count as an attempt.
    """

    how: How
    value: float | None = None
    because: str = ""


class Ledger:
    """The trials of a study, as this launcher and others work on them.

    Arguments:
        study: Optuna's.
        database: Where it is kept.
        total: How many points the study is to have.
        retries: So often is a lost trial tried again.
        grace: A trial of another launcher that shows no sign of life for so many
            seconds is lost.
        folder: The run folder.
        is_alone: Whether nobody else can work on the study.
    """

    def __init__(
        self,
        study: "Study",
        database: Database,
        *,
        total: int,
        retries: int,
        grace: float,
        folder: Path,
        is_alone: bool,
        say: Callable[[str], None],
    ) -> None:
        self._study = study
        self._database = database
        self._total = total
        self._retries = retries
        self._grace = grace
        self._journal = folder / _JOURNAL
        self._is_alone = is_alone
        self._say = say
        self._states = need_optuna().trial.TrialState
        self._me = _owner()
        self._mine: dict[int, Trial] = {}
        self._beats = 0
        self._seen: dict[int, tuple[Any, float]] = {}

    def recover(self) -> None:
        """Writes down results that were not, and takes over what nobody works on."""
        running = {t.number for t in self._all() if t.state == self._states.RUNNING}
        for line in read_lines(self._journal):
            number = line.get("trial")
            if line.get("study") == self._study.study_name and number in running:
                running.discard(number)
                self._tell(number, Outcome(line["how"], line["value"], line["because"]))
                self._say(f"trial {number} had ended, and is written down now")
        self.take_over()

    def retry_failed(self) -> None:
        """Queues once more what has failed, because the objective has changed since."""
        for attempts in self._points():
            last = attempts[-1]
            if last.state == self._states.FAIL:
                self._queue(last.number, counts=False, because="")
                self._say(f"trial {_origin(last)} failed with other code; once more")

    def claim(self, device: str) -> "Trial | None":
        """The next trial to run here; None if there is none now.

        Arguments:
            device: Where it is going to run.
        """
        if not self._has_waiting() and len(self._points()) >= self._total:
            return None
        trial = self._database.do(self._study.ask)
        self._mine[trial.number] = trial
        if self._is_surplus(trial.number):  # others were faster
            self._note(trial, _SURPLUS, True)
            self._tell(trial.number, Outcome("failed"))
            return None
        self._note(trial, _OWNER, self._me)
        self._note(trial, _DEVICE, device)
        return trial

    def settle(self, trial: "Trial", outcome: Outcome) -> bool:
        """Writes down what came of a trial that was claimed.

        Returns:
            Whether there is to be another attempt.
        """
        line = {
            "study": self._study.study_name,
            "trial": trial.number,
            "how": outcome.how,
            "value": outcome.value,
            "because": outcome.because,
        }
        try:
            append_json(self._journal, line)
        except OSError as error:  # it is only needed if the database fails too
            self._say(f"{self._journal} was not written: {error}")
        if outcome.because:
            self._note(trial, _BECAUSE, outcome.because[:_LONGEST])
        return self._tell(trial.number, outcome)

    def beat(self) -> None:
        """Shows that this launcher is alive."""
        self._beats += 1
        for trial in [*self._mine.values()]:
            self._note(trial, _BEAT, self._beats)

    def take_over(self) -> None:
        """Gives up for others what they do not work on any more."""
        for trial in self._all():
            if trial.state != self._states.RUNNING or trial.number in self._mine:
                continue
            if why := self._why_lost(trial):
                self._say(f"trial {trial.number} is lost: {why}")
                self._tell(trial.number, Outcome("lost", because=why))

    def is_done(self) -> bool:
        """Whether every point has come to an end."""
        points = self._points()
        return len(points) >= self._total and all(
            attempts[-1].state.is_finished() for attempts in points
        )

    def records(self) -> tuple[TrialRecord, ...]:
        """All points, in the order of their numbers."""
        return tuple(_record(attempts) for attempts in self._points())

    def number_of(self, trial: "Trial") -> int:
        """The number of a trial that was claimed: that of its first attempt."""
        return _origin(next(t for t in self._all() if t.number == trial.number))

    def _all(self) -> "list[FrozenTrial]":
        return self._database.do(lambda: self._study.get_trials(deepcopy=False))

    def _points(self) -> "list[list[FrozenTrial]]":
        """The attempts at each of the points that count."""
        points: dict[int, list[FrozenTrial]] = {}
        for trial in self._all():
            if not trial.user_attrs.get(_SURPLUS):
                points.setdefault(_origin(trial), []).append(trial)
        return [points[number] for number in sorted(points)][: self._total]

    def _has_waiting(self) -> bool:
        return any(
            attempts[-1].state == self._states.WAITING for attempts in self._points()
        )

    def _is_surplus(self, number: int) -> bool:
        """Whether others have made so many before it that it is one too many.

        Numbers are given by the database, so all launchers agree on it.
        """
        trials = {t.number: t for t in self._all()}
        if _origin(trials[number]) != number:
            return False
        before = [
            t
            for t in trials.values()
            if t.number < number
            and _origin(t) == t.number
            and not t.user_attrs.get(_SURPLUS)
        ]
        return len(before) >= self._total

    def _why_lost(self, trial: "FrozenTrial") -> str:
        owner = trial.user_attrs.get(_OWNER)
        if self._is_alone or (owner and _is_gone(owner)):
            return "the launcher that ran it is gone"
        beat = trial.user_attrs.get(_BEAT)
        before = self._seen.get(trial.number)
        now = time.monotonic()
        if before is None or before[0] != beat:
            self._seen[trial.number] = (beat, now)
        elif now - before[1] > self._grace:
            where = str(owner).partition("/")[0] if owner else "its launcher"
            return f"{where} showed no sign of life for {self._grace:.0f} s"
        return ""

    def _tell(self, number: int, outcome: Outcome) -> bool:
        """Ends an attempt, and queues the next one at its point if there is to be one.

        If another launcher has given it up in the meantime, that one sees to it.

        Returns:
            Whether there is to be another attempt.
        """
        self._mine.pop(number, None)
        state = {
            "complete": self._states.COMPLETE,
            "pruned": self._states.PRUNED,
        }.get(outcome.how, self._states.FAIL)
        value = outcome.value if outcome.how == "complete" else None
        try:
            self._database.do(lambda: self._study.tell(number, value, state=state))
        except (ValueError, need_optuna().exceptions.UpdateFinishedTrialError):
            self._say(f"trial {number} was given up by another launcher")
            return True
        counts = outcome.how == "lost" and len(self._history(number)) < self._retries
        again = counts or outcome.how == "returned"
        if again:
            self._queue(number, counts=counts, because=outcome.because)
        return again

    def _queue(self, number: int, *, counts: bool, because: str) -> None:
        """Queues a trial with the same parameters."""
        before = next(t for t in self._all() if t.number == number)
        history = [*self._history(number), *([number] if counts else [])]
        kept = {
            name: value
            for name, value in before.user_attrs.items()
            if not name.startswith("meshwright:")
        }
        trial = need_optuna().trial.create_trial(
            state=self._states.WAITING,
            params=before.params,
            distributions=before.distributions,
            user_attrs={**kept, _BECAUSE: because[:_LONGEST]},
            system_attrs={
                **before.system_attrs,
                _ORIGIN: _origin(before),
                _HISTORY: history,
            },
        )
        self._database.do(lambda: self._study.add_trial(trial))

    def _history(self, number: int) -> list[int]:
        trial = next(t for t in self._all() if t.number == number)
        return list(trial.system_attrs.get(_HISTORY, []))

    def _note(self, trial: "Trial", key: str, value: Any) -> None:
        """Keeps something with a trial; not if another launcher has given it up."""
        finished = need_optuna().exceptions.UpdateFinishedTrialError
        try:
            self._database.do(lambda: trial.set_user_attr(key, value))
        except finished:
            self._mine.pop(trial.number, None)


def _origin(trial: "FrozenTrial") -> int:
    return int(trial.system_attrs.get(_ORIGIN, trial.number))


def _record(attempts: "Sequence[FrozenTrial]") -> TrialRecord:
    last = attempts[-1]
    states: dict[str, Any] = {"FAIL": "failed"}
    counted = len(last.system_attrs.get(_HISTORY, [])) + 1
    started, ended = last.datetime_start, last.datetime_complete
    value = last.value
    if value is not None and math.isnan(value):
        value = None
    return TrialRecord(
        number=_origin(last),
        state=states.get(last.state.name, last.state.name.lower()),
        value=value,
        params=dict(last.params),
        reports=dict(last.intermediate_values),
        user_attrs={
            name: value
            for name, value in last.user_attrs.items()
            if not name.startswith("meshwright:")
        },
        device=str(last.user_attrs.get(_DEVICE, "")),
        seconds=(ended - started).total_seconds() if started and ended else None,
        attempts=counted,
        because=str(last.user_attrs.get(_BECAUSE, "")),
    )


def _owner() -> str:
    """What stands for this process among those of all hosts and containers."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = "pid"
    began = psutil.Process().create_time()
    return f"{socket.gethostname()}/{space}/{os.getpid()}/{began:.2f}"


def _is_gone(owner: str) -> bool:
    """Whether it is a process of this host that has ended."""
    host, _, rest = owner.partition("/")
    space, pid, began = rest.rsplit("/", 2)
    mine = _owner().partition("/")
    if host != mine[0] or not mine[2].startswith(f"{space}/"):
        return False
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(began)) > 1
    except psutil.NoSuchProcess:
        return True
