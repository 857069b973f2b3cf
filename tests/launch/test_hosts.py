"""`meshwright train` on several hosts, which are addresses of this machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.cluster.records import read_lines
from meshwright.errors import RendezvousError
from meshwright.launch.company import gather_seconds
from meshwright.launch.interfaces import VARIABLE
from meshwright.launch.ssh import SshAgent, check_hosts, explain_end, ssh_command

import psutil
import pytest

from namespaces import network_of
from staged_workers import is_alive

pytestmark = pytest.mark.processes

SSH = Path(__file__).with_name("ssh.sh")
SECONDS = 10
"""What a bad rendezvous may take until its cause is told."""

GREET = """
import sys
from meshwright.cluster.orders import current_orders
from meshwright.cluster.store import say_to_all
rank = current_orders().rank
print("together", say_to_all("names", f"{rank} {sys.argv[1:]}"), flush=True)
"""

WAIT_ONCE = """
import os, signal, time
from meshwright.cluster.channel import channel
from meshwright.cluster.orders import current_orders
from meshwright.cluster.store import say_to_all
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
say_to_all("ready", "")
channel().enter("step")
print("attempt", current_orders().attempt, flush=True)
while not current_orders().attempt:
    time.sleep(0.05)
"""


class Machine:
    """Launchers in one folder, and what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh_log = folder / "ssh.log"
        self.ssh_log.touch()
        self.launchers: list[subprocess.Popen[str]] = []

    def write(self, source: str) -> None:
        (self.folder / "script.py").write_text(source)

    def train(self, *options: str, **environment: str) -> "subprocess.Popen[str]":
        """Starts `meshwright train` with a script that takes an argument."""
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-Pm", "meshwright.cli.main", "train"),
                *(*options, "script.py"),
            ],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "MESHWRIGHT_SSH": str(SSH),
                "SSH_LOG": str(self.ssh_log),
                "OLD_PACKAGES": str(self.folder / "old"),
                VARIABLE: "127.0.0.1",
                **environment,
            },
        )
        self.launchers.append(launcher)
        return launcher

    def agents(self) -> list[psutil.Process]:
        """The processes that ssh was replaced by, newest last."""
        lines = self.ssh_log.read_text().splitlines()
        numbers = [int(line.split()[0]) for line in lines if line[:1].isdigit()]
        found = []
        for number in numbers:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(number))
        return found

    def agent_at(self, address: str) -> psutil.Process:
        """The newest agent on a host."""
        return next(
            agent
            for agent in reversed(self.agents())
            if agent.environ().get(VARIABLE) == address
        )

    def close(self) -> None:
        for launcher in self.launchers:
            with contextlib.suppress(OSError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.communicate()
        for agent in self.agents():
            agent.kill()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.write(GREET)
    yield machine
    machine.close()


def end(launcher: "subprocess.Popen[str]", status: int) -> str:
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == status, said
    return said


def wait_for(launcher: "subprocess.Popen[str]", words: str) -> str:
    said = ""
    assert launcher.stdout is not None
    while words not in said:
        line = launcher.stdout.readline()
        assert line, said
        said += line
    return said


def slurm(number: int, count: int = 2, **changes: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_LOCALID": "0",
        **changes,
    }


def test_processes_on_two_hosts_train_together(machine: Machine) -> None:
    began = machine.train("--hosts", "127.0.0.2,me@127.0.0.3", "--all-ranks")
    said = end(began, 0)
    names = "['0 []', '1 []']"
    assert f"[rank 0] together {names}" in said
    assert f"[rank 1] together {names}" in said
    assert "2 processes of 127.0.0.2, me@127.0.0.3" in said
    log = machine.ssh_log.read_text()
    secret = (machine.folder / "runs/script/secret").read_text().strip()
    assert len(secret) == 64
    assert secret not in log, "secrets are on no command line"
    assert not (machine.folder / "runs/script/head.json").exists()
    assert not machine.agents(), "all have gone home"


def test_this_host_can_be_one_of_them(machine: Machine) -> None:
    said = end(machine.train("--hosts", "localhost,127.0.0.2"), 0)
    assert "together ['0 []', '1 []']" in said


@pytest.mark.parametrize(
    ("host", "received", "change"),
    [
        # faults.md rows 14, G14
        ("denied", "me@denied: Permission denied", "ssh -o BatchMode=yes denied true"),
        ("nopython", "/no/python", "Let nopython have the same Python"),
        ("firewall", "The chosen interface is '198.51.100.1'.", "Choose one of: "),
    ],
)
def test_a_host_that_cannot_be_used_is_told_with_the_cause(
    machine: Machine, host: str, received: str, change: str
) -> None:
    began = time.monotonic()
    said = end(machine.train("--hosts", f"127.0.0.2,{host}"), 6)
    assert time.monotonic() - began <= SECONDS
    error, rule, fix = said.strip().splitlines()[-3:]
    assert error.startswith("error: ")
    assert received in error
    assert rule.startswith("rule: ")
    assert fix.startswith("fix: ")
    assert change in fix
    wait_until_gone(machine)


def wait_until_gone(machine: Machine) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_alive, machine.agents())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("host", "said", "change"),
    [
        ("c", "ssh: connect to host c port 22: Connection refused", "whether c is up"),
        ("c", "ssh: connect to host c port 22: No route to host", "whether c is up"),
        ("c", "ssh: Could not resolve hostname c: Name or service", "spelling of c."),
        ("c", "Host key verification failed.", "ssh-keyscan for the host's own."),
        ("c", "sh: 1: cd: can't cd to /gone", f"the same folder ({os.getcwd()})"),
        ("c", "python: No module named meshwright", "Install Meshwright on c into"),
        ("c", "Segmentation fault", "Try `ssh -o BatchMode=yes c "),
    ],
)
def test_what_ssh_says_becomes_advice(host: str, said: str, change: str) -> None:
    # faults.md row 14
    error = explain_end(host, 255, ["Warning: added the key.", said])
    assert error.received == (
        f"No agent could be started on {host}: Warning: added the key. / {said} "
        "(status 255)."
    )
    assert change in error.change


def test_a_host_that_does_not_come_is_told_by_name_in_ten_seconds(
    machine: Machine,
) -> None:
    # faults.md rows 14, 16, G14
    began = time.monotonic()
    said = end(machine.train("--hosts", "127.0.0.2,silent"), 6)
    assert time.monotonic() - began <= SECONDS
    assert re.search(
        r"error: After 7 s silent had not come to 127.0.0.1:\d+; there: 127.0.0.2\.\n"
        r"rule: All launchers of a run come together before it starts\.\n"
        r"fix: Look at the output there",
        said,
    )


def test_a_host_with_another_package_is_told_with_both_versions(
    machine: Machine,
) -> None:
    # faults.md row 17
    package = machine.folder / "old/keras-3.14.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Name: keras\nVersion: 3.14.0\n")
    said = end(machine.train("--hosts", "127.0.0.2,old"), 6)
    assert re.search(
        r"The hosts of the run differ: keras \S+ on 127.0.0.2, 3.14.0 on old\.\n",
        said,
    )


def test_a_host_with_other_devices_is_told(machine: Machine) -> None:
    # faults.md row 19
    said = end(machine.train("--hosts", "127.0.0.2,small"), 6)
    assert "differ: devices 1 x CPU on 127.0.0.2, 3 x CPU on small." in said


@pytest.mark.parametrize(
    ("hosts", "received"),
    [
        ("a,,b", "--hosts received 'a,,b', with '' in it."),
        (
            "a,-oProxyCommand=x",
            "--hosts received 'a,-oProxyCommand=x', with '-oProxyCommand=x' in it.",
        ),
        ("a;b", "--hosts received 'a;b', with 'a;b' in it."),
        ("a,b,a", "--hosts received 'a,b,a', with 'a' twice."),
    ],
)
def test_hosts_that_are_no_names_are_refused(hosts: str, received: str) -> None:
    with pytest.raises(RendezvousError) as caught:
        check_hosts(hosts.split(","))
    assert caught.value.received == received


def test_what_concerns_a_run_goes_along_and_secrets_do_not() -> None:
    environment = {
        "MESHWRIGHT_VIRTUAL": "GPU:4",
        "XLA_FLAGS": "--a --b",
        "MESHWRIGHT_SECRET_FILE": "/s",
        "MESHWRIGHT_INTERFACE": "eth0",
        "JAX_API_KEY": "s",
        "HOME": "/root",
        "MESHWRIGHT_SSH": "ssh -p 2222",
    }
    command = ssh_command("me@a", environment)
    assert command[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "me@a"]
    assert "env MESHWRIGHT_VIRTUAL=GPU:4 'XLA_FLAGS=--a --b' /" in command[-1]


def test_without_an_ssh_client_it_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_SSH", "/no/ssh")
    with pytest.raises(RendezvousError) as caught:
        SshAgent("a", {}, print)
    assert caught.value.received == (
        "ssh cannot be started: No such file or directory (/no/ssh)."
    )
    assert "set MESHWRIGHT_SSH" in caught.value.change


def test_a_host_that_is_lost_is_named_and_started_again(machine: Machine) -> None:
    # faults.md rows 1, 22
    machine.write(WAIT_ONCE)
    launcher = machine.train("--hosts", "127.0.0.2,127.0.0.3")
    wait_for(launcher, "attempt 0")
    began = time.monotonic()
    machine.agent_at("127.0.0.3").kill()
    said = wait_for(launcher, "restart 1 of 3")
    assert time.monotonic() - began <= 5
    assert "127.0.0.3" in said
    assert "attempt 1" in end(launcher, 0)


def test_tasks_of_a_scheduler_find_each_other_and_end_alike(machine: Machine) -> None:
    head = machine.train(**slurm(0))
    other = machine.train(**slurm(1))
    assert "together ['0 []', '1 []']" in end(head, 0)
    assert end(other, 0) == ""
    again = [machine.train(**slurm(n)) for n in range(2)]
    assert "there is nothing to do" in end(again[0], 0)
    assert end(again[1], 0) == "", "a finished run is no error for the others either"


def test_a_task_that_does_not_come_is_told(machine: Machine) -> None:
    # faults.md rows 14, 16, G14
    began = time.monotonic()
    patience = {"MESHWRIGHT_GATHER_SECONDS": "2"}
    head = machine.train(**slurm(0, 3), **patience)
    other = machine.train(**slurm(1, 3), **patience)
    said = end(head, 6)
    assert time.monotonic() - began <= SECONDS
    assert "error: After 2 s task 2 had not come to 127.0.0.1:" in said
    assert "task 2 had not come" in end(other, 6), "the other hears of it"


def test_tasks_without_a_head_say_what_they_looked_for(machine: Machine) -> None:
    # faults.md row 14
    began = time.monotonic()
    said = end(machine.train(**slurm(1), MESHWRIGHT_GATHER_SECONDS="1"), 6)
    assert time.monotonic() - began <= SECONDS
    assert f"There is no {machine.folder / 'runs/script/head.json'}." in said
    assert "on a disk that all hosts share" in said


@pytest.mark.parametrize(
    ("environments", "received"),
    [
        ([slurm(0, 3), slurm(1, 3), slurm(1, 3)], r"Task 1 came twice: "),
        ([slurm(0, 2), slurm(1, 3)], r"number of launchers 2 on .*, 3 on "),
        ([{"RANK": "0"}], r"RANK='0', and WORLD_SIZE is not set"),
    ],
    ids=["double", "another world", "partial"],
)
def test_tasks_that_contradict_each_other_are_told(
    machine: Machine, environments: Sequence[dict[str, str]], received: str
) -> None:
    # faults.md row 16
    began = time.monotonic()
    head, *others = [machine.train(**environment) for environment in environments]
    assert re.search(received, end(head, 6))
    assert time.monotonic() - began <= SECONDS
    for other in others:
        end(other, 6)


def test_a_stop_that_one_task_hears_ends_all_of_them_with_75(machine: Machine) -> None:
    # faults.md row 6
    machine.write(WAIT_ONCE)
    head, other = (machine.train(**slurm(n)) for n in range(2))
    wait_for(head, "attempt 0")
    other.terminate()
    end(head, 75)
    end(other, 75)


def test_a_task_comes_back_to_a_head_that_was_started_again(machine: Machine) -> None:
    # faults.md row 2: a scheduler starts task 0 anew
    machine.write(WAIT_ONCE)
    head, other = (machine.train(**slurm(n)) for n in range(2))
    wait_for(head, "attempt 0")
    head.kill()
    machine.write(GREET)
    head = machine.train(**slurm(0))
    assert "together ['0 []', '1 []']" in end(head, 0)
    end(other, 0)


def test_asked_to_stop_while_it_waits_for_others_a_launcher_stops(
    machine: Machine,
) -> None:
    # faults.md row 8
    launcher = machine.train("--hosts", "127.0.0.2,silent")
    while len(machine.agents()) < 2:
        time.sleep(0.05)
    began = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    said = end(launcher, 130)
    assert "Traceback" not in said
    assert time.monotonic() - began <= 6
    assert list(read_lines(machine.folder / "runs/script/events.jsonl")) == []


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_how_long_to_wait_is_a_number_of_seconds(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_GATHER_SECONDS", given)
    with pytest.raises(RendezvousError) as caught:
        gather_seconds()
    assert caught.value.received == f"MESHWRIGHT_GATHER_SECONDS={given!r}."
    assert "MESHWRIGHT_GATHER_SECONDS=600" in caught.value.change


FIT = """
import hashlib, time
import keras
import meshwright as mw
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=1)
mw.distribute(model, mw.Mirrored())
pause = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: time.sleep(0.05)
)
model.fit(x, x[:, :3], batch_size=8, epochs=4, verbose=0, callbacks=[pause])
bits = b"".join(np.asarray(v).tobytes() for v in model.variables)
print("weights", hashlib.sha256(bits).hexdigest(), flush=True)
"""


@pytest.mark.soak
def test_a_model_is_trained_to_the_same_bits_though_the_network_was_parted(
    machine: Machine,
) -> None:
    # faults.md row 22
    machine.write(FIT)
    with network_of(2) as network:
        names = ",".join(host.name for host in network.hosts)
        here = {VARIABLE: network.address}
        options = ("--hosts", names, "--save-every", "4")
        launcher = machine.train(*options, "--run", "disturbed", **here)
        wait_for_save(launcher, machine.folder / "disturbed")
        network.hosts[1].cut()
        began = time.monotonic()
        lost = wait_for(launcher, "restart 1 of 3")
        assert time.monotonic() - began <= 5 + 1, "and the others are listened to"
        assert network.hosts[1].name in lost
        network.hosts[1].mend()
        said = end(launcher, 0)
        assert "goes on after step" in said
        undisturbed = end(machine.train(*options, "--run", "undisturbed", **here), 0)
    weights = re.compile(r"weights (\w+)")
    assert weights.findall(said) == weights.findall(undisturbed) != []


def wait_for_save(launcher: "subprocess.Popen[str]", run: Path) -> None:
    events = run / "events.jsonl"
    while not any(event["event"] == "saved" for event in read_lines(events)):
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


@pytest.mark.soak
def test_a_model_is_trained_to_the_same_bits_though_a_host_was_lost(
    machine: Machine,
) -> None:
    # faults.md rows 1, 22
    machine.write(FIT)
    options = ("--hosts", "127.0.0.2,127.0.0.3", "--save-every", "4")
    weights = re.compile(r"weights (\w+)")
    launcher = machine.train(*options, "--run", "disturbed")
    wait_for_save(launcher, machine.folder / "disturbed")
    machine.agent_at("127.0.0.3").kill()
    said = end(launcher, 0)
    assert "goes on after step" in said
    undisturbed = end(machine.train(*options, "--run", "undisturbed"), 0)
    assert weights.findall(said) == weights.findall(undisturbed) != []
