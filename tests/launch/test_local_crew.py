"""The workers of this host: what is left of them."""

import select
import sys
import time
from pathlib import Path

from meshwright.cluster.orders import Orders
from meshwright.launch.crew import Event, Printed
from meshwright.launch.local_crew import LocalCrew
from meshwright.launch.run_folder import open_run

import pytest

from staged_workers import is_alive

pytestmark = pytest.mark.processes

STARTS_OTHERS = """
import os, subprocess, sys, time
ends = sys.argv[1] == "ends"
for _ in range(20):
    other = subprocess.Popen(["sleep", "100"], start_new_session=not ends)
    print(other.pid, flush=True)
time.sleep(0 if ends else 100)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["waits", "ends"])
def test_once_workers_are_killed_nothing_that_they_started_runs(
    tmp_path: Path, how: str
) -> None:
    command = [sys.executable, "-I", "-S", "-c", STARTS_OTHERS, how]
    crew = LocalCrew(range(1), command)
    with open_run(tmp_path / "run") as folder:
        folder.begin(Path("script.py"), [])
        crew.start([Orders(run=str(folder.path))])
        deadline = time.monotonic() + 30
        events: list[Event] = []
        while len(events) < 20 + (how == "ends"):
            assert time.monotonic() < deadline, events
            select.select(crew.filenos(), [], [], 0.2)
            events += crew.take_events()
        started = [int(e.line) for e in events if isinstance(e, Printed)]
        assert all(map(is_alive, started))
        crew.kill()
        assert not any(map(is_alive, started))
        crew.close()
