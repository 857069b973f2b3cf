"""Gloo's thread is found where it is, and nothing else is touched."""

import contextlib
import os

from meshwright.cluster.gloo import let_gloo_give_way


def test_without_other_processes_nothing_changes() -> None:
    assert not let_gloo_give_way(patience=0.01)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            assert os.sched_getscheduler(int(thread)) == os.SCHED_OTHER
