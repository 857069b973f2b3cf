"""A search: trials on all slots at a time, until the study has as many as it should."""

import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from meshwright.errors import StudyError, TrialError
from meshwright.launch.guarding import Guard
from meshwright.launch.stop import StopRequests
from meshwright.trials.ledger import Ledger, Outcome
from meshwright.trials.objective import Objective
from meshwright.trials.progress import Progress
from meshwright.trials.running import NO_PARAMETER, LoadingError, RunningTrial
from meshwright.trials.slots import Slot
from meshwright.trials.space import Space
from meshwright.trials.storage import Database

_TICK_SECONDS = 0.25
_LOOK_SECONDS = 1.0
"""So often is asked what other launchers do, when there is nothing to do here."""
_HOPELESS = 5
"""So many trials may fail before any other ends well."""

How = Literal["finished", "interrupted", "preempted"]


class Search:
    """Runs the trials of a study on the slots of this launcher.

    Arguments:
        objective: What they run.
        slots: Where.
        ledger: Which there are.
        timeout: Seconds that a trial may take; any if left out.
        heartbeat: Seconds between signs of life.
        watch: Called now and then, and at the end.
    """

    def __init__(
        self,
        objective: Objective,
        slots: tuple[Slot, ...],
        ledger: Ledger,
        *,
        folder: Path,
        database: Database,
        space: Space,
        timeout: float | None,
        heartbeat: float,
        progress: Progress,
        stop: StopRequests,
        watch: Callable[[], None],
    ) -> None:
        self._objective = objective
        self._slots = slots
        self._ledger = ledger
        self._folder = folder
        self._database = database
        self._space = space
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._progress = progress
        self._stop = stop
        self._watch = watch
        self._running: dict[int, RunningTrial] = {}
        self._beat_at = 0.0
        self._look_at = 0.0
        self._has_succeeded = False
        self._failures: list[Outcome] = []

    def run(self) -> How:
        """Runs until the study is complete, or until it is asked to stop.

        Raises:
            TrialError: The objective cannot be run, fails always, or asks for nothing.
            StudyError: The database stays away, or the objective is another one.
        """
        with Guard() as guard:
            try:
                while not self._is_over():
                    self._look_after_others()
                    self._fill_slots(guard)
                    self._wait()
                    self._follow_all(guard)
                    self._progress.show([*self._running.values()])
                    self._watch()
            except BaseException:
                self._give_all_back(guard)
                raise
            self._give_all_back(guard)
        if not self._stop.is_wanted:
            return "finished"
        return "interrupted" if self._stop.exit_code == 130 else "preempted"

    def _is_over(self) -> bool:
        """Ctrl-C lets trials end; a second one, or SIGTERM, does not."""
        if self._stop.is_wanted:
            at_once = self._stop.is_urgent or self._stop.exit_code != 130
            return at_once or not self._running
        return not self._running and self._ledger.is_done()

    def _look_after_others(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._heartbeat:
            self._beat_at = now
            self._ledger.beat()
            self._ledger.take_over()

    def _fill_slots(self, guard: Guard) -> None:
        free = [slot for slot in self._slots if slot.number not in self._running]
        now = time.monotonic()
        if not free or self._stop.is_wanted or now < self._look_at:
            return
        for slot in free:
            trial = self._ledger.claim(slot.device)
            if trial is None:
                self._look_at = now + _LOOK_SECONDS
                return
            running = RunningTrial(
                trial,
                slot,
                self._objective,
                folder=self._folder,
                database=self._database,
                space=self._space,
            )
            self._running[slot.number] = running
            guard.watch(running.worker.process.pid)

    def _wait(self) -> None:
        numbers = [n for r in self._running.values() for n in r.worker.filenos()]
        asked = self._stop.fileno()
        ready, _, _ = select.select([*numbers, asked], [], [], _TICK_SECONDS)
        if asked in ready:
            self._stop.drain()
            self._progress.say_stopping(self._stop, len(self._running))

    def _follow_all(self, guard: Guard) -> None:
        for running in [*self._running.values()]:
            try:
                running.follow()
            except LoadingError as error:
                raise TrialError(
                    f"The objective {self._objective.label} cannot be loaded: {error}.",
                    "The process of a trial runs the objective's file up to mw.tune, "
                    "or imports its module.",
                    "What is not meant for it stands under if __name__ == "
                    f"'__main__':. All of the error is in {running.log}.",
                ) from error
            running.hurry(self._timeout)
            if running.has_ended:
                assert running.outcome is not None
                self._end(running, running.outcome, guard)

    def _end(self, running: RunningTrial, outcome: Outcome, guard: Guard) -> None:
        running.close()
        guard.forget(running.worker.process.pid)
        del self._running[running.slot.number]
        self._look_at = 0.0
        again = self._ledger.settle(running.trial, outcome)
        self._progress.end(running, outcome, self._ledger, again=again)
        if outcome.because == NO_PARAMETER:
            raise TrialError(
                f"Trial {running.trial.number} of {self._objective.label} asked for no "
                "parameter.",
                "A search varies at least one parameter; without any, all trials are "
                "one.",
                "Let the objective call trial.suggest_float, suggest_int or "
                "suggest_categorical.",
            )
        if outcome.how in ("complete", "pruned"):
            self._has_succeeded = True
        elif not again:
            self._failures.append(outcome)
            if len(self._failures) >= _HOPELESS and not self._has_succeeded:
                raise all_failed(
                    self._objective.label,
                    [failure.because for failure in self._failures],
                    running.log.parent,
                )

    def _give_all_back(self, guard: Guard) -> None:
        """Ends what runs, and leaves it to whoever goes on with the study."""
        running, self._running = [*self._running.values()], {}
        for each in running:
            each.close()
            guard.forget(each.worker.process.pid)
            outcome = each.outcome or Outcome("returned", because="it was interrupted")
            try:
                self._ledger.settle(each.trial, outcome)
            except StudyError:  # it is in the journal, and recovered from there
                continue


def all_failed(label: str, reasons: Sequence[str], logs: Path) -> TrialError:
    """What is said of an objective that has failed in every trial."""
    unlike = [*dict.fromkeys(reasons)]
    others = f", and {len(unlike) - 1} other reasons" if len(unlike) > 1 else ""
    return TrialError(
        f"{label} failed in all {len(reasons)} trials: {unlike[0]}{others}.",
        "A search goes on past trials that fail, as long as some do not.",
        f"Repair the objective and call again; the whole errors are in {logs}.",
        is_numeric=all(reason.endswith("nan") for reason in unlike),
    )
