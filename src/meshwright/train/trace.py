"""A trace of some steps, as JAX's profiler takes it."""

from pathlib import Path
from typing import Any

from meshwright.devices.sizes import is_count
from meshwright.errors import ConfigurationError

import jax


class StepTrace:
    """Traces the steps of a fit from one number to another.

    Steps that are dispatched together are traced together, so a trace may begin earlier
    and end later than it was asked for.

    Arguments:
        steps: The first step to trace, and the last; from 1.
        folder: Where to write it, for TensorBoard, XProf and Perfetto.
    """

    def __init__(self, steps: Any, folder: str | Path) -> None:
        self._first, self._last = _checked(steps)
        self.folder = Path(folder)
        self._is_on = False
        self._logs: Any = None

    def before(self, step: int, num_steps: int) -> None:
        """Called before steps are dispatched.

        Arguments:
            step: Steps before them.
            num_steps: How many these are.
        """
        if self._is_on and step >= self._last:
            self.stop()
        begins = step < self._last and step + num_steps >= self._first
        if begins and not self._is_on:
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True)
            self._is_on = True

    def see(self, logs: Any) -> None:
        """Called with what a dispatch returned."""
        self._logs = dict(logs)

    def stop(self) -> None:
        """Ends the trace, when the devices are done."""
        if self._is_on:
            self._is_on = False
            jax.block_until_ready(self._logs)
            jax.profiler.stop_trace()


def _checked(steps: Any) -> tuple[int, int]:
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2
    if is_pair and all(map(is_count, steps)) and 1 <= steps[0] <= steps[1]:
        return steps[0], steps[1]
    raise ConfigurationError(
        f"Monitor received profile={steps!r}.",
        "It is a pair of steps: the first one to trace, from 1, and the last one.",
        "Use, for example, profile=(10, 15); the first steps are compiled.",
    )
