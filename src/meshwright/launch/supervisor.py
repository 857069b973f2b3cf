"""Attempt after attempt, until a script has ended, or it makes no sense any more."""

import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meshwright.cluster.orders import Orders
from meshwright.launch.attempt import Attempt, Ending
from meshwright.launch.console import Console
from meshwright.launch.crew import Crew
from meshwright.launch.failures import Failure
from meshwright.launch.run_folder import RunFolder
from meshwright.launch.stop import StopRequests
from meshwright.launch.watch import Limits

_FIRST_DELAY, _LONGEST_DELAY = 0.5, 60.0
_MOST_PORTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended, as far as this launcher knows."""

    how: Literal["finished", "preempted", "interrupted", "failed"]
    exit_code: int
    step: int | None = None
    """The last step that was finished."""
    saved: int | None = None
    """The newest step with a checkpoint, as far as it was told."""
    restarts: int = 0
    failure: Failure | None = None
    """What a failed run failed of: the first failure since it last got further."""
    failures: int = 0
    """How many times it failed since then."""

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "outcome": self.how,
            "exit_code": self.exit_code,
            "step": self.step,
            "saved": self.saved,
            "restarts": self.restarts,
            "failure": None if self.failure is None else self.failure.to_json(),
        }


def delay_before(failures: int, chance: Callable[[], float] = random.random) -> float:
    """Seconds to wait before a restart: twice as long each time, and never the same.

    >>> [delay_before(n, lambda: 0.5) for n in (1, 2, 3, 20)]
    [0.5, 1.0, 2.0, 60.0]
    """
    delay = min(_FIRST_DELAY * 2 ** min(failures - 1, 30), _LONGEST_DELAY)
    return delay * (0.5 + chance())


class Supervisor:
    """Starts all workers together, and again when one of them fails.

    A failure costs one of `restarts`; all of them come back when a run has got further,
    which is when a newer step has been saved.

    Arguments:
        crews: The workers, by host.
        orders: What all processes are told; each gets its own rank.
        restarts: How many failures in a row are followed by another attempt.
    """

    def __init__(
        self,
        crews: Sequence[Crew],
        orders: Orders,
        *,
        folder: RunFolder,
        console: Console,
        stop: StopRequests,
        restarts: int,
        limits: Limits,
    ) -> None:
        self._crews = crews
        self._orders = orders
        self._folder = folder
        self._console = console
        self._stop = stop
        self._budget = restarts
        self._limits = limits
        self._attempts = 0
        self._ports = 0
        self._step: int | None = None
        self._saved: int | None = None
        self._failures: list[Failure] = []
        """Those since the run last got further."""
        self._saved_at_failure: int | None = None
        self._rolled_back: set[int | None] = set()

    def run(self) -> Outcome:
        """Runs attempts until one ends well, is stopped, or is the last."""
        try:
            while True:
                ending = self._attempt()
                if ending.failure is None:
                    return self._outcome(ending)
                delay = self._delay_after(ending.failure)
                if delay is None or not self._wait(delay):
                    return self._outcome(ending)
                self._attempts += 1
        finally:
            for crew in self._crews:
                crew.close()

    def _attempt(self) -> Ending:
        self._folder.check_is_there()
        attempt = Attempt(
            self._crews,
            self._orders_of_attempt(),
            folder=self._folder,
            console=self._console,
            limits=self._limits,
            stop=self._stop,
        )
        self._folder.note("attempt", attempt=self._attempts)
        ending = attempt.run()
        self._step = attempt.step if attempt.step is not None else self._step
        if attempt.saved is not None:
            self._saved = max(attempt.saved, self._saved or 0)
        return ending

    def _orders_of_attempt(self) -> list[Orders]:
        world = sum(len(crew.ranks) for crew in self._crews)
        first = next(crew for crew in self._crews if 0 in crew.ranks)
        shared = replace(
            self._orders,
            world=world,
            attempt=self._attempts,
            coordinator=first.free_address() if world > 1 else None,
            resume=self._orders.resume or self._attempts > 0,
        )
        return [replace(shared, rank=rank) for rank in range(world)]

    def _delay_after(self, failure: Failure) -> float | None:
        """Seconds until the next attempt; None if there is to be none."""
        if self._stop.is_wanted:
            return None
        if failure.address_taken and self._ports < _MOST_PORTS:
            self._ports += 1
            self._console.warn("takes another port")
            return 0.0
        if self._saved != self._saved_at_failure:
            self._failures.clear()
            self._saved_at_failure = self._saved
        self._failures.append(failure)
        if not self._may_pass(failure) or len(self._failures) > self._budget:
            return None
        delay = delay_before(len(self._failures))
        self._console.warn(
            f"restart {len(self._failures)} of {self._budget} in {delay:.1f} s"
        )
        self._folder.note("restart", attempt=self._attempts + 1, delay=delay)
        return delay

    def _may_pass(self, failure: Failure) -> bool:
        """Whether another attempt may do better."""
        if not failure.is_numeric:
            return not failure.is_lasting
        before = failure.step in self._rolled_back
        self._rolled_back.add(failure.step)
        return self._orders.on_nan == "rollback" and not before

    def _wait(self, delay: float) -> bool:
        """Whether nobody asked to stop meanwhile."""
        deadline = time.monotonic() + delay
        while not self._stop.is_wanted:
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            select.select([self._stop], [], [], left)
            self._stop.drain()
            self._folder.beat()
        return False

    def _outcome(self, ending: Ending) -> Outcome:
        how: Literal["finished", "preempted", "interrupted", "failed"] = "failed"
        failure = None
        if ending.how == "finished":
            how, exit_code = "finished", 0
        elif ending.failure is None or self._is_stopped_by(ending.failure):
            exit_code = self._stop.exit_code
            how = "interrupted" if exit_code == 130 else "preempted"
        else:
            failure = (self._failures or [ending.failure])[0]
            exit_code = failure.exit_code
        return Outcome(
            how=how,
            exit_code=exit_code,
            step=self._step,
            saved=self._saved,
            restarts=self._attempts,
            failure=failure,
            failures=len(self._failures),
        )

    def _is_stopped_by(self, failure: Failure) -> bool:
        """Whether it is no failure, but what became of a wish to stop."""
        return self._stop.is_wanted and not failure.is_lasting
