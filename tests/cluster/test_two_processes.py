"""Two real processes train one model: the core rows of the battery, and what is theirs.

The processes are started once, go through all cases (`worker.py`), and say what came of
each; every case is a test here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from meshwright.launch.loopback import free_port

import pytest

WORKER = Path(__file__).with_name("worker.py")

CASES = [
    "devices_have_the_names_of_their_processes",
    "single_is_refused",
    "weights_agree_without_a_seed",
    "evaluate_and_predict_give_everything_to_everybody",
    "a_stream_that_ends_early_in_one_process_stops_all",
    "a_stream_that_fails_in_one_process_stops_all",
    "batches_of_different_sizes_are_refused",
    "arrays_of_different_lengths_are_refused",
    "streams_and_early_stops_train_alike",
]
ROWS = [
    "mirrored-mlp",
    "mirrored-cnn",
    "mirrored-dropout",
    "one-device-each-lstm",
    "fsdp-4-cnn",
    "fsdp-2-transformer",
    "tensor-2-transformer",
    "tensor-4-mlp",
    "hybrid-mlp",
    "accumulate-mlp",
    "remat-cnn",
]

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("two processes")]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, str]]:
    """What came of every case, by process."""
    address = f"127.0.0.1:{free_port()}"
    # Each of the two would write the same programs; without a cache they cannot meet.
    environment = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        said = [worker.communicate(timeout=280) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    found = []
    for worker, (out, err) in zip(workers, said, strict=True):
        lines = [line for line in out.splitlines() if line.startswith("[")]
        found.append(dict(json.loads(line) for line in lines if '"' in line))
        assert worker.returncode == 0, err
    return found


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_two_processes_act_as_one(
    outcomes: list[dict[str, str]], case: str, process: int
) -> None:
    assert outcomes[process][case] == "as it should be"


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("row", ROWS)
def test_training_over_two_processes_equals_one_device(
    outcomes: list[dict[str, str]], row: str, process: int
) -> None:
    assert outcomes[process][row] == "as it should be"
