"""One `fit` in a run: where it starts, when it saves, and what stops it.

Keras' `fit` stays in charge. It is told with which epoch to begin, and what is saved is
put in place when its callbacks have begun that epoch.
"""

import json
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.cluster.preemption import Preempted, preemption_wanted
from meshwright.cluster.randomness import random_state, set_random_state
from meshwright.data.course import Course, Start
from meshwright.data.fingerprint import fingerprint
from meshwright.devices.step import newest_values
from meshwright.errors import CheckpointError, CheckpointWarning, NumericError
from meshwright.train.callback_states import CallbackStates
from meshwright.train.checkpoint_store import Found, Snapshot
from meshwright.train.data_epochs import DataEpochs
from meshwright.train.listeners import callbacks_in
from meshwright.train.model_state import (
    all_finite,
    give_named_values,
    named_values,
    poison,
    targets_of,
)
from meshwright.train.position import Position
from meshwright.train.run import Run, position_of
from meshwright.train.stopwatch import Lap, Listener
from meshwright.train.timeline import Ledger
from meshwright.train.whereabouts import files_of

import jax
import numpy as np

LOG_SECONDS = 1.0
"""Metrics are logged so often, and at the end of every epoch."""

HISTORY = "history"
"""The name of the callback that Keras makes for every fit."""


class Dispatched(NamedTuple):
    """Steps that the devices may still be at."""

    step: int
    """The number of the last of them in the run."""
    logs: Any
    host: float
    """Seconds that this host took for itself."""


class RandomStates(NamedTuple):
    """What chance there was when a checkpoint was made."""

    now: Any
    at_pass: Any
    """Before the current pass through the data."""


class RunCourse(Course, Listener):
    """How one `fit` goes through its steps in a run.

    Arguments:
        run: The run.
        number: The number of the fit in the script.
        model: The model.
        plan: What it is trained by, as JSON values.
    """

    def __init__(
        self, run: Run, number: int, model: Any, plan: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._run = run
        self._number = number
        self._model = model
        self._plan = plan
        self._found = run.found_for(number)
        self._start: Start | None = None
        self._epoch: int | None = None
        self._is_in_epoch = False
        self._sizes: dict[str, Any] = {}
        self._random: RandomStates | None = None
        self._random_at_pass: Any = None
        self._data: str | None = None
        self._pending: Dispatched | None = None
        self._host_logs: dict[str, float] = {}
        self._logged_at = 0.0
        self._ledger = Ledger()
        self._has_told_where = False

    @property
    def _skips(self) -> bool:
        return self._run.orders.on_nan == "skip"

    @property
    def _plan_now(self) -> Any:
        """The plan, as it comes back from a file."""
        return json.loads(json.dumps(self._plan["best"]["plan"]))

    @property
    def _is_over(self) -> bool:
        return self._found is not None and position_of(self._found).has_ended

    @property
    def listens(self) -> bool:
        """Whether it wants to know when steps are done, because it writes metrics."""
        return self._run.metrics is not None

    def hear(self, lap: Lap) -> None:
        """Counts steps that are done."""
        self._ledger.add(lap.dispatch)

    def see_arrays(self, arrays: Any) -> None:
        """Remembers what tells the data from other data."""
        self._data = fingerprint(arrays)

    def begin(self, arguments: dict[str, Any]) -> None:
        """Lets `fit` begin with the epoch it was in, or with none if it is over."""
        from meshwright.train.run_callback import RunCallback

        callbacks = callbacks_in(arguments.get("callbacks"))
        self._states = CallbackStates(callbacks)
        known = None if self._found is None else self._found.facts["data_epochs"]
        self._data_epochs = DataEpochs(arguments.get("x"), known)
        self._run.write_plan(self._plan)
        if self._is_over:
            arguments["initial_epoch"] = arguments.get("epochs", 1)
            arguments |= {"callbacks": None, "verbose": 0}
            return
        if self._found is not None:
            arguments["initial_epoch"] = position_of(self._found).epoch
        own = RunCallback(self)
        given: Any = arguments.get("callbacks")
        if hasattr(given, "callbacks"):  # Keras' CallbackList, which it takes as it is
            given.callbacks.append(own)
        else:
            arguments["callbacks"] = [*callbacks, own]

    def begin_epoch(self, epoch: int) -> None:
        """Called when the callbacks have begun an epoch."""
        self._epoch = epoch
        self._states.add(HISTORY, self._model.history)
        if self._found is not None:
            self._go_on(self._found)
            self._found = None
        self._before_epoch = self._first_step = self._run.step
        if self._skips:
            self._first_update = self._num_updates()
        self._mark()

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Called with the logs of an epoch, those of its validation among them."""
        if not self._has_told_where:
            self._has_told_where = True
            for name, values in files_of(self._model):
                self._run.write(name, values)
        self._log(self._run.step, epoch, _numbers_in(logs))

    def end(self) -> None:
        """Saves what the fit has led to, or gives back what it led to before."""
        self.leave_epoch()  # a callback may have ended it
        if self._found is not None:
            # It was over, or goes to no epoch that comes later.
            self._states.add(HISTORY, self._model.history)
            self._data_epochs.go_through_all()
            self._go_on(self._found)
            set_random_state(self._found.facts["random"]["now"])
        if self._is_over:
            return
        self._save(self._position(0, 0, has_ended=True), wait=True)
        self._refuse_failed_save()
        self._channel.enter("script")

    def enter_epoch(self, num_steps: int | None, num_batches: int | None) -> Start:
        """Where the epoch starts."""
        if self._epoch is None:
            # Keras looks at a batch, to build the model.
            return Start(num_batches=num_batches)
        self._is_in_epoch = True
        start, self._start = self._start, None
        sizes = {"num_steps": num_steps, "num_batches": num_batches}
        if start is not None:
            if num_batches is None:
                sizes = self._sizes  # Keras had found out at the end of an epoch
            self._refuse_other_data(start, sizes)
            self._before_epoch -= start.step
        self._sizes = sizes
        return start or Start(num_batches=num_batches)

    def begin_data(self, adapter: Any) -> None:
        """Lets the data begin an epoch, after those of before."""
        if self._epoch is None:
            super().begin_data(adapter)
        else:
            self._data_epochs.begin(adapter)

    def end_data(self, adapter: Any) -> None:
        """Lets the data end an epoch."""
        self._data_epochs.end(adapter)

    def begin_pass(self) -> None:
        """Draws what is drawn for a pass as it was drawn before."""
        if self._random is not None and self._epoch is not None:
            set_random_state(self._random.at_pass)
        self._random_at_pass = random_state()

    def pass_over(self, draws_at_once: bool) -> None:
        """Goes on with the chance of when the checkpoint was made.

        What draws batch by batch has drawn again by now; ahead of the steps, as then.
        """
        assert self._random is not None
        if draws_at_once:
            set_random_state(self._random.now)
        self._random = None

    def before_steps(self, first: int, num_steps: int) -> None:
        """Lets faults strike that are wanted."""
        if self._epoch is None:
            return
        super().before_steps(first, num_steps)
        before, injector = self._before_epoch, self._run.injector
        first, last = before + first + 1, before + first + num_steps
        if injector.strike(first, last):
            poison(self._model)
        self._last, self._num_steps = last, num_steps
        self._dispatched_at = time.monotonic()
        self._host_seconds = self._dispatched_at - self._marked_at

    def see(self, logs: Any) -> None:
        """Keeps what the newest dispatch returned."""
        self._logs = logs
        self._run.step = self._last
        self._seen_at = time.monotonic()

    def after_steps(self, step: int, taken: int) -> None:
        """Looks at the steps before these, saves, or stops, if it is time."""
        if self._epoch is None:
            return
        now = time.monotonic()
        self._run.injector.drag(now - self._marked_at)
        host = self._host_seconds + time.monotonic() - self._seen_at
        self._settle()
        self._pending = Dispatched(self._last, self._logs, host / self._num_steps)
        self._count_time()
        stops = preemption_wanted()
        if stops or self._run.wants_checkpoint():
            self._settle()
            self._save(self._position(step, taken), wait=stops)
        if stops:
            self._refuse_failed_save()
            raise Preempted(self._run.step)
        self._mark()

    def leave_epoch(self) -> None:
        """Waits for the devices, so that a launcher knows what takes the time."""
        if not self._is_in_epoch:
            return
        self._is_in_epoch = False
        self._settle()
        self._count_time()
        if self._skips:
            self._notice_skips()
        self._channel.enter("script")

    def _mark(self) -> None:
        self._marked_at = self._dispatched_at = time.monotonic()
        self._num_compiled = self._channel.visits["compile"]

    def _count_time(self) -> None:
        """Counts the time since the dispatch as useful, unless something compiled."""
        if self._channel.visits["compile"] == self._num_compiled:
            self._run.useful_seconds += time.monotonic() - self._dispatched_at
        self._mark()

    def _settle(self) -> None:
        """Waits for the newest steps that are known; refuses a loss that is none."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        logs = jax.device_get(dict(pending.logs))
        self._channel.finish_step(pending.step, pending.host)
        loss = float(logs.get("loss", 0.0))
        if not math.isfinite(loss):
            if self._skips:
                return
            self._refuse_loss(pending.step, f"a loss of {loss}")
        self._host_logs = _numbers_in(logs)
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._log(pending.step, self._epoch or 0, self._host_logs)

    def _log(self, step: int, epoch: int, logs: Mapping[str, float]) -> None:
        run, self._logged_at = self._run, time.monotonic()
        if run.metrics is not None:
            facts: dict[str, Any] = {"time": time.time(), **logs}
            facts["goodput"] = round(run.goodput, 4)
            spent = self._ledger.take()
            facts |= spent.to_json() if spent.steps else {}
            run.metrics.add(step, epoch, **facts)

    def _refuse_loss(self, step: int, what: str) -> None:
        policy = self._run.orders.on_nan
        saved = "the newest checkpoint is from before"
        raise NumericError(
            f"Step {step} of {self._model.name!r} came to {what}, in epoch "
            f"{(self._epoch or 0) + 1}; {saved}.",
            f"With --on-nan {policy} a run does not go on with numbers that are none, "
            "and does not save them.",
            "Look at the data of that step, lower the learning rate or clip gradients. "
            "--on-nan rollback tries again from the checkpoint, --on-nan skip leaves "
            "such steps out.",
            step=step,
        )

    def _refuse_failed_save(self) -> None:
        """What nothing comes after must have been saved."""
        failure = self._run.store.failure
        if failure is not None:
            raise failure

    def _notice_skips(self) -> None:
        """Says how many steps of an epoch were left out."""
        done = self._run.step - self._first_step
        skipped = done - (self._num_updates() - self._first_update)
        if skipped:
            self._channel.say(
                notice=f"{skipped} of {done} steps in epoch {(self._epoch or 0) + 1} "
                "led to NaN or infinity and were left out."
            )

    def _num_updates(self) -> int:
        optimizer, values = self._model.optimizer, newest_values(self._model)[2]
        pairs = zip(optimizer.variables, values, strict=True)
        return next(int(value) for v, value in pairs if v is optimizer.iterations)

    def _position(self, step: int, taken: int, *, has_ended: bool = False) -> Position:
        return Position(
            fit=self._number,
            epoch=self._epoch or 0,
            step=step,
            taken=taken,
            total=self._run.step,
            has_ended=has_ended,
        )

    def _save(self, position: Position, *, wait: bool) -> None:
        if not all_finite(self._model):
            self._refuse_loss(position.total, "weights that are NaN or infinite")
        callbacks, arrays = self._states.to_save()
        facts = {
            "position": position.to_json(),
            "keep": position.has_ended,
            "random": {"now": random_state(), "at_pass": self._random_at_pass},
            "data_epochs": self._data_epochs.states,
            "sizes": self._sizes,
            "logs": self._host_logs,
            "callbacks": callbacks,
            "useful_seconds": self._run.useful_seconds,
            "plan": self._plan_now,
            "data": self._data,
        }
        values = named_values(self._model)
        self._run.save(Snapshot(position.total, values, arrays, facts), wait=wait)

    def _go_on(self, found: Found) -> None:
        """Puts everything in place as it was when a checkpoint was made."""
        self._channel.enter("checkpoint")
        values = self._run.store.restore(found, targets_of(self._model))
        give_named_values(self._model, values)
        position, facts = position_of(found), found.facts
        self._notice_changes(found)
        self._states.restore(facts["callbacks"], found.host)
        self._sizes = facts["sizes"]
        self._host_logs = facts["logs"]
        self._random = RandomStates(**facts["random"])
        num_batches = facts["sizes"]["num_batches"]
        self._start = Start(position.step, position.taken, facts["logs"], num_batches)
        self._run.go_on(found)
        self._channel.enter("script")

    def _notice_changes(self, found: Found) -> None:
        """Says what is not as it was when a checkpoint was made."""
        before, now = found.facts["plan"], self._plan_now
        if before != now:
            changed = [k for k in now if before.get(k) != now[k]]
            words = ", ".join(f"{k}={now[k]} instead of {before[k]}" for k in changed)
            self._channel.say(
                notice=f"Checkpoint {found.step} is of another plan ({words} now). "
                "What follows is equal to float tolerance, not bit for bit."
            )
        if found.facts["data"] != self._data:
            text = (
                f"The arrays of fit are not those of checkpoint {found.step}: digest "
                f"{found.facts['data']} before, {self._data} now. The run goes on with "
                "the new ones."
            )
            warnings.warn(text, CheckpointWarning, stacklevel=2)
            self._channel.say(notice=text)

    def _refuse_other_data(self, start: Start, sizes: dict[str, Any]) -> None:
        """An epoch can only go on over data of the size that it had."""
        if (start.step == 0 and start.taken == 0) or sizes == self._sizes:
            return
        before, now = self._sizes, sizes
        raise CheckpointError(
            f"The checkpoint of step {self._run.step} was made after {start.step} of "
            f"{before['num_steps']} steps of an epoch (batches of data: "
            f"{before['num_batches']}); fit has {now['num_steps']} now (batches: "
            f"{now['num_batches']}).",
            "An epoch goes on where it was, so its data and batch_size stay the same.",
            "Use the data and batch_size of before, or begin anew in another folder "
            "(--run).",
        )


def _numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """What is a number; metrics may return more."""
    return {name: float(v) for name, v in logs.items() if not np.ndim(v)}
