"""Being asked to stop: whoever is, all processes save after the same step.

In a run of several processes JAX has taken the signal over, and its coordination
service finds the step that all of them can still reach.
"""

import os
import signal
import threading
from itertools import count

from meshwright.cluster.identity import process_count

EXIT_PREEMPTED = 75
"""The exit status of a process that saved and stopped because it was asked to."""

_asked = threading.Event()
_points = count()


class Preempted(SystemExit):
    """Ends a script that was asked to stop, after a checkpoint was saved.

    It is no error, so `except Exception` in a script does not keep it from ending.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step


def watch_for_preemption() -> None:
    """Takes `SIGTERM` as the wish that this process saves and stops."""
    signal.signal(signal.SIGTERM, lambda number, frame: _asked.set())


def preemption_wanted() -> bool:
    """Whether this is the point at which all processes stop.

    All of them ask as often, at the same points of their work.
    """
    point = next(_points)
    if process_count() == 1:
        return _asked.is_set()
    from jax.experimental import multihost_utils

    if _asked.is_set():
        # It came before JAX had taken the signal over.
        _asked.clear()
        os.kill(os.getpid(), signal.SIGTERM)
    return bool(multihost_utils.reached_preemption_sync_point(point))
