"""Gloo's thread is found where it is, and nothing else is touched."""

import os

from meshwright.cluster.gloo import let_gloo_give_way


def test_without_other_processes_nothing_changes() -> None:
    assert not let_gloo_give_way(patience=0.01)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}
