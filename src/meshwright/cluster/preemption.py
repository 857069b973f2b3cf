"""Being asked to stop."""

import signal
import threading

EXIT_PREEMPTED = 75
"""The exit status of a process that saved and stopped because it was asked to."""

_asked = threading.Event()


def watch_for_preemption() -> None:
    """Takes `SIGTERM` as the wish that this process saves and stops."""
    signal.signal(signal.SIGTERM, lambda number, frame: _asked.set())


def preemption_wanted() -> bool:
    """Whether this process was asked to save and stop."""
    return _asked.is_set()
