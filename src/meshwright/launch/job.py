"""What the launchers of a run have in common."""

import os
from dataclasses import dataclass
from pathlib import Path

from meshwright.devices.nvidia import read_nvml
from meshwright.launch.facts import Facts, digest_of, read_facts
from meshwright.launch.local_crew import LocalCrew, worker_command

Part = tuple[int, int] | None
"""Which part, of how many."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


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

    def digest(self) -> str:
        """What the script is called, and what it is now."""
        return digest_of(self.script)

    def crew(self, task: int, address: str, part: Part = None) -> LocalCrew:
        """The workers of a launcher, on this host.

        Arguments:
            task: The number of the launcher.
            address: Where a coordinator listens.
            part: Which part of the GPUs they take, if others see the same ones.
        """
        if part is not None:
            os.environ[_VISIBLE] = part_of_visible(part, os.environ.get(_VISIBLE))
        command = worker_command(self.script, self.arguments)
        return LocalCrew(
            ranks_of(task, self.processes),
            command,
            address=address,
            on_terminal=self.shown,
        )


def part_of_visible(part: tuple[int, int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for one of several that see the same GPUs.

    >>> part_of_visible((1, 2), "4,5,6,7")
    '6,7'
    """
    index, count = part
    names = visible.split(",") if visible else [str(i) for i in range(_num_gpus())]
    each = len(names) // count
    return ",".join(names[index * each : (index + 1) * each])


def _num_gpus() -> int:
    return len(read_nvml().gpus)


def ranks_of(task: int, processes: int) -> tuple[int, ...]:
    """The numbers of the workers of a launcher; all launchers have as many.

    >>> ranks_of(1, 4)
    (4, 5, 6, 7)
    """
    return tuple(range(task * processes, (task + 1) * processes))
