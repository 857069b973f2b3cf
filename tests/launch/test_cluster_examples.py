"""The files for schedulers say what a launcher understands."""

import re
import subprocess
from pathlib import Path
from typing import Any

from meshwright.cli.train import train
from meshwright.launch.schedulers import SERVICE, TASKS, find_task

import pytest

FOLDER = Path(__file__).parents[2] / "examples/cluster"
SBATCH, JOBSET = FOLDER / "slurm.sbatch", FOLDER / "jobset.yaml"


def check_options(command: str) -> None:
    """The command before the script has only options that the verb has."""
    known = {option for parameter in train.params for option in parameter.opts}
    options = re.findall(r"(?<!\S)--[a-z-]+", command.partition(".py")[0])
    assert options
    assert set(options) <= known


def run_sbatch(folder: Path, status: int, **environment: str) -> tuple[int, str]:
    """Runs the batch script with a scheduler of our own; returns what it asked for."""
    for name, body in {
        "srun": f"exit {status}",
        "scontrol": f'echo "$@" >> {folder}/log',
    }.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    (folder / "log").write_text("")
    done = subprocess.run(
        ["bash", str(SBATCH)],
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            **environment,
        },
        check=False,
    )
    return done.returncode, (folder / "log").read_text().strip()


def test_the_batch_script_runs_one_launcher_on_each_node_and_is_warned_in_time() -> (
    None
):
    text = SBATCH.read_text()
    subprocess.run(["bash", "-n", str(SBATCH)], check=True)
    directives = re.findall(r"^#SBATCH (\S+)", text, re.M)
    assert {"--ntasks-per-node=1", "--requeue", "--signal=TERM@300"} <= set(directives)
    (command,) = re.findall(r"srun --\S+ (meshwright train .*?\.py)", text, re.S)
    check_options(command)


@pytest.mark.parametrize(
    ("status", "restarts", "asked"),
    [
        (0, "0", ""),
        (1, "0", ""),
        (75, "40", "requeue 7"),
        (6, "0", "requeue 7"),
        (7, "4", "requeue 7"),
        (6, "5", ""),
    ],
)
def test_the_batch_script_goes_back_into_the_queue_if_the_run_can_go_on(
    tmp_path: Path, status: int, restarts: str, asked: str
) -> None:
    ended = run_sbatch(tmp_path, status, SLURM_RESTART_COUNT=restarts)
    assert ended == (status, asked)


def test_the_jobset_gives_its_pods_what_a_launcher_needs() -> None:
    yaml = pytest.importorskip("yaml")
    jobset: dict[str, Any] = yaml.safe_load(JOBSET.read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )
    spec = jobset["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "train"}
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "a pod failure policy needs it"
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment[TASKS] == str(job["completions"])
    task = find_task(
        {
            **environment,
            "JOB_COMPLETION_INDEX": "1",
            "HOSTNAME": f"{jobset['metadata']['name']}-{workers['name']}-0-1",
        }
    )
    assert task is not None
    assert (task.number, task.count) == (1, 2)
    assert task.head == f"train-workers-0-0.{spec['network']['subdomain']}"
    assert environment[SERVICE] == spec["network"]["subdomain"]
    check_options(container["args"][0])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_jobset_starts_again_for_nothing_when_it_was_preempted() -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(JOBSET.read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    container = job["template"]["spec"]["containers"][0]["name"]
    assert rule == {
        "action": "FailJob",
        "onExitCodes": {"containerName": container, "operator": "In", "values": [75]},
    }
    (again,) = spec["failurePolicy"]["rules"]
    assert again["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert again["onJobFailureReasons"] == ["PodFailurePolicy"]
