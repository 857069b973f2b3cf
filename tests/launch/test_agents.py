"""The workers of other hosts, through agents: real processes on addresses of ours."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.cluster.orders import Orders
from meshwright.errors import PeerLostError, RendezvousError
from meshwright.launch.agent import wait_for_welcome
from meshwright.launch.crew import Ended, Event, Lost, Printed, Said
from meshwright.launch.interfaces import VARIABLE
from meshwright.launch.remote_crew import RemoteCrew

import psutil
import pytest

from meeting import Open, facts_of, open_door
from namespaces import Network, network_of
from staged_workers import is_alive

pytestmark = pytest.mark.processes

AGENT = Path(__file__).with_name("agent.py")
TESTS = AGENT.parents[1]
SECONDS = 5
"""What the loss of a host may take until it is reported."""

WORKER = """
import json, os, signal, subprocess, sys, time

def stop(*_):
    os.write(line, b'{"saved": 3}\\n')
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
line = int(os.environ["MESHWRIGHT_CHANNEL"])
orders = json.loads(os.environ["MESHWRIGHT_ORDERS"])
child = subprocess.Popen(["sleep", "100"])
numbers = f"{os.getpid()} {child.pid}"
print(f"rank {orders['rank']} of {orders['world']}, {numbers}", flush=True)
os.write(line, b'{"section": "script"}\\n')
time.sleep(100)
"""


class Agents:
    """Agents of a run, and the crews that they are for its launcher."""

    def __init__(self, folder: Path, door: Open) -> None:
        for name in ("logs", "stacks"):
            (folder / name).mkdir()
        self.folder, self.door = folder, door
        self.worker = folder / "worker.py"
        self.worker.write_text(WORKER)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        task: int,
        address: str = "",
        *,
        enter: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Starts the agent of a task; it may go to another address than the head's."""
        go_to = address or self.door.rendezvous.address
        self.processes.append(
            subprocess.Popen(
                [*enter, sys.executable, AGENT, go_to, str(task), self.worker],
                env={**os.environ, "PYTHONPATH": python_path(), **environment},
            )
        )

    def gather(self, tasks: int = 1) -> list[RemoteCrew]:
        own = facts_of("head", 0, processes=2)
        expected = {task: f"host{task}" for task in range(1, tasks + 1)}
        arrivals = self.door.rendezvous.gather(expected, own, seconds=30)
        return [
            RemoteCrew(a, lambda a: self.door.rendezvous.come_back(a, 10))
            for a in arrivals
        ]

    def orders(self, crew: RemoteCrew, attempt: int = 0) -> list[Orders]:
        return [
            Orders(run=str(self.folder), rank=rank, world=4, attempt=attempt)
            for rank in crew.ranks
        ]

    def close(self) -> None:
        for process in self.processes:
            with suppress(OSError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def python_path() -> str:
    return os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with open_door() as door:
        agents = Agents(tmp_path, door)
        yield agents
        agents.close()


def events_until(
    crew: RemoteCrew, is_enough: Callable[[list[Event]], bool], seconds: float = 10
) -> list[Event]:
    """Waits for events as a launcher does."""
    deadline = time.monotonic() + seconds
    events: list[Event] = []
    while not is_enough(events):
        assert time.monotonic() < deadline, events
        select.select(crew.filenos(), [], [], 0.2)
        events += crew.take_events()
    return events


def has_started(events: list[Event]) -> bool:
    """Whether both workers have printed and told something."""
    kinds = [type(event) for event in events]
    return kinds.count(Printed) >= 2 and kinds.count(Said) >= 2


def is_lost(events: list[Event]) -> bool:
    return any(isinstance(event, Lost) for event in events)


def processes_of(events: list[Event]) -> list[psutil.Process]:
    """Workers and what they have started, from what they printed."""
    lines = [event.line for event in events if isinstance(event, Printed)]
    numbers = [int(number) for line in lines for number in line.split()[-2:]]
    found = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(number))
    return found


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def wait_until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_launcher_does_with_workers_of_another_host_what_it_does_with_its_own(
    agents: Agents,
) -> None:
    agents.start(1, **{VARIABLE: "127.0.0.2"})
    (crew,) = agents.gather()
    assert (crew.host, crew.ranks) == ("host1", (2, 3))
    host, _, port = crew.free_address().rpartition(":")
    assert host == "127.0.0.2", "the interface by which the agent came"
    with socket.create_server((host, int(port))):
        pass
    crew.start(agents.orders(crew))
    events = events_until(crew, has_started)
    assert {e.line.split(",")[0] for e in events if isinstance(e, Printed)} == {
        "rank 2 of 4",
        "rank 3 of 4",
    }
    assert Said(2, {"section": "script"}) in events
    assert crew.state_of(2) in ("running", "sleeping")
    assert "system call" in crew.stacks_of(2)
    crew.signal(signal.SIGSTOP, [3])
    wait_until(lambda: crew.state_of(3) == "stopped")
    crew.signal(signal.SIGCONT)
    crew.signal(signal.SIGTERM, [2])
    events += events_until(crew, lambda found: any(isinstance(e, Ended) for e in found))
    (ended,) = (e for e in events if isinstance(e, Ended))
    assert (ended.rank, ended.status) == (2, 75)
    assert Said(2, {"saved": 3}) in events
    processes = processes_of(events)
    crew.kill()
    assert all_gone(processes)
    crew.start(agents.orders(crew, attempt=1))
    again = events_until(crew, has_started)
    crew.dismiss(7)
    assert agents.processes[0].wait(SECONDS) == 7, "the status of the run"
    assert all_gone(processes_of(again))


def test_events_that_come_before_an_answer_are_noticed_after_it() -> None:
    with open_door() as door:
        agent = door.arrive(facts_of("b", 1))
        (arrival,) = door.rendezvous.gather({1: "b"}, facts_of("a", 0))
        crew = RemoteCrew(arrival)

        def answer() -> None:
            wait_for_welcome(agent, "b")
            while (asked := agent.take_first()) is None:
                agent.wait(1)
            said = ("Said", {"rank": 1, "facts": {"saved": 7}})
            agent.send({"events": [said]})
            agent.send({"to": asked["number"], "answer": "sleeping"})

        helper = threading.Thread(target=answer)
        helper.start()
        assert crew.state_of(1) == "sleeping"
        helper.join()
        assert select.select(crew.filenos(), [], [], 0)[0], "there is something to take"
        assert crew.take_events() == [Said(1, {"saved": 7})]


def test_what_an_agent_cannot_do_is_told_with_its_name(agents: Agents) -> None:
    agents.start(1)
    (crew,) = agents.gather()
    (agents.folder / "logs").rmdir()
    with pytest.raises(RendezvousError) as caught:
        crew.start(agents.orders(crew))
    assert caught.value.received.startswith("On host1: start failed: [Errno 2]")
    assert caught.value.rule == "An agent starts and ends workers on its host."


def test_a_stop_that_one_host_is_told_is_one_for_its_workers(agents: Agents) -> None:
    # faults.md row 6: a scheduler may tell one host only.
    agents.start(1)
    (crew,) = agents.gather()
    crew.start(agents.orders(crew))
    events_until(crew, has_started)
    agents.processes[0].terminate()
    events = events_until(
        crew, lambda found: sum(isinstance(e, Ended) for e in found) == 2
    )
    assert [e.status for e in events if isinstance(e, Ended)] == [75, 75]
    assert crew.free_address(), "the agent stays, and hears how the run ends"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_is_gone_is_told_by_name_and_can_come_back(
    agents: Agents, number: int
) -> None:
    # faults.md rows 1, 3, 22
    agents.start(1)
    (crew,) = agents.gather()
    crew.start(agents.orders(crew))
    processes = processes_of(events_until(crew, has_started))
    began = time.monotonic()
    agents.processes[0].send_signal(number)
    events = events_until(crew, is_lost)
    assert time.monotonic() - began <= SECONDS
    stopped = number == signal.SIGSTOP
    because = "it said nothing for 4 s" if stopped else "it closed the connection"
    assert events[-1] == Lost("host1", because)
    assert crew.filenos() == (), "it is told once"
    assert list(crew.take_events()) == []
    assert (crew.state_of(2), crew.stacks_of(2)) == ("gone", "")
    crew.signal(signal.SIGTERM)
    crew.kill()
    agents.processes[0].send_signal(signal.SIGCONT)
    wait_until(lambda: all_gone(processes))
    if stopped:
        assert agents.processes[0].wait(SECONDS) == 6
    agents.start(1)
    crew.start(agents.orders(crew, attempt=1))
    assert events_until(crew, has_started)


def test_a_host_that_does_not_come_back_is_given_up(agents: Agents) -> None:
    agents.start(1)
    (crew,) = agents.gather()
    crew._come_back = None
    agents.processes[0].kill()
    events_until(crew, is_lost)
    with pytest.raises(PeerLostError) as caught:
        crew.start(agents.orders(crew))
    assert caught.value.received == "Host host1 is lost: it closed the connection."
    assert caught.value.exit_code == 6


class Proxy:
    """Passes on what comes, in each direction for as long as it is not cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.cut = {"to head": False, "to agent": False}
        self._ends: list[socket.socket] = [self._server]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _run(self) -> None:
        agent, _ = self._server.accept()
        head = socket.create_connection(("127.0.0.1", self._port))
        self._ends += [agent, head]
        for source, sink, way in (agent, head, "to head"), (head, agent, "to agent"):
            threading.Thread(
                target=self._pass_on, args=(source, sink, way), daemon=True
            ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while words := source.recv(1 << 16):
                if not self.cut[way]:
                    sink.sendall(words)
            if not self.cut[way]:  # a host that is cut off hears of no end either
                sink.shutdown(socket.SHUT_WR)


def test_a_partition_or_a_loss_of_one_direction_ends_the_workers_on_both_sides(
    agents: Agents,
) -> None:
    # faults.md row 22
    cuts = {1: ("to head", "to agent"), 2: ("to head",), 3: ("to agent",)}
    proxies = {task: Proxy(agents.door.rendezvous.port) for task in cuts}
    for task, proxy in proxies.items():
        agents.start(task, proxy.address)
    crews = agents.gather(len(cuts))
    processes = []
    for crew in crews:
        crew.start(agents.orders(crew))
        processes += processes_of(events_until(crew, has_started))
    for task, ways in cuts.items():
        for way in ways:
            proxies[task].cut[way] = True
    began = time.monotonic()
    for crew in crews:
        (lost,) = (e for e in events_until(crew, is_lost, 20) if isinstance(e, Lost))
        assert lost.host == crew.host
    # Where only the agent hears nothing, it is the first to notice, and hangs up.
    assert time.monotonic() - began <= SECONDS
    assert [agent.wait(2 * SECONDS) for agent in agents.processes] == [6, 6, 6]
    assert all_gone(processes)
    for proxy in proxies.values():
        proxy.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with network_of(1) as network:
        yield network


def test_a_link_that_goes_down_in_mid_run_ends_the_workers_on_both_sides(
    network: Network, tmp_path: Path
) -> None:
    # faults.md row 22
    (host,) = network.hosts
    with open_door(network.address) as door:
        agents = Agents(tmp_path, door)
        agents.start(1, enter=["ip", "netns", "exec", host.name])
        (crew,) = agents.gather()
        assert crew.free_address().startswith(f"{host.address}:")
        crew.start(agents.orders(crew))
        processes = processes_of(events_until(crew, has_started))
        host.cut()
        began = time.monotonic()
        events = events_until(crew, is_lost)
        assert time.monotonic() - began <= SECONDS
        assert events[-1] == Lost("host1", "it said nothing for 4 s")
        assert agents.processes[0].wait(SECONDS) == 6
        assert all_gone(processes)
        agents.close()
