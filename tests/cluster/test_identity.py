"""Who this process is among the others."""

import subprocess
import sys

import meshwright as mw
from meshwright.launch.loopback import free_port

import pytest

WORKER = """
import sys
import jax
import meshwright as mw
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, index, coordinator_bind_address=address)
print(mw.process_index(), mw.process_count())
"""


def test_alone_it_is_the_first_of_one() -> None:
    assert (mw.process_index(), mw.process_count()) == (0, 1)


@pytest.mark.processes
def test_two_processes_know_who_they_are() -> None:
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(i)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    answers = [worker.communicate(timeout=60)[0] for worker in workers]
    assert answers == ["0 2\n", "1 2\n"]
