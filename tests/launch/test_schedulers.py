"""Which task a process is, told from its environment alone."""

import re

from meshwright.errors import RendezvousError
from meshwright.launch.nodelists import expand_nodelist
from meshwright.launch.schedulers import Task, find_task

import pytest

SLURM_SHELL = {
    # What a batch script has: a number of a task, though it is none.
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "n[1-2]",
}
SLURM_TASK = {
    **SLURM_SHELL,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "2",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-99@1",
    "PMIX_RANK": "1",
}
OPEN_MPI_4 = {
    **{k: v for k, v in OPEN_MPI_5.items() if "PMIX" not in k},
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_MCA_ess_base_jobid": "1531576321",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run7",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-workers-0-1",
    "MESHWRIGHT_TASKS": "4",
    "MESHWRIGHT_SERVICE": "train",
}


def told(
    scheduler: str,
    number: int,
    count: int,
    local: tuple[int | None, int | None] = (None, None),
    head: str | None = None,
    job: str | None = None,
) -> Task:
    return Task(
        scheduler=scheduler,
        number=number,
        count=count,
        local_number=local[0],
        local_count=local[1],
        head=head,
        job=job,
    )


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        (SLURM_TASK, told("Slurm", 2, 4, (2, 3), "n1", "4711")),
        (OPEN_MPI_5, told("Open MPI", 1, 4, (1, 2), None, "prterun-n1-99@1")),
        (OPEN_MPI_4, told("Open MPI", 1, 4, (1, 2), "10.96.0.1", "1531576321")),
        (HYDRA, told("MPI (PMI)", 3, 4, (1, 2))),
        (TORCHRUN, told("torchrun", 5, 8, (1, 4), "n1", "run7")),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
            told("torchrun", 0, 2, head="h"),
        ),
        (
            KUBERNETES,
            told(
                "Kubernetes",
                1,
                4,
                head="train-workers-0-0.train",
                job="train-workers-0",
            ),
        ),
    ],
    ids=["slurm", "openmpi5", "openmpi4", "pmi", "torchrun", "pytorchjob", "k8s"],
)
def test_a_task_knows_its_number_from_its_scheduler(
    environment: dict[str, str], task: Task
) -> None:
    assert find_task(environment) == task


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "1"},
        SLURM_SHELL,
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
        # Set by hand in scripts, for other programs.
        {"WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        {"PMIX_RANK": "1"},
    ],
    ids=["nothing", "salloc", "sbatch", "sbatch -n", "exports", "pmix"],
)
def test_a_shell_in_an_allocation_is_no_task(environment: dict[str, str]) -> None:
    assert find_task(environment) is None


def test_the_innermost_of_two_schedulers_counts() -> None:
    # mpirun in a Slurm job starts its own daemons with srun: their numbers are others.
    daemon = {**SLURM_TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    daemon |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_LOCALID": "0"}
    found = find_task({**daemon, **OPEN_MPI_5})
    assert found is not None
    assert (found.scheduler, found.number, found.count) == ("Open MPI", 1, 4)
    found = find_task({**SLURM_TASK, "PMI_RANK": "2", "PMI_SIZE": "4"})
    assert found is not None
    assert found.job == "4711", "what the inner one does not tell, the outer one may"


@pytest.mark.parametrize(
    ("environment", "received"),
    [
        ({"RANK": "1"}, "RANK='1', and WORLD_SIZE is not set."),
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE='2', and OMPI_COMM_WORLD_RANK is not set.",
        ),
        ({"PMI_RANK": "0"}, "PMI_RANK='0', and PMI_SIZE is not set."),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, and WORLD_SIZE=2."),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'."),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'."),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "LOCAL_RANK=4, and LOCAL_WORLD_SIZE=4.",
        ),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"},
            "9 tasks on this host, and WORLD_SIZE=8.",
        ),
        (
            {**SLURM_TASK, "SLURM_NODEID": "2"},
            "SLURM_NODEID=2, and nodes in SLURM_STEP_TASKS_PER_NODE=2.",
        ),
        (
            {**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "many"},
            "SLURM_STEP_TASKS_PER_NODE='many'.",
        ),
        (
            {"JOB_COMPLETION_INDEX": "3"},
            "JOB_COMPLETION_INDEX='3', and MESHWRIGHT_TASKS is not set.",
        ),
        (
            {**SLURM_TASK, "RANK": "1", "WORLD_SIZE": "4"},
            "torchrun says task 1 of 4, Slurm says task 2 of 4.",
        ),
        ({**SLURM_TASK, "SLURM_STEP_NODELIST": "n[1-"}, "The list of nodes is 'n[1-'."),
    ],
)
def test_variables_that_contradict_each_other_are_an_error_that_names_them(
    environment: dict[str, str], received: str
) -> None:
    # faults.md row 16
    with pytest.raises(RendezvousError) as caught:
        find_task(environment)
    assert caught.value.received == received
    assert caught.value.exit_code == 6
    assert re.search(r"[Uu]nset|Set MESHWRIGHT_TASKS", caught.value.change)
    assert caught.value.rule.endswith(".")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("a[01-03,07],b", ["a01", "a02", "a03", "a07", "b"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
        ("host-1.cluster.example", ["host-1.cluster.example"]),
    ],
)
def test_lists_of_nodes_are_spelled_out(text: str, names: list[str]) -> None:
    assert expand_nodelist(text) == names


@pytest.mark.parametrize(
    "text", ["a[", "a]", "a[1-]", "a[3-1]", "a[[1]]", "a,,b", "a[1-999999999]", ""]
)
def test_lists_of_nodes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RendezvousError, match=r"Slurm writes names with ranges"):
        expand_nodelist(text)
