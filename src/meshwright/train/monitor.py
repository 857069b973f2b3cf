"""The callback that shows a training while it runs.

This file imports Keras, whose callbacks are classes; `meshwright` imports it when
somebody asks for `Monitor`.
"""

import contextlib
import time
import warnings
from typing import Any

from meshwright.cluster.identity import process_index
from meshwright.devices.activity import ActivityMeter
from meshwright.errors import ConfigurationError, MonitorWarning
from meshwright.train.display import HOWS, Display, How, make_display
from meshwright.train.glance import Glance
from meshwright.train.stopwatch import Lap, Stopwatch
from meshwright.train.timeline import Ledger, Spent, complaints

import jax
import keras
import numpy as np


class Monitor(keras.callbacks.Callback):
    """Shows how far a `fit` is, how fast, where the time goes and what devices do.

    It is for models that have a strategy, and does not slow them down: steps are
    followed by a thread, and are dispatched together as without it. If the devices have
    to wait for data or for Python, or steps are compiled anew, it says so. Of several
    processes the first one shows it. Use `verbose=0`, or Keras' bar stands beside it.

    Arguments:
        display: `'live'` draws on a terminal, `'lines'` prints a line now and then,
            `'notebook'` shows text that replaces itself, `'none'` shows nothing;
            `'auto'` chooses one of the first three.

    Attributes:
        spent: What the time of each epoch went into.

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

    def __init__(self, display: How = "auto") -> None:
        super().__init__()
        if display not in HOWS:
            raise ConfigurationError(
                f"Monitor received display={display!r} (a {type(display).__name__}).",
                f"A display is one of {', '.join(map(repr, HOWS))}.",
                "Use display='auto' to let it look at where the output goes.",
            )
        self._how = display
        self.spent: list[Spent] = []
        self._stopwatch: Stopwatch | None = None
        self._display: Display | None = None

    def follow(self, stopwatch: Stopwatch) -> None:
        """Called before `fit`, with what follows its steps."""
        self._stopwatch = stopwatch

    def hear(self, lap: Lap) -> None:
        """Called with steps that are done, by a thread."""
        self._of_epoch.add(lap.dispatch)
        self._since_glance.add(lap.dispatch)
        self._step += lap.dispatch.steps
        if self._display is not None and time.monotonic() >= self._next:
            self._show(_numbers_in(jax.device_get(dict(lap.logs))))

    def leave(self) -> None:
        """Called when no more steps come, however that came."""
        self._stopwatch = None
        self._close()

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to show."""
        if self._stopwatch is None:
            raise ConfigurationError(
                f"Monitor was given to a fit of {self.model.name!r}, which has no "
                "strategy.",
                "It follows the steps of models that a strategy trains.",
                "Use mw.distribute(model, mw.Single()) first, or leave the monitor "
                "out.",
            )
        self.spent.clear()
        self._of_epoch, self._since_glance = Ledger(), Ledger()
        self._meter = ActivityMeter()
        self._newest, self._compiling = Spent(), 0.0
        self._is_first = True
        self._step = self._epoch = 0
        self._began = self._next = time.monotonic()
        self._display = make_display(self._how) if process_index() == 0 else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Counts the steps of the epoch."""
        self._epoch, self._step = epoch, 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows what the epoch came to."""
        assert self._stopwatch is not None
        self._stopwatch.wait()
        self.spent.append(self._of_epoch.take())
        self._show(_numbers_in(logs or {}), is_end=True)

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
        for complaint in complaints(spent, self._is_first):
            display.warn(complaint.words)
        self._is_first = False
        glance = Glance(
            epoch=self._epoch + 1,
            epochs=self.params["epochs"],
            step=self._step,
            steps=self.params["steps"],
            numbers=numbers,
            spent=self._newest,
            activities=self._meter.look(),
            seconds_left=self._seconds_left(),
            is_end=is_end,
        )
        display.show(glance)
        self._next = time.monotonic() + display.every

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
