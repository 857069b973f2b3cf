"""Two real processes train one model: the core rows of the battery, and what is theirs.

The processes go through all cases of `worker.py` and say what came of each.
"""

import json
import subprocess
import sys
from pathlib import Path

from meshwright.launch.loopback import free_port

import pytest

WORKER = Path(__file__).with_name("worker.py")
NUM_CASES = 34


@pytest.mark.processes
def test_two_processes_train_one_model_as_one_device_would() -> None:
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [worker.communicate(timeout=280) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for worker, (out, err) in zip(workers, said, strict=True):
        assert worker.returncode == 0, err
        lines = [line for line in out.splitlines() if line.startswith('["')]
        outcomes = dict(json.loads(line) for line in lines)
        wrong = {k: v for k, v in outcomes.items() if v != "as it should be"}
        assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())
        assert len(outcomes) == NUM_CASES
