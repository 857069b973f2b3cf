"""The thread that carries what processes on CPUs send to each other.

It belongs to Gloo, and it does not wait for the lock of a connection: while another
thread holds that, it asks again at once. Where both share a core, it keeps the other
one from going on until the system takes the core from it, which is after 4 ms. As a
thread of the class SCHED_BATCH it does not take the core from another. Two processes
with a core each then need 0.2 instead of 4 ms to add up a few numbers, and about half
the time for 17 MB (`benchmarks/collectives.py`). On cores that other programs keep busy
it comes late instead, and collectives took up to three times as long.
"""

import os
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_CALLS = ("232", "22")
"""`epoll_wait` on x86-64, `epoll_pwait` on 64-bit ARM."""
_ARGUMENTS = ["0x40", "0xa"]
"""At most 64 events, for at most 10 ms: as Gloo, and nobody else here, asks."""


def let_gloo_give_way(patience: float = 0.1) -> bool:
    """Puts Gloo's thread behind the others; nothing happens where that is not possible.

    Arguments:
        patience: Seconds to look for the thread, which may be at work.

    Returns:
        Whether it was found.
    """
    deadline = time.monotonic() + patience
    while _TASKS.exists():
        found = [task for task in _TASKS.iterdir() if _listens_for_gloo(task)]
        for task in found:
            os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))
        if found or time.monotonic() > deadline:
            return bool(found)
        time.sleep(0.002)
    return False


def _listens_for_gloo(task: Path) -> bool:
    try:
        call, *arguments = (task / "syscall").read_text().split()
    except OSError:
        return False  # it has just ended, or the system does not tell
    return call in _CALLS and arguments[2:4] == _ARGUMENTS
