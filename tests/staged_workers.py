"""Plays in which small real processes take the part of workers.

They tell their launcher what a script would, and load neither JAX nor Meshwright, so a
play with several attempts takes less than a second.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.cluster.orders import Orders
from meshwright.cluster.records import read_lines
from meshwright.launch.console import Console
from meshwright.launch.crew import Crew
from meshwright.launch.local_crew import LocalCrew
from meshwright.launch.run_folder import open_run
from meshwright.launch.stop import StopRequests
from meshwright.launch.supervisor import Outcome, Supervisor
from meshwright.launch.watch import Limits

import psutil

PROLOGUE = """
import faulthandler, json, os, signal, sys, time

orders = json.loads(os.environ["MESHWRIGHT_ORDERS"])
rank, attempt = orders["rank"], orders["attempt"]
line = int(os.environ["MESHWRIGHT_CHANNEL"])
stacks = open(f"{orders['run']}/stacks/{attempt}-{rank}.txt", "a")
faulthandler.register(signal.SIGUSR1, file=stacks)


def say(**facts):
    os.write(line, (json.dumps(facts) + "\\n").encode())


def wait_for_others():  # in a file where JAX would wait for a collective
    code = compile("import time; time.sleep(100)", "/lib/jax/_src/array.py", "exec")
    exec(code, {})


def save_and_exit(*_):
    say(section="checkpoint")
    say(saved=7)
    sys.exit(75)


say(section="start")
say(section="script")
"""
END = "\nsay(section='end')\n"


@dataclass
class Play:
    """What came of a play."""

    outcome: Outcome
    folder: Path

    def events(self, kind: str) -> list[dict[str, object]]:
        """Those of a kind that were noted."""
        lines = read_lines(self.folder / "events.jsonl")
        return [line for line in lines if line["event"] == kind]

    def log(self, attempt: int, rank: int) -> str:
        """What a worker printed."""
        return (self.folder / f"logs/{attempt}-{rank}.txt").read_text()


def play(
    tmp_path: Path,
    source: str,
    *,
    world: int = 2,
    restarts: int = 0,
    limits: Limits | None = None,
    all_ranks: bool = False,
    orders: Orders | None = None,
) -> Play:
    """Runs workers with the given source until the supervisor is done with them."""
    script = tmp_path / "worker.py"
    script.write_text(PROLOGUE + source)
    crew = LocalCrew(range(world), [sys.executable, "-I", "-S", str(script)])
    return supervise(
        tmp_path,
        [crew],
        restarts=restarts,
        limits=limits,
        all_ranks=all_ranks,
        orders=orders,
    )


def supervise(
    tmp_path: Path,
    crews: Sequence[Crew],
    *,
    restarts: int = 0,
    limits: Limits | None = None,
    all_ranks: bool = False,
    orders: Orders | None = None,
) -> Play:
    """Runs crews until the supervisor is done with them."""
    path = tmp_path / "run"
    with open_run(path) as folder, StopRequests() as stop:
        folder.begin(tmp_path / "script.py", [])
        outcome = Supervisor(
            crews,
            replace(orders or Orders(run=""), run=str(path)),
            folder=folder,
            console=Console(all_ranks=all_ranks),
            stop=stop,
            restarts=restarts,
            limits=limits or Limits(),
        ).run()
    return Play(outcome, path)


def is_alive(process: int | psutil.Process) -> bool:
    """Whether it runs; nobody may have asked yet how an orphan ended."""
    try:
        if isinstance(process, int):
            process = psutil.Process(process)
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
