"""What the launchers of a run have in common."""

from dataclasses import dataclass
from pathlib import Path

from meshwright.launch.facts import Facts, read_facts
from meshwright.launch.local_crew import LocalCrew, worker_command


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A script, and how it is run on each host."""

    folder: Path
    """The run folder, which all hosts see."""
    script: Path
    arguments: tuple[str, ...] = ()
    """Of the script."""
    processes: int = 1
    """How many workers each launcher starts."""
    shown: tuple[int, ...] = ()
    """Those whose output is shown on a terminal, as it is."""

    def facts(
        self, *, host: str, task: int, tasks: int, folder: str | None = None
    ) -> Facts:
        """What a launcher on this host says of itself."""
        return read_facts(
            self.script,
            self.arguments,
            host=host,
            task=task,
            tasks=tasks,
            processes=self.processes,
            folder=folder,
        )

    def crew(self, task: int, address: str) -> LocalCrew:
        """The workers of launcher `task`, on this host; a coordinator listens there."""
        command = worker_command(self.script, self.arguments)
        return LocalCrew(
            ranks_of(task, self.processes),
            command,
            address=address,
            on_terminal=self.shown,
        )


def ranks_of(task: int, processes: int) -> tuple[int, ...]:
    """The numbers of the workers of a launcher; all launchers have as many.

    >>> ranks_of(1, 4)
    (4, 5, 6, 7)
    """
    return tuple(range(task * processes, (task + 1) * processes))
