"""The crews of all hosts of a run: brought together before it, sent home after it."""

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from meshwright.errors import PeerLostError, RendezvousError
from meshwright.launch.agent import LOST, join, serve, wait_for_welcome
from meshwright.launch.crew import Crew
from meshwright.launch.facts import Facts
from meshwright.launch.head_file import Head, announce_head, wait_for_head
from meshwright.launch.interfaces import (
    LOOPBACK,
    address_of_head,
    address_towards_host,
)
from meshwright.launch.job import Job, Part
from meshwright.launch.line import Line
from meshwright.launch.remote_crew import RemoteCrew
from meshwright.launch.rendezvous import GATHER_SECONDS, Arrival, Rendezvous
from meshwright.launch.schedulers import Task
from meshwright.launch.secret import secret_of_run
from meshwright.launch.ssh import SshAgent, check_hosts

VARIABLE = "MESHWRIGHT_GATHER_SECONDS"
"""The environment variable that says how long launchers may take to come together."""

RETURN_SECONDS = 60.0
"""How long a host that was lost may take to come back."""

_PREEMPTED = 75
_PAUSE_SECONDS = 0.5
_END_SECONDS = 3.0
"""How long agents that were sent home may take to end."""

Log = Callable[[str], None]


@dataclass(slots=True)
class Company:
    """The crews of a run, in the order of their ranks."""

    crews: list[Crew]
    status: int = LOST
    """How the run has ended, which is the exit status of all launchers."""


@contextmanager
def company_of_one(job: Job) -> Iterator[Company]:
    """The workers of this host alone."""
    with _ending(Company([job.crew(0, LOOPBACK)])) as company:
        yield company


@contextmanager
def company_by_ssh(
    hosts: Sequence[str],
    job: Job,
    *,
    log: Log,
    is_stopping: Callable[[], bool] = lambda: False,
    allow_public_bind: bool = False,
) -> Iterator[Company]:
    """Starts agents on hosts through ssh, and waits until all are there.

    Arguments:
        hosts: Names as ssh knows them; this host needs no ssh.
        job: What is run.
        log: Takes lines that people should see.
        is_stopping: Whether nobody should wait for lost hosts any more.
        allow_public_bind: Whether the launcher may listen on every interface.

    Raises:
        RendezvousError: Who is missing, or differs, and why.
    """
    check_hosts(hosts)
    remote = {task: host for task, host in enumerate(hosts) if not _is_here(host)}
    if not remote:
        with company_of_one(job) as company:
            yield company
        return
    address = address_towards_host(
        next(iter(remote.values())), allow_public_bind=allow_public_bind
    )
    secret = secret_of_run(job.folder, os.environ)
    with _open(address, job, secret, log) as (rendezvous, head):

        def start(task: int) -> SshAgent:
            knows = {
                "secret": secret.hex(),
                "address": rendezvous.address,
                "run": head.run,
                "folder": str(job.folder),
                "script": str(job.script),
                "arguments": job.arguments,
                "processes": job.processes,
                "host": hosts[task],
                "task": task,
                "tasks": len(hosts),
            }
            return SshAgent(hosts[task], knows, log)

        def come_back(before: Arrival) -> Arrival:
            return _restart(rendezvous, before, agents, start, is_stopping)

        def watch() -> None:
            _check_wanted(is_stopping)
            for agent in agents.values():
                agent.check()

        agents: dict[int, SshAgent] = {}
        patience = 0.0
        try:
            for task in remote:
                agents[task] = start(task)
            own = [
                job.facts(host=host, task=task, tasks=len(hosts), folder=head.run)
                for task, host in enumerate(hosts)
                if task not in remote
            ]
            arrivals = rendezvous.gather(
                remote,
                own[0] if own else None,
                seconds=gather_seconds(),
                watch=watch,
            )
            crews: dict[int, Crew] = {
                a.facts.task: RemoteCrew(a, come_back) for a in arrivals
            }
            for facts in own:
                crews[facts.task] = job.crew(facts.task, rendezvous.host)
            patience = _END_SECONDS
            with _ending(Company([crews[task] for task in sorted(crews)])) as company:
                yield company
        finally:
            for agent in agents.values():
                agent.close(patience)


@contextmanager
def company_of_tasks(
    task: Task,
    job: Job,
    *,
    log: Log,
    is_stopping: Callable[[], bool] = lambda: False,
    allow_public_bind: bool = False,
) -> Iterator[Company]:
    """As task 0 of a scheduler, waits for the launchers that are its other tasks."""
    address = address_of_head(task.head, allow_public_bind=allow_public_bind)
    if task.local_count == task.count:
        address = LOOPBACK
    secret = secret_of_run(job.folder, os.environ)
    with _open(address, job, secret, log) as (rendezvous, head):

        def come_back(before: Arrival) -> Arrival:
            return rendezvous.come_back(
                before, RETURN_SECONDS, lambda: _check_wanted(is_stopping)
            )

        own = job.facts(host=head.host, task=0, tasks=task.count, folder=head.run)
        arrivals = rendezvous.gather(
            {number: f"task {number}" for number in range(1, task.count)},
            own,
            seconds=gather_seconds(),
            watch=lambda: _check_wanted(is_stopping),
        )
        crews: list[Crew] = [job.crew(0, rendezvous.host, rendezvous.part_of(0))]
        crews += [RemoteCrew(arrival, come_back) for arrival in arrivals]
        with _ending(Company(crews)) as company:
            yield company


def follow_head(task: Task, job: Job) -> int:
    """As any other task of a scheduler, does what the launcher of task 0 says.

    Returns:
        The exit status of the run.

    Raises:
        RendezvousError: The launcher of task 0 is not there, or sends this one away.
        PeerLostError: It was there, is gone, and did not come back.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_PREEMPTED))
    facts = job.facts(host=socket.gethostname(), task=task.number, tasks=task.count)
    line, part = _go_to_head(facts, job, gather_seconds())
    crew = job.crew(task.number, line.address, part)
    try:
        while (status := serve(line, crew)) is None:
            because = line.lost
            # A head that was started anew may have another script; the devices are
            # those of the first time, of which this task may have taken only a part.
            facts = replace(facts, script=job.digest())
            try:
                line, _ = _go_to_head(facts, job, RETURN_SECONDS, again=True)
            except RendezvousError as error:
                raise PeerLostError(
                    f"The launcher of task 0 was lost ({because}), and did not come "
                    f"back within {RETURN_SECONDS:g} s.",
                    "All hosts of a run go on together.",
                    "Look at the output of task 0, then start the run again: it goes "
                    "on from its newest checkpoint.",
                ) from error
        return status
    finally:
        crew.close()


def gather_seconds() -> float:
    """How long launchers may take to come together."""
    given = os.environ.get(VARIABLE)
    try:
        seconds = GATHER_SECONDS if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise RendezvousError(
            f"{VARIABLE}={given!r}.",
            "It takes a number of seconds above 0.",
            f"Write, for example, {VARIABLE}=600 where hosts start minutes apart.",
        )
    return seconds


@contextmanager
def _open(
    address: str, job: Job, secret: bytes, log: Log
) -> Iterator[tuple[Rendezvous, Head]]:
    run = secrets.token_hex(16)
    rendezvous = Rendezvous(address, secret=secret, run=run, log=log)
    try:
        head = Head(run=run, address=rendezvous.address, host=socket.gethostname())
        with announce_head(job.folder, head):
            yield rendezvous, head
    finally:
        rendezvous.close()


@contextmanager
def _ending(company: Company) -> Iterator[Company]:
    """Ends the workers of all hosts in the end, and sends the agents home."""
    try:
        yield company
    finally:
        for crew in company.crews:
            if isinstance(crew, RemoteCrew):
                crew.dismiss(company.status)
            else:
                crew.close()


def _go_to_head(
    facts: Facts, job: Job, seconds: float, *, again: bool = False
) -> tuple[Line, Part]:
    """Finds the launcher of task 0, and joins it.

    What the run folder says may be what an earlier launch has left there, and a head
    may not have noticed yet that it has lost this task: it is tried again.
    """
    deadline = time.monotonic() + seconds
    while True:
        head = wait_for_head(job.folder, deadline)
        is_there = False
        try:
            secret = secret_of_run(job.folder, os.environ)
            seen = replace(facts, folder=head.run)
            line = join(head.address, secret=secret, run=head.run, facts=seen)
            is_there = True
            return line, wait_for_welcome(line, facts.host)
        except RendezvousError:
            if time.monotonic() > deadline or (is_there and not again):
                raise
            time.sleep(_PAUSE_SECONDS)


def _restart(
    rendezvous: Rendezvous,
    before: Arrival,
    agents: dict[int, SshAgent],
    start: Callable[[int], SshAgent],
    is_stopping: Callable[[], bool],
) -> Arrival:
    """Starts agents on a host that was lost, until one comes or it takes too long."""
    task = before.facts.task
    deadline = time.monotonic() + RETURN_SECONDS
    while True:
        agents[task].close(0)
        agents[task] = agent = start(task)

        def watch(agent: SshAgent = agent) -> None:
            _check_wanted(is_stopping)
            agent.check()

        try:
            return rendezvous.come_back(before, GATHER_SECONDS, watch)
        except RendezvousError:
            if is_stopping() or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _check_wanted(is_stopping: Callable[[], bool]) -> None:
    if is_stopping():
        raise RendezvousError(
            "The run was asked to stop before all launchers were there.",
            "Launchers that come together wait for the others.",
            "Start it again.",
        )


def _is_here(host: str) -> bool:
    return host in ("localhost", LOOPBACK, socket.gethostname())
