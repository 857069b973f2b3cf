"""An agent whose workers need no JAX: `agent.py ADDRESS TASK WORKER.py`."""

import sys

from meshwright.launch.agent import LOST, join, serve, wait_for_welcome
from meshwright.launch.job import ranks_of
from meshwright.launch.local_crew import LocalCrew

from meeting import RUN, SECRET, facts_of


def main(address: str, task: str, worker: str) -> int:
    facts = facts_of(f"host{task}", int(task), processes=2)
    line = join(address, secret=SECRET, run=RUN, facts=facts)
    wait_for_welcome(line, facts.host)
    crew = LocalCrew(
        ranks_of(facts.task, facts.processes),
        [sys.executable, "-S", "-E", worker],
        address=line.address,
    )
    status = serve(line, crew)
    crew.close()
    return LOST if status is None else status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
