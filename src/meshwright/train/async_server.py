"""The server of an asynchronous training: it applies updates as they arrive."""

import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshwright.cluster.channel import channel
from meshwright.devices.start import user_line
from meshwright.errors import (
    MeshwrightError,
    NumericError,
    WorkerError,
    WorkerWarning,
)
from meshwright.parallel.staleness import Staleness, StalenessBound
from meshwright.train.async_programs import AsyncPrograms
from meshwright.train.async_worker import (
    Computed,
    Pulled,
    Task,
    Worker,
    WorkerLostError,
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

_LIFE_SECONDS = 5.0
"""A launcher hears so often that updates are still applied."""


_NO_LOGS = {"loss": np.float32(np.nan)}
"""Those of a gradient that was left out before there was any update."""


class Rules(NamedTuple):
    """By which rules updates are made."""

    max_staleness: int
    restarts: int
    """How many times each worker may come back in a `fit`."""
    skips: bool
    """Whether gradients that are NaN are left out instead of refused."""


class UpdateServer:
    """Gives batches and weights to workers, and applies what they push.

    Each worker has a thread; whoever is ready takes the next batch. The threads share
    the state under one lock, so updates happen one after the other.

    Arguments:
        programs: What is run.
        workers: The workers.
        place: The device of the server.
        rules: Says by which rules a dispatch is served.
        staleness: Counts the updates by their staleness.

    Attributes:
        state: The newest state, in the lists of Keras'.
        updates: Updates so far.
        skipped: Gradients that were left out.
    """

    def __init__(
        self,
        programs: AsyncPrograms,
        workers: Sequence[Worker],
        place: NamedSharding,
        rules: Callable[[], Rules],
        staleness: Staleness,
    ) -> None:
        self._programs = programs
        self._workers = workers
        self._place = place
        self._find_rules = rules
        self._rules = rules()
        self._bound = StalenessBound(self._rules.max_staleness)
        self._staleness = staleness
        self._losses: list[str] = []
        self._changed = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._num_left = 0
        self._logs: list[Any] = []
        self._error: BaseException | None = None
        self._is_stopped = False
        self.state: Any = None
        self.skipped = 0

    def run(self, state: Any, tasks: Sequence[Task]) -> list[Any]:
        """Does all tasks; returns the logs after each of them.

        The newest state is `state`, also if a worker fails or Ctrl-C is pressed.
        """
        self.state = state
        # A user may have changed them.
        self._rules = self._find_rules()
        self._bound.most = self._rules.max_staleness
        for task in tasks:
            self._programs.prepare(task.key.shapes)
        weights, others, slots, metrics = jax.device_put(state, self._place)
        # Updates use them up, and averages of weights may be the weights themselves.
        self.state = weights, others, _copied(slots), metrics
        self._waiting.extend(tasks)
        self._num_left = len(tasks)
        self._logs, self._error, self._is_stopped = [], None, False
        self._serve(
            [
                threading.Thread(target=self._work, args=(worker,), name=str(worker))
                for worker in self._workers
                if not worker.is_given_up
            ]
        )
        self._warn_of_losses()
        if self._error is not None:
            raise self._error
        return self._logs

    def _serve(self, threads: Sequence[threading.Thread]) -> None:
        """Lets workers work until everything is done, or something stops them."""
        try:
            with self._changed:
                for thread in threads:
                    thread.start()
                told = self._bound.version
                while not self._changed.wait_for(self._is_over, _LIFE_SECONDS):
                    if self._bound.version != told:
                        channel().live()
                    told = self._bound.version
        except BaseException:  # Ctrl-C
            self._stop()
            for worker in self._workers:
                worker.interrupt()
            raise
        finally:
            self._stop()
            for thread in threads:
                if thread.ident is not None:  # Ctrl-C may come before it is started
                    thread.join()

    def _warn_of_losses(self) -> None:
        """In the main thread, where a user's filters for warnings are."""
        losses, self._losses = self._losses, []
        file, line = user_line() or ("<unknown>", 1)
        for text in losses:
            channel().say(notice=text)
            warnings.warn_explicit(text, WorkerWarning, file, line)

    def _is_over(self) -> bool:
        return self._is_stopped or self._num_left == 0

    def _stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self, worker: Worker) -> None:
        """What the thread of a worker does."""
        try:
            while True:
                taken = self._take(worker)
                if taken is None:
                    return
                begin = time.perf_counter()
                try:
                    computed = worker.compute(*taken)
                except WorkerLostError as lost:
                    if not self._goes_on_without(worker, taken[0], str(lost)):
                        return
                    continue
                is_good = self._looks_good(worker, *taken, computed)
                arrived = jax.device_put(computed, self._place) if is_good else None
                worker.figures.busy += time.perf_counter() - begin
                self._push(worker, *taken, arrived)
        except BaseException as error:
            with self._changed:
                self._error = self._error or _named(error, worker, self._bound.version)
                self._bound.withdraw(worker.number)
            self._stop()

    def _goes_on_without(self, worker: Worker, task: Task, because: str) -> bool:
        """Gives the batch of a worker that died to others; whether it comes back."""
        figures = worker.figures
        with self._changed:
            self._bound.withdraw(worker.number)
            if self._is_stopped:
                return False
            figures.restarts += 1
            self._waiting.appendleft(task)
            worker.is_given_up = figures.restarts > self._rules.restarts
            self._tell(worker, because)
            self._changed.notify_all()
        if all(each.is_given_up for each in self._workers):
            raise WorkerError(
                f"{worker} {because}, and no other worker is left.",
                f"A worker is started again {self._rules.restarts} times in a fit.",
                "Look at what the workers printed, at the memory of the machine, or "
                "raise strategy.restarts.",
            )
        return not worker.is_given_up

    def _tell(self, worker: Worker, because: str) -> None:
        times = f"{worker.figures.restarts} of {self._rules.restarts} times"
        what = "is given up" if worker.is_given_up else f"is started again, {times}"
        self._losses.append(
            f"{worker} {because} after {self._bound.version} updates. Another one "
            f"takes its batch, and it {what}."
        )

    def _take(self, worker: Worker) -> tuple[Task, Pulled] | None:
        """The next batch and the newest weights; None if there is nothing to do."""

        def is_ready() -> bool:
            return self._is_over() or bool(self._waiting and self._bound.may_pull())

        with self._changed:
            self._wait(worker, is_ready)
            if self._is_over():
                return None
            task = self._waiting.popleft()
            self._bound.pull(worker.number)
            return task, self._pull(task)

    def _pull(self, task: Task) -> Pulled:
        weights, others, slots, metrics = self.state
        numbers = self._programs.drawn
        if task.drawn is None:
            # Seeds follow the order of the data, whoever computes, and however long.
            task.drawn = [others[i] for i in numbers]
            draw = self._programs.for_server(task.key.shapes).draw
            if draw is not None:
                after = draw((weights, others, metrics), task.batch)
                now = _with(others, numbers, after)
                self.state = weights, now, slots, metrics
        seen = _with(others, numbers, task.drawn)
        return Pulled(weights, seen, metrics, self._bound.version)

    def _looks_good(
        self, worker: Worker, task: Task, pulled: Pulled, computed: Computed
    ) -> bool:
        if bool(np.asarray(computed.finite)):
            return True
        if self._rules.skips:
            return False
        raise NumericError(
            f"The loss or a gradient of {worker} is NaN or infinite, for batch "
            f"{task.number} of a dispatch, on weights after {pulled.version} updates.",
            "One such update would spoil the weights of all workers, so it was not "
            "applied.",
            "Lower the learning rate, clip the gradients (clipnorm), look at the data, "
            "or lower max_staleness.",
            step=self._bound.version,
        )

    def _push(
        self,
        worker: Worker,
        task: Task,
        pulled: Pulled,
        computed: Computed | None,
    ) -> None:
        def is_ready() -> bool:
            return self._is_stopped or self._bound.may_apply(worker.number)

        with self._changed:
            if computed is not None:
                self._wait(worker, is_ready)
            if self._is_stopped:
                self._bound.withdraw(worker.number)
                return
            if computed is None:
                self._bound.withdraw(worker.number)
                self.skipped += 1
                self._logs.append(self._logs[-1] if self._logs else _NO_LOGS)
            else:
                self._apply(worker, task, pulled, computed)
            self._num_left -= 1
            self._changed.notify_all()

    def _apply(
        self, worker: Worker, task: Task, pulled: Pulled, computed: Computed
    ) -> None:
        weights, others, slots, metrics = self.state
        age = self._bound.apply(worker.number)
        logs, self.state = self._programs.for_server(task.key.shapes).apply(
            *(slots, weights, others, metrics, computed),
            *(pulled.others, pulled.metrics, np.bool_(age == 0), task.batch),
        )
        self._logs.append(logs)
        self._staleness[age] += 1
        worker.figures.updates += 1
        worker.figures.samples += task.size

    def _wait(self, worker: Worker, is_ready: Any) -> None:
        begin = time.perf_counter()
        self._changed.wait_for(is_ready)
        worker.figures.waited += time.perf_counter() - begin


def _copied(values: list[Any]) -> list[Any]:
    return [jnp.copy(value) for value in values]


def _with(values: list[Any], numbers: list[int], new: list[Any]) -> list[Any]:
    """A list in which some values are others."""
    changed = dict(zip(numbers, new, strict=True))
    return [changed.get(i, value) for i, value in enumerate(values)]


def _named(error: BaseException, worker: Worker, version: int) -> BaseException:
    """An error of a worker, by its name; those that are ours know it."""
    if isinstance(error, MeshwrightError):
        return error
    first = str(error).splitlines()[0] if str(error) else "without a word"
    named = WorkerError(
        f"{worker} failed after {version} updates: {type(error).__name__}: {first}",
        "A batch that cannot be computed ends the training; what was applied before "
        "stays.",
        "Look at the traceback of the worker, which is below.",
    )
    # Keras cuts off the causes of errors.
    named.add_note("".join(traceback.format_exception(error)))
    return named
