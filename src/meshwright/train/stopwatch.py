"""When the steps of one `fit` began and ended, without waiting for them.

Steps are dispatched ahead of the devices. A thread waits for what each dispatch
returns, one after the other, and so knows when the devices were done with it.
"""

import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.cluster.channel import channel
from meshwright.data.tally import Tally
from meshwright.train.timeline import Dispatch

import jax

THREAD_NAME = "meshwright-stopwatch"
"""The name of the thread, for who lists threads."""


class Lap(NamedTuple):
    """Steps that were dispatched together."""

    step: int
    """Steps of this `fit` so far, with them."""
    logs: Any
    """What the last of them returned."""
    dispatch: Dispatch


class Listener:
    """Who wants to know of steps.

    What goes wrong there is its own affair: no training stops because of it.
    """

    def dispatching(self, step: int, num_steps: int) -> None:
        """Called before steps are dispatched.

        Arguments:
            step: Steps of this `fit` before them.
            num_steps: How many these are.
        """

    def dispatched(self, logs: Any) -> None:
        """Called with what a dispatch returned; the devices may still be at it."""

    def hear(self, lap: Lap) -> None:
        """Called with steps that are done, by a thread."""

    def leave(self) -> None:
        """Called when nothing more comes."""


class Stopwatch:
    """Follows the steps of one `fit`; the `Watch` of its intake.

    Arguments:
        tally: What comes out of the data.
        listeners: Told of each lap by a thread, when the devices are done with it.
    """

    def __init__(self, tally: Tally, listeners: Sequence["Listener"]) -> None:
        self._tally = tally
        self._listeners = tuple(listeners)
        self._step = 0
        self._laps: queue.Queue[Lap | None] = queue.Queue()
        self.enter_epoch()
        self._thread = threading.Thread(
            target=_follow,
            args=(self._laps, self._listeners),
            name=THREAD_NAME,
            daemon=True,
        )
        self._thread.start()

    def enter_epoch(self) -> None:
        """Called before the first step of an epoch."""
        self._entered = time.monotonic()
        self._mark()

    def before_steps(self, num_steps: int) -> None:
        """Called before steps are dispatched."""
        for listener in self._listeners:
            listener.dispatching(self._step, num_steps)
        self._num_steps = num_steps
        self._called = time.monotonic()
        self._waited_before = self._tally.waited

    def see(self, logs: Any) -> None:
        """Called with what the dispatch returned."""
        # Batches that come one by one are waited for within the call.
        inside = self._tally.waited - self._waited_before
        dispatch = Dispatch(
            steps=self._num_steps,
            samples=self._tally.samples - self._samples,
            entered=self._entered,
            began=self._called + inside,
            ended=0.0,
            waited=self._tally.waited - self._waited,
            compiled=channel().visits["compile"] > self._num_compiled,
        )
        self._step += self._num_steps
        self._mark()
        self._laps.put(Lap(self._step, logs, dispatch))
        for listener in self._listeners:
            listener.dispatched(logs)

    def wait(self) -> None:
        """Waits until the devices are done, and the listeners have heard of it."""
        self._laps.join()

    def close(self, *, waits: bool) -> None:
        """Ends the thread; it waits for the devices, unless something went wrong."""
        self._laps.put(None)
        if waits:
            self._thread.join()
        for listener in self._listeners:
            listener.leave()

    def _mark(self) -> None:
        self._samples, self._waited = self._tally.samples, self._tally.waited
        self._num_compiled = channel().visits["compile"]


def _follow(laps: "queue.Queue[Lap | None]", listeners: Sequence[Listener]) -> None:
    while (lap := laps.get()) is not None:
        if _are_done(lap.logs):
            done = replace(lap.dispatch, ended=time.monotonic())
            for listener in listeners:
                _tell(listener, lap._replace(dispatch=done))
        laps.task_done()
    laps.task_done()


def _tell(listener: Listener, lap: Lap) -> None:
    """Who fails to hear is shown as any thread that fails; the others go on."""
    try:
        listener.hear(lap)
    except Exception:
        failed = (*sys.exc_info(), threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(failed))


def _are_done(logs: Any) -> bool:
    """Waits for steps; False if they failed, which is raised where Keras reads them."""
    try:
        jax.block_until_ready(dict(logs))
    except jax.errors.JaxRuntimeError:
        return False
    return True
