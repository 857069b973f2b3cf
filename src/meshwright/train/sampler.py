"""A look at what the devices of a `fit` do, while it goes on."""

import threading

from meshwright.devices.occupation import Sample, take_sample
from meshwright.devices.runtime import jax_devices_of_all, name_of
from meshwright.train.timeline import Dispatch

import jax

_STEPS = 5
"""A look takes so many steps, because operations at its edges are not seen whole."""
_SHORTEST, _LONGEST = 0.2, 10.0
THREAD_NAME = "meshwright-sampler"


class Sampler:
    """Looks once at the devices of this process, in a thread of its own.

    Arguments:
        devices: Those of the strategy, also of other processes.
        after: Looks after so many seconds of steps.
    """

    def __init__(self, devices: list[str], after: float) -> None:
        known = jax_devices_of_all()
        here = jax.process_index()
        mine = [known[name] for name in devices if name in known]
        self._names = [name_of(d) for d in mine if d.process_index == here]
        self._after = after
        self._until = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.sample: Sample | None = None
        self.failure: str = ""
        """Why nothing is known, once that is clear."""

    def see(self, dispatch: Dispatch) -> None:
        """Called with steps that are done; begins to look when it is time to."""
        if dispatch.compiled or self._thread is not None:
            return
        seconds = dispatch.ended - max(dispatch.began, self._until)
        self._until = dispatch.ended
        self._after -= seconds
        if self._after <= 0:
            wanted = _STEPS * seconds / dispatch.steps
            seconds = min(max(wanted, _SHORTEST), _LONGEST)
            self._thread = threading.Thread(
                target=self._look, args=(seconds,), name=THREAD_NAME, daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Ends a look that is on."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, seconds: float) -> None:
        try:
            self.sample = take_sample(seconds, self._over, self._names)
        except Exception as error:  # a profile of the user's own, a driver's refusal
            self.failure = f"JAX's profiler failed: {error}"
        else:
            if self.sample is None:
                self.failure = "JAX's profiler saw no operation"
