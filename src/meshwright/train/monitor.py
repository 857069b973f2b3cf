"""The callback that shows a training while it runs.

This file imports Keras, whose callbacks are classes; `meshwright` imports it when
somebody asks for `Monitor`.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cluster.identity import process_index
from meshwright.devices.activity import ActivityMeter
from meshwright.devices.apart import is_apart
from meshwright.devices.occupation import Sample
from meshwright.errors import ConfigurationError, MonitorWarning
from meshwright.train.display import HOWS, Display, How, make_display
from meshwright.train.glance import Glance, complaints_of, describe_sample
from meshwright.train.loggers import Logger, adapt
from meshwright.train.model_state import KINDS, named_values
from meshwright.train.run import current_run
from meshwright.train.run_files import RunFiles
from meshwright.train.sampler import Sampler
from meshwright.train.stopwatch import Lap, Listener, Stopwatch
from meshwright.train.timeline import (
    Ledger,
    Spent,
    complaints,
    is_enough,
    spent_on,
)
from meshwright.train.trace import StepTrace
from meshwright.train.whereabouts import OCCUPATION, files_of

import jax
import keras
import numpy as np

AGAIN_SECONDS = 600.0
"""After so many seconds of steps it is looked again at what devices do."""

LOG_SECONDS = 1.0
"""Loggers get numbers so often, and at the end of every epoch."""


class Monitor(keras.callbacks.Callback, Listener):
    """Shows how far a `fit` is, how fast, where the time goes and what devices do.

    It is for models that have a strategy, and does not slow them down: steps are
    followed by a thread, and are dispatched together as without it. If the devices have
    to wait for data or for Python, steps are compiled anew, or a device stands idle
    beside others, it says so. Of several
    processes the first one shows it. Use `verbose=0`, or Keras' bar stands beside it.

    Arguments:
        display: `'live'` draws on a terminal, `'lines'` prints a line now and then,
            `'notebook'` shows text that replaces itself, `'none'` shows nothing;
            `'auto'` chooses one of the first three.
        run: A folder for configuration, plan and metrics, of which `meshwright report`
            makes a page. Runs of `meshwright train` have one of their own.
        loggers: Where to write numbers besides: TensorBoard writers, the module
            `mlflow`, runs of Weights & Biases, functions of a step and its numbers. One
            that fails is dropped with a warning.
        histograms: Whether TensorBoard gets the weights after each epoch; of several
            processes, those that the first one has.
        profile: The first and the last of some steps to trace with JAX's profiler.
        folder: Where the trace is written, for TensorBoard, XProf and Perfetto.
        look_after: After so many seconds of steps, and every ten minutes from then on,
            JAX's profiler looks for a moment at what devices do; never if it is None,
            or if `profile` is given.

    Attributes:
        spent: What the time of each epoch went into.
        sample: What the devices of this process did when that was last looked at.

    >>> import keras, numpy as np
    >>> import meshwright as mw
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> monitor = mw.Monitor(display="none")
    >>> x, y = np.zeros((64, 4)), np.zeros((64, 1))
    >>> model = mw.distribute(model, mw.Mirrored())
    >>> _ = model.fit(x, y, callbacks=[monitor], verbose=0)
    >>> monitor.spent[0].steps, monitor.spent[0].samples
    (2, 64)
    """

    def __init__(
        self,
        display: How = "auto",
        *,
        run: str | Path | None = None,
        loggers: Sequence[Any] = (),
        histograms: bool = False,
        profile: tuple[int, int] | None = None,
        folder: str | Path = "profile",
        look_after: float | None = 1.0,
    ) -> None:
        super().__init__()
        if display not in HOWS:
            raise ConfigurationError(
                f"Monitor received display={display!r} (a {type(display).__name__}).",
                f"A display is one of {', '.join(map(repr, HOWS))}.",
                "Use display='auto' to let it look at where the output goes.",
            )
        self._how = display
        self._look_after = look_after if profile is None else None
        self._given = [adapt(each) for each in loggers]
        if run is not None and not isinstance(run, str | Path):
            raise ConfigurationError(
                f"Monitor received run={run!r} (a {type(run).__name__}).",
                "It is a folder, which is made if it is not there.",
                "Use, for example, run='runs/mine'.",
            )
        self._files = None if run is None else RunFiles(run)
        self._histograms = histograms
        self._trace = None if profile is None else StepTrace(profile, folder)
        self.spent: list[Spent] = []
        self.sample: Sample | None = None
        self._shown: Sample | None = None
        self._sampler: Sampler | None = None
        self._stopwatch: Stopwatch | None = None
        self._display: Display | None = None
        self._loggers: list[Logger] = []
        self._step = self._epoch = self._done = self._total = 0
        self._began = self._next = self._next_log = 0.0
        self._useful = self._until = 0.0

    def follow(self, stopwatch: Stopwatch, plan: Mapping[str, Any]) -> None:
        """Called before `fit`, with what follows its steps, and by what it is split."""
        self._stopwatch = stopwatch
        self._plan = plan

    def dispatching(self, step: int, num_steps: int) -> None:
        """Begins or ends the trace or a look, if it is time to."""
        if self._trace is not None:
            self._trace.before(step, num_steps)
        sampler = self._sampler  # the thread that hears may take it away
        if sampler is not None:
            sampler.before_steps()

    def dispatched(self, logs: Any) -> None:
        """Keeps what the trace has to wait for."""
        if self._trace is not None:
            self._trace.see(logs)

    def hear(self, lap: Lap) -> None:
        """Called with steps that are done, by a thread."""
        for ledger in (self._of_epoch, self._since_glance, self._since_log):
            ledger.add(lap.dispatch)
        self._useful += spent_on([lap.dispatch], since=self._until).devices
        self._until = lap.dispatch.ended
        if self._sampler is not None:
            self._sampler.see(lap.dispatch)
            self._take_sample()
        self._step += lap.dispatch.steps
        self._done = lap.step
        now = time.monotonic()
        shows = self._display is not None and now >= self._next
        writes = bool(self._loggers or self._writes) and now >= self._next_log
        if shows or writes:
            numbers = _numbers_in(jax.device_get(dict(lap.logs)))
            if shows:
                self._show(numbers)
            if writes:
                self._log(numbers)

    def leave(self) -> None:
        """Called when no more steps come, however that came."""
        self._stopwatch = None
        if self._trace is not None:
            self._trace.stop()
        self._take_sample(waits=True)
        self._close()

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to show."""
        if self._stopwatch is None:
            raise ConfigurationError(
                f"Monitor was given to a fit of {self.model.name!r}, which has no "
                "strategy.",
                "It follows the steps of models that a strategy trains.",
                "Use mw.distribute(model, mw.Single()) first (mw.Single('GPU:1') for "
                "another device than the first one), or leave the monitor out.",
            )
        self.spent.clear()
        self._of_epoch, self._since_glance = Ledger(), Ledger()
        self._since_log = Ledger()
        self._meter = ActivityMeter()
        self._newest, self._compiling = Spent(), 0.0
        self._unjudged = Spent()
        self._useful = self._until = 0.0
        self._is_first = True
        self._step = self._epoch = self._done = 0
        self._began = self._next = self._next_log = time.monotonic()
        is_first = process_index() == 0
        self.sample = self._shown = None
        self._sampler = self._new_sampler(self._look_after) if is_first else None
        self._display = make_display(self._how) if is_first else None
        self._loggers = [*self._given] if is_first else []
        self._has_told_where = False
        self._before = self._total
        if self._writes and self._files is not None:
            self._files.begin(self._plan)

    @property
    def _writes(self) -> bool:
        """Whether files are for this process to write."""
        return self._files is not None and process_index() == 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts the steps of the epoch."""
        self._epoch, self._step = epoch, 0

    def on_test_begin(self, logs: Any = None) -> None:
        """Looks at no device while the model is validated."""
        self._end_steps()

    def _end_steps(self) -> None:
        """Waits for the devices; what they do next is no step of the training."""
        if self._stopwatch is not None:
            self._stopwatch.wait()
        sampler = self._sampler
        if sampler is not None:
            sampler.after_steps()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows what the epoch came to."""
        self._end_steps()
        self.spent.append(self._of_epoch.take())
        numbers = _numbers_in(logs or {})
        self._show(numbers, is_end=True)
        self._log(numbers)
        self._tell_where()
        if self._histograms:
            step = self._total
            self._tell_loggers(lambda each: each.log_weights(step, self._weights))

    def on_train_end(self, logs: Any = None) -> None:
        """Says that the fit has ended well."""
        if self._files is not None and self._writes:
            with contextlib.suppress(OSError):
                self._files.end(self._total)

    @property
    def _weights(self) -> Iterator[tuple[str, Any]]:
        """Those that this process has; asking others would need all of them to ask."""
        for name, value in named_values(self.model).items():
            kind, _, path = name.partition("/")
            is_here = value.is_fully_addressable or value.is_fully_replicated
            if kind == KINDS[0] and is_here:
                yield path, np.asarray(value)

    def _log(self, numbers: dict[str, float]) -> None:
        spent = self._since_log.take()
        paces = spent.to_json() if spent.steps else {}
        if self.sample is not None and spent.steps:
            shares = spent.share("devices"), spent.share("compile")
            parts = self.sample.split(*shares)
            paces |= {f"{part}_share": round(s, 4) for part, s in parts.items()}
        known = {name: value for name, value in paces.items() if value is not None}
        told = {**numbers, **known, "goodput": round(self._goodput(), 4)}
        step = self._before + self._done
        self._total = step
        if self._files is not None and self._writes:
            self._files.add(step, self._epoch, told)
        told["epoch"] = float(self._epoch)
        self._tell_loggers(lambda each: each.log(step, told))
        self._next_log = time.monotonic() + LOG_SECONDS

    def _tell_where(self) -> None:
        """Writes where variables lie, when the first epoch has placed them."""
        if self._files is not None and not self._has_told_where:
            self._has_told_where = True
            for name, values in files_of(self.model):
                self._write(name, values)

    def _write(self, name: str, values: Any) -> None:
        if self._files is not None and self._writes:
            self._files.write(name, values)

    def _new_sampler(self, after: float | None) -> Sampler | None:
        return None if after is None else Sampler(self._plan["devices"], after)

    def _take_sample(self, *, waits: bool = False) -> None:
        """Takes over what devices did, if that has become known."""
        sampler = self._sampler
        if sampler is None:
            return
        if waits:
            sampler.close()
        if sampler.failure:
            warnings.warn(
                f"Monitor cannot look at what devices do: {sampler.failure}. The "
                "training goes on.",
                MonitorWarning,
                stacklevel=2,
            )
        if sampler.sample is not None:
            self.sample = sampler.sample
            self._write(OCCUPATION, self.sample.to_json())
            run = None if is_apart() else current_run()
            if run is not None:
                run.write(OCCUPATION, self.sample.to_json())
            self._sampler = self._new_sampler(None if waits else AGAIN_SECONDS)
        if waits or sampler.failure:
            self._sampler = None

    def _tell_loggers(self, tell: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                tell(logger)
            except Exception as error:
                self._loggers.remove(logger)
                warnings.warn(
                    f"Monitor has dropped {logger!r}, which failed: {error!r}. The "
                    "training goes on.",
                    MonitorWarning,
                    stacklevel=2,
                )

    def _show(self, numbers: dict[str, float], *, is_end: bool = False) -> None:
        if self._display is None:
            return
        try:
            self._show_on(self._display, numbers, is_end)
        except Exception as error:
            self._close()
            warnings.warn(
                f"Monitor cannot show the training any more: {error!r}. It goes on.",
                MonitorWarning,
                stacklevel=2,
            )

    def _close(self) -> None:
        display, self._display = self._display, None
        if display is not None:
            with contextlib.suppress(Exception):
                display.close()

    def _show_on(
        self, display: Display, numbers: dict[str, float], is_end: bool
    ) -> None:
        spent = self._since_glance.take()
        self._compiling += spent.compile
        # At the end of an epoch all may have been shown already.
        self._newest = spent if spent.steps else self._newest
        self._unjudged += spent
        if is_enough(self._unjudged):
            self._say(display, complaints(self._unjudged, self._is_first))
            self._unjudged, self._is_first = Spent(), False
        self._tell_sample(display)
        glance = Glance(
            epoch=self._epoch + 1,
            epochs=self.params["epochs"],
            step=self._step,
            steps=self.params["steps"],
            numbers=numbers,
            spent=self.spent[-1] if is_end else self._newest,
            sample=self.sample,
            activities=self._meter.look(),
            goodput=self._goodput(),
            seconds_left=self._seconds_left(),
            is_end=is_end,
        )
        display.show(glance)
        self._next = time.monotonic() + display.every

    def _say(self, display: Display, complaints: list[str]) -> None:
        """Says what slows the training down."""
        for words in complaints:
            display.warn(words)

    def _tell_sample(self, display: Display) -> None:
        """Says what a new sample shows."""
        if self.sample is not None and self.sample is not self._shown:
            self._shown = self.sample
            for words in describe_sample(self.sample):
                display.tell(words)
            self._say(display, complaints_of(self.sample))

    def _goodput(self) -> float:
        """The share of the time in which devices took steps, since the fit began.

        In a run of `meshwright train` it counts from its launch.
        """
        run = None if is_apart() else current_run()
        if run is not None:
            return run.goodput
        return self._useful / max(time.monotonic() - self._began, 1e-9)

    def _seconds_left(self) -> float | None:
        """By the pace so far, in which nothing is compiled any more.

        None if nobody knows how many steps there are.
        """
        steps, epochs = self.params["steps"], self.params["epochs"]
        if not steps:
            return None
        done = self._epoch * steps + self._step
        if not done:
            return None
        passed = time.monotonic() - self._began - self._compiling
        return passed / done * (epochs * steps - done)


def _numbers_in(logs: Any) -> dict[str, float]:
    """What is a number; metrics may return more."""
    return {name: float(v) for name, v in logs.items() if not np.ndim(v)}
