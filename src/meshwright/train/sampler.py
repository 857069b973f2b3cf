"""A look at what the devices of a `fit` do, while it goes on."""

import threading

from meshwright.devices.occupation import Look, Sample
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
        self._until = self._step_seconds = 0.0
        self._over = threading.Event()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.sample: Sample | None = None
        self.failure: str = ""
        """Why nothing is known, once that is clear."""

    def see(self, dispatch: Dispatch) -> None:
        """Called with steps that are done."""
        if dispatch.compiled:
            return
        seconds = dispatch.ended - max(dispatch.began, self._until)
        self._until = dispatch.ended
        self._after -= seconds
        self._step_seconds = seconds / dispatch.steps

    def before_steps(self) -> None:
        """Called before steps are dispatched; begins to look when it is time to."""
        if self._after > 0 or self._thread is not None or not self._step_seconds:
            return
        try:
            look = Look()
        except Exception as error:  # a profile of the user's own, a driver's refusal
            self.failure = _failed(error)
            return
        self._thread = threading.Thread(
            target=self._go_on, args=(look,), name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def after_steps(self) -> None:
        """Called when no steps follow for a while; what devices do then is not seen."""
        if self._thread is not None:
            self._over.set()
            self._has_ended.wait()

    def close(self) -> None:
        """Called when no steps follow at all; waits for a look that is on."""
        self.after_steps()
        if self._thread is not None:
            self._thread.join()

    def _go_on(self, look: Look) -> None:
        wanted = _STEPS * self._step_seconds
        self._over.wait(min(max(wanted, _SHORTEST), _LONGEST))
        try:
            look.end()
            self._has_ended.set()
            self.sample = look.sample(self._names)
        except Exception as error:
            self.failure = _failed(error)
        else:
            if self.sample is None:
                self.failure = "JAX's profiler saw no operation"
        finally:
            self._has_ended.set()


def _failed(error: Exception) -> str:
    return f"JAX's profiler failed: {error}"
