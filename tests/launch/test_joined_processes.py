"""Two real workers with JAX between them: they meet, part, and lose each other."""

import os
import socket
from pathlib import Path

from meshwright.launch.local_crew import LocalCrew, worker_command

import pytest

from staged_workers import supervise

pytestmark = pytest.mark.processes

SUM = """
import os, sys
import meshwright as mw
import numpy as np
from jax.experimental import multihost_utils
from meshwright.cluster.channel import channel
from meshwright.cluster.orders import current_orders

def add_up():
    channel().enter("step")
    ranks = multihost_utils.process_allgather(np.array([mw.process_index() + 1]))
    return int(ranks.sum())

print("sum", add_up(), flush=True)
channel().finish_step(1)
"""


class AtTakenPort(LocalCrew):
    """Finds a port that is free, and that another program takes before it is used."""

    holder: socket.socket | None = None

    def free_address(self) -> str:
        if self.holder is not None:
            return super().free_address()
        self.holder = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self.holder.getsockname()[1]}"


def test_processes_meet_behind_a_proxy_and_on_another_port_if_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # faults.md rows 15 and 20
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there
    script = tmp_path / "script.py"
    script.write_text(SUM)
    crew = AtTakenPort(range(2), worker_command(script, []))
    done = supervise(tmp_path, [crew])
    assert crew.holder is not None
    port = crew.holder.getsockname()[1]
    crew.holder.close()
    assert (done.outcome.how, done.outcome.step) == ("finished", 1)
    assert [done.log(1, rank).count("sum 3\n") for rank in range(2)] == [1, 1]
    out, err = capsys.readouterr()
    assert out.count("sum 3") == 1, "rank 0 is shown"
    words = (
        f"The coordinator cannot listen on 127.0.0.1:{port}: Address already in use."
    )
    assert words in err
    assert "takes another port" in err
    assert "detected proxy" not in done.log(1, 0)
    (failed,) = done.events("failed")
    assert failed["rule"] == (
        "The first process of a run listens on an address of its own."
    )
    assert failed["change"] == "End the program that listens there."


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_process_is_named_and_the_others_neither_wait_nor_leave_a_stack(
    victim: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # faults.md rows 1 and 2, G6 and G7
    script = tmp_path / "script.py"
    script.write_text(
        SUM
        + f"""
if current_orders().attempt == 0:
    if mw.process_index() == {victim}:
        os.kill(os.getpid(), 9)
    add_up()
"""
    )
    done = supervise(
        tmp_path, [LocalCrew(range(2), worker_command(script, []))], restarts=1
    )
    assert done.outcome.how == "finished"
    (failed,) = done.events("failed")
    assert failed["rank"] == victim
    began, again = (float(str(event["time"])) for event in done.events("attempt"))
    assert float(str(failed["time"])) - began < 5 + 5, "with its start"
    assert again - float(str(failed["time"])) < 5
    said = capsys.readouterr().err
    host = os.uname().nodename
    assert (
        f"Rank {victim} on {host} was killed by SIGKILL in a step after step 1" in said
    )
    assert "Traceback" not in said
    assert "*** Check failure" not in said
