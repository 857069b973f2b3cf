"""The run that this process takes part in: what outlives it lies in a folder."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

from meshwright.cluster.channel import channel
from meshwright.cluster.faults import Injector, parse_faults
from meshwright.cluster.orders import Orders, current_orders
from meshwright.cluster.records import write_json
from meshwright.cluster.store import word_of_first
from meshwright.errors import CheckpointError
from meshwright.train.checkpoint_store import CheckpointStore, Found, Outcome, Snapshot
from meshwright.train.metrics_log import MetricsLog
from meshwright.train.position import Position

ASK_SECONDS = 5.0
"""The first process is asked so often whether it is time to save."""


class Run:
    """A run, as one of its processes sees it.

    Attributes:
        orders: What the launcher wants.
        channel: Where it listens.
        step: Steps of the whole run that are done.
        useful_seconds: What these took, without those that had to be done again.
        injector: Faults that are wanted.
        metrics: What was measured; None but in the first process.

    Arguments:
        orders: What the launcher wants.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.channel = channel()
        self.step = 0
        self.useful_seconds = 0.0
        faults, folder = parse_faults(orders.fault), orders.folder
        self.injector = Injector(faults, orders.rank, folder)
        is_first = orders.rank == 0
        self.metrics = MetricsLog(folder / "metrics.jsonl") if is_first else None
        self._num_fits = 0
        self._is_inside = False
        self._saved_step = 0
        self._saved_at = self._asked_at = time.monotonic()
        self._num_unasked, self._num_between = 0, 1

    @cached_property
    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        folder = self.orders.folder / "checkpoints"
        return CheckpointStore(folder, keep=self.orders.keep, told=self._hear)

    @cached_property
    def found(self) -> Found | None:
        """The newest good checkpoint of when this process began."""
        found = self.store.find_good() if self.orders.resume else None
        if self.metrics is not None:
            self.metrics.cut(0 if found is None else found.step)
        if found is None:
            self.channel.say(resumed=0)
        return found

    @property
    def goodput(self) -> float:
        """The share of its time that went into steps that count."""
        orders = self.orders
        wall = time.time() - orders.launched_at + orders.wall_before
        return self.useful_seconds / wall if wall > 0 else 0.0

    @contextmanager
    def fitting(self) -> Iterator[int | None]:
        """Counts the fits of a script; one inside of another counts as a part of it."""
        if self._is_inside:
            yield None
            return
        number, self._num_fits = self._num_fits, self._num_fits + 1
        self._is_inside = True
        try:
            yield number
        finally:
            self._is_inside = False

    def found_for(self, fit: int) -> Found | None:
        """The checkpoint that a fit of the script goes on from, or ended with."""
        newest = self.found
        if newest is None:
            return None
        position = position_of(newest)
        if fit >= position.fit:
            return newest if fit == position.fit else None
        found = self.store.find_where(lambda facts: _ended(facts, fit))
        if found is None:
            raise CheckpointError(
                f"Fit {fit} of the script has ended, as checkpoint {newest.step} "
                "knows, and there is no good checkpoint of its end.",
                "A script that goes on in a later fit finds what the earlier ones led "
                "to.",
                "Bring its files back, or begin anew in another folder (--run).",
            )
        return found

    def go_on(self, found: Found) -> None:
        """Counts on from a checkpoint."""
        self.step = self._saved_step = position_of(found).total
        self.useful_seconds = found.facts["useful_seconds"]
        self._saved_at = time.monotonic()
        self.channel.say(resumed=self.step)

    def wants_checkpoint(self) -> bool:
        """Whether it is time to save; all processes ask at the same step."""
        every = self.orders.save_every
        if every and self.step // every > self._saved_step // every:
            return True
        return self.orders.save_minutes is not None and self._is_time()

    def _is_time(self) -> bool:
        """Whether it has been so many minutes, by the clock of the first process.

        Asking it takes milliseconds, so it says when to be asked again.
        """
        self._num_unasked -= 1
        if self._num_unasked > 0:
            return False
        assert self.orders.save_minutes is not None
        now = time.monotonic()
        left = self._saved_at + 60 * self.orders.save_minutes - now
        asked, self._asked_at = self._asked_at, now
        each = (now - asked) / self._num_between
        number = int(min(left / 2, ASK_SECONDS) / each) if left > 0 else 1
        word = word_of_first("time to save", json.dumps([left <= 0, max(number, 1)]))
        is_time, self._num_between = json.loads(word)
        self._num_unasked = self._num_between
        return bool(is_time)

    def save(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Saves a checkpoint, in the background unless it is to be waited for."""
        self._saved_step, self._saved_at = snapshot.step, time.monotonic()
        self.channel.enter("checkpoint")
        self.store.save(snapshot, wait=wait)

    def write_plan(self, report: Mapping[str, Any]) -> None:
        """Writes what the newest fit runs by."""
        if self.orders.rank == 0:
            write_json(self.orders.folder / "plan.json", report)

    def write(self, name: str, values: Any) -> None:
        """Writes what is known of the newest fit; never stops a training."""
        if self.orders.rank == 0:
            with contextlib.suppress(OSError):
                write_json(self.orders.folder / name, values)

    def _hear(self, outcome: Outcome) -> None:
        if outcome.what in ("saved", "failed"):
            self.injector.make_room()
        if outcome.what == "saved":
            self.channel.say(saved=outcome.step)
        else:
            self.channel.say(notice=outcome.text)


@cache
def current_run() -> Run | None:
    """The run that this process takes part in; None if no launcher has started it."""
    orders = current_orders()
    return None if orders is None else Run(orders)


def position_of(found: Found) -> Position:
    """Where a checkpoint was made."""
    return Position.read(found.facts["position"])


def _ended(facts: Mapping[str, Any], fit: int) -> bool:
    position = Position.read(facts["position"])
    return position.fit == fit and position.has_ended
