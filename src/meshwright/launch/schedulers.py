"""Which task of a scheduler this process is, read from its environment.

Every reader is a pure function of a mapping. A launcher that was started by another
one (Open MPI inside of a Slurm job) is a task of the innermost, so these come first.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from meshwright.errors import RendezvousError
from meshwright.launch.nodelists import expand_nodelist

Environment = Mapping[str, str]

TASKS = "MESHWRIGHT_TASKS"
"""How many pods an indexed job of Kubernetes has, which Kubernetes tells nobody."""
SERVICE = "MESHWRIGHT_SERVICE"
"""The headless service of the pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One of the processes that a scheduler has started together."""

    scheduler: str
    """Who started it, in words."""
    number: int
    """The number of this task, from 0."""
    count: int
    """How many there are."""
    local_number: int | None = None
    """Its number among those on its host, if known."""
    local_count: int | None = None
    """How many of them are on its host, if known."""
    head: str | None = None
    """The host of task 0, if known."""
    job: str | None = None
    """What the scheduler calls the job, the same for all tasks."""


def find_task(environment: Environment) -> Task | None:
    """The task that this process is; None if no scheduler has started it.

    >>> find_task({"RANK": "1", "WORLD_SIZE": "2"}).number
    1
    >>> find_task({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"})  # a shell, not a task
    """
    found = [task for read in _READERS if (task := read(environment)) is not None]
    for other in found[1:]:
        _check_same(found[0], other)
    if not found:
        return None
    return replace(found[0], job=next((t.job for t in found if t.job), None))


def _torchrun(environment: Environment) -> Task | None:
    if "RANK" not in environment:
        # Scripts set the other variables for their own purposes.
        return None
    return _task(
        environment,
        "torchrun",
        number="RANK",
        count="WORLD_SIZE",
        local_number="LOCAL_RANK",
        local_count="LOCAL_WORLD_SIZE",
        head=environment.get("MASTER_ADDR"),
        job=environment.get("TORCHELASTIC_RUN_ID"),
    )


def _open_mpi(environment: Environment) -> Task | None:
    number, count = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    if number not in environment and count not in environment:
        return None
    daemon = environment.get("OMPI_MCA_orte_hnp_uri", "")  # Open MPI 4 and older
    addresses = re.search(r"tcp://([^,:;/]+)", daemon)
    return _task(
        environment,
        "Open MPI",
        number=number,
        count=count,
        local_number="OMPI_COMM_WORLD_LOCAL_RANK",
        local_count="OMPI_COMM_WORLD_LOCAL_SIZE",
        head=addresses[1] if addresses else None,
        job=environment.get("PMIX_NAMESPACE")
        or environment.get("OMPI_MCA_ess_base_jobid"),
    )


def _pmi(environment: Environment) -> Task | None:
    if "PMI_RANK" not in environment and "PMI_SIZE" not in environment:
        return None
    return _task(
        environment,
        "MPI (PMI)",
        number="PMI_RANK",
        count="PMI_SIZE",
        local_number="MPI_LOCALRANKID",
        local_count="MPI_LOCALNRANKS",
        job=environment.get("PMI_JOBID"),
    )


def _slurm(environment: Environment) -> Task | None:
    # A batch script and a shell in an allocation have SLURM_JOB_ID, and often
    # SLURM_PROCID and SLURM_NTASKS too; only srun makes steps.
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    steps = "SLURM_STEP_NUM_TASKS"
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    names = expand_nodelist(nodes) if nodes else []
    return _task(
        environment,
        "Slurm",
        number="SLURM_PROCID",
        count=steps if steps in environment else "SLURM_NTASKS",
        local_number="SLURM_LOCALID",
        local_tasks=_tasks_of_node(environment),
        head=names[0] if names else None,
        job=environment.get("SLURM_JOB_ID"),
    )


def _kubernetes(environment: Environment) -> Task | None:
    number = "JOB_COMPLETION_INDEX"
    if number not in environment:
        return None
    if TASKS not in environment:
        raise RendezvousError(
            f"{number}={environment[number]!r}, and {TASKS} is not set.",
            "A pod of an indexed job is one task of a run, but Kubernetes does not "
            "tell it how many there are.",
            f"Set {TASKS} in the pod's env to the job's completions (see "
            "examples/cluster/jobset.yaml), or pass --processes if each pod is a run "
            "of its own.",
        )
    name = re.sub(r"-\d+$", "-0", environment.get("HOSTNAME", ""))
    service = environment.get(SERVICE)
    return _task(
        environment,
        "Kubernetes",
        number=number,
        count=TASKS,
        head=f"{name}.{service}" if name and service else name or None,
        job=re.sub(r"-0$", "", name) or None,
    )


_READERS: tuple[Callable[[Environment], Task | None], ...] = (
    _torchrun,
    _open_mpi,
    _pmi,
    _slurm,
    _kubernetes,
)


def _task(
    environment: Environment,
    scheduler: str,
    *,
    number: str,
    count: str,
    local_number: str | None = None,
    local_count: str | None = None,
    local_tasks: int | None = None,
    head: str | None = None,
    job: str | None = None,
) -> Task:
    """A task, from the names of the variables with its numbers."""

    def read(variable: str | None) -> int | None:
        given = environment.get(variable or "")
        return None if given is None else _count(variable or "", given, scheduler)

    for needed, other in ((number, count), (count, number)):
        if needed not in environment:
            raise RendezvousError(
                f"{other}={environment.get(other)!r}, and {needed} is not set.",
                f"{scheduler} tells each task its number and how many there are.",
                f"Start all tasks with the same {scheduler} command, or unset {other} "
                "(or pass --processes) to train on this host alone.",
            )
    task = Task(
        scheduler=scheduler,
        number=_count(number, environment[number], scheduler),
        count=_count(count, environment[count], scheduler),
        local_number=read(local_number),
        local_count=local_tasks if local_tasks is not None else read(local_count),
        head=head,
        job=job,
    )
    _check_below(number, task.number, count, task.count, scheduler)
    if task.local_number is not None and task.local_count is not None:
        _check_below(
            local_number or "",
            task.local_number,
            local_count or "tasks of this node",
            task.local_count,
            scheduler,
        )
    if task.local_count is not None and task.local_count > task.count:
        raise _contradiction(
            f"{task.local_count} tasks on this host, and {count}={task.count}",
            scheduler,
        )
    return task


def _count(variable: str, text: str, scheduler: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text.strip()):
        raise RendezvousError(
            f"{variable}={text!r}.",
            f"{scheduler} gives whole numbers from 0.",
            f"Look at what sets {variable} besides {scheduler}, and unset it there.",
        )
    return int(text)


def _check_below(
    name: str, value: int, limit_name: str, limit: int, scheduler: str
) -> None:
    if value >= limit:
        raise _contradiction(f"{name}={value}, and {limit_name}={limit}", scheduler)


def _contradiction(values: str, scheduler: str) -> RendezvousError:
    return RendezvousError(
        f"{values}.",
        f"Of so many tasks {scheduler} numbers the first 0 and the last one less.",
        f"Look at what sets these variables besides {scheduler}, and unset it there.",
    )


def _check_same(task: Task, other: Task) -> None:
    """Two schedulers that started the same tasks number them in the same way."""
    if task.count == other.count and task.number != other.number:
        raise RendezvousError(
            f"{task.scheduler} says task {task.number} of {task.count}, "
            f"{other.scheduler} says task {other.number} of {other.count}.",
            "A process is one task.",
            f"Unset the variables of one of the two (of {other.scheduler}, if "
            f"{task.scheduler} started this process).",
        )


def _tasks_of_node(environment: Environment) -> int | None:
    """How many tasks of the step are on this node: `2(x3),1` says it for each."""
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE")
    node = environment.get("SLURM_NODEID")
    if listed is None or node is None:
        return None
    variable = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", part.strip())
        if match is None:
            raise RendezvousError(
                f"{variable}={listed!r}.",
                "Slurm writes counts such as '2(x3),1'.",
                f"Look at what sets {variable} besides Slurm, and unset it there.",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    index = _count("SLURM_NODEID", node, "Slurm")
    _check_below("SLURM_NODEID", index, f"nodes in {variable}", len(counts), "Slurm")
    return counts[index]
