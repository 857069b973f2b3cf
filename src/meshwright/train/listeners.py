"""What the callbacks of a run want to know between its steps."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax

REFRESH_SECONDS = 0.1
"""How often a progress bar is brought up to date."""

_METHODS = {
    "fit": ("on_train_batch_begin", "on_train_batch_end"),
    "evaluate": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
_OLD_METHODS = ("on_batch_begin", "on_batch_end")


class Logs(dict[str, Any]):
    """What the last of several steps returned, and what each of them did."""

    def __init__(self, last: Any, each: Any, num_steps: int) -> None:
        super().__init__(last)
        self._each = each
        self._num_steps = num_steps

    @classmethod
    def of_one(cls, logs: Any) -> "Logs":
        """What a single step returned."""
        return cls(logs, {name: [value] for name, value in logs.items()}, 1)

    def of_each(self) -> Iterator[dict[str, float]]:
        """The numbers of step after step; waits for the devices."""
        host = jax.device_get(self._each)
        for i in range(self._num_steps):
            yield {name: float(values[i]) for name, values in host.items()}


class Listeners:
    """The callbacks of one `fit`, `evaluate` or `predict`.

    A callback that has methods for batches may look at the model there, change it or
    stop the training, so steps are then dispatched one by one. Those of Keras that do
    something at the end of an epoch only are known. One that says that it can be called
    at any time (Keras' attribute `async_safe`) wants the numbers alone: it gets those
    of every batch, but only when several are done.

    Attributes:
        of_state: Names of the callbacks that want the model after every batch.
        of_numbers: Callbacks that want the numbers of every batch.
    """

    def __init__(self, callbacks: Any, verb: str) -> None:
        self._begin, self._end = _METHODS[verb]
        listening = [c for c in callbacks_in(callbacks) if _listens(c, verb)]
        self.of_numbers = [c for c in listening if getattr(c, "async_safe", False)]
        others = [c for c in listening if c not in self.of_numbers]
        self.of_state = [type(callback).__name__ for callback in others]
        self._bar = _Bar(self._end)

    @property
    def wants_each(self) -> bool:
        """Whether the numbers of every batch are wanted."""
        return bool(self.of_numbers)

    def before_batch(self, original: Any, callbacks: Any, step: int) -> None:
        """Takes the place of Keras' calls of all callbacks before a batch."""
        if self.of_state:
            original(callbacks, step)

    def after_batch(self, original: Any, callbacks: Any, step: int, logs: Any) -> None:
        """Takes the place of Keras' calls of all callbacks after a batch, or several.

        Arguments:
            original: Keras' function.
            callbacks: Keras' `CallbackList`.
            step: The number of the last batch.
            logs: What its step returned.
        """
        if self.of_state:
            original(callbacks, step, logs)
            return
        if self.of_numbers:
            self._tell_numbers(step, logs)
        progress = callbacks._progbar
        if progress is not None and progress.verbose == 1:
            self._bar.follow(progress, step, logs)

    def _tell_numbers(self, step: int, logs: Any) -> None:
        several = logs if isinstance(logs, Logs) else Logs.of_one(logs)
        each = list(several.of_each())
        for number, numbers in enumerate(each, start=step - len(each) + 1):
            for callback in self.of_numbers:
                getattr(callback, self._begin)(number, {})
                getattr(callback, self._end)(number, dict(numbers))


class _Bar:
    """Keeps a progress bar up to date without waiting for the devices."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._pending: deque[tuple[int, Any]] = deque()
        self._shown = 0.0

    def follow(self, progress: Any, step: int, logs: Any) -> None:
        """Shows the newest step that is done, if it is time to."""
        if self._pending and step <= self._pending[-1][0]:
            self._pending.clear()  # of the epoch before
        self._pending.append((step, logs))
        if time.monotonic() - self._shown < REFRESH_SECONDS:
            return
        done = None
        while self._pending and _is_done(self._pending[0][1]):
            done = self._pending.popleft()
        if done is not None:
            numbers = {name: float(value) for name, value in done[1].items()}
            getattr(progress, self._method)(done[0], numbers)
            self._shown = time.monotonic()


def _is_done(logs: Any) -> bool:
    arrays = (leaf for leaf in jax.tree.leaves(dict(logs)) if hasattr(leaf, "is_ready"))
    return all(array.is_ready() for array in arrays)


def callbacks_in(callbacks: Any) -> list[Any]:
    """Those that were given, one by one."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def _listens(callback: Any, verb: str) -> bool:
    """Whether a callback does something between the steps."""
    import keras

    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    is_saver = isinstance(
        callback, keras.callbacks.ModelCheckpoint | keras.callbacks.BackupAndRestore
    )
    if is_saver and type(callback).__module__.startswith("keras."):
        return bool(callback.save_freq != "epoch")
    names = _METHODS[verb] + (_OLD_METHODS if verb == "fit" else ())
    # Keras marks the methods of its base class, which do nothing.
    methods = [getattr(callback, name) for name in names]
    return not all(getattr(method, "_is_default", False) for method in methods)
