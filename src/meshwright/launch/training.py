"""`meshwright train`: a script on all processes of a run, again until it has ended."""

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from meshwright.cluster.orders import OnNan, Orders
from meshwright.cluster.redaction import redact_arguments
from meshwright.errors import MeshwrightError, RendezvousError, RunError
from meshwright.launch.company import (
    Company,
    Log,
    company_by_ssh,
    company_of_one,
    company_of_tasks,
    follow_head,
)
from meshwright.launch.console import Console
from meshwright.launch.crew import Crew
from meshwright.launch.job import Job
from meshwright.launch.local_crew import LocalCrew
from meshwright.launch.run_folder import RunFolder, open_run
from meshwright.launch.schedulers import Task
from meshwright.launch.stop import StopRequests
from meshwright.launch.supervisor import Outcome, Supervisor
from meshwright.launch.watch import Limits

Resume = Literal["auto", "never"]

SAVE_MINUTES = 10.0
"""A checkpoint is saved so often if nothing else is wanted."""

_FAULT_VARIABLE = "MESHWRIGHT_FAULT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is to be run, where, and how much it may go wrong.

    Attributes:
        processes: How many there are on each host.
        hosts: Where agents are to be started through ssh; this host if left out.
        task: The one of a scheduler that this launcher is.
        allow_public_bind: Whether it may listen for others on every interface.
        run: The run folder; one that is named after the script if left out.
        resume: Whether to go on with a run that lies in the folder. If not, that one is
            set aside within it, or a new folder is taken if none was given.
        restarts: So often in a row may it fail without getting further.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    processes: int = 1
    hosts: tuple[str, ...] = ()
    task: Task | None = None
    allow_public_bind: bool = False
    run: Path | None = None
    save_every: int | None = None
    save_minutes: float | None = None
    keep: int = 3
    resume: Resume = "auto"
    restarts: int = 3
    limits: Limits = field(default_factory=Limits)
    on_nan: OnNan = "stop"
    all_ranks: bool = False

    @property
    def minutes_between_saves(self) -> float | None:
        """The minutes that were named, or some if nothing was."""
        named = self.save_every is not None or self.save_minutes is not None
        return self.save_minutes if named else SAVE_MINUTES


def train(
    training: Training, console: Console, stop: StopRequests
) -> tuple[Outcome, Path]:
    """Runs a script until it has ended; returns how that went, and the run folder.

    Raises:
        RunError: There is no such script, or the run folder cannot be used.
        ConfigurationError: This host's GPUs cannot be divided between processes.
    """
    script = find_script(training.script)
    path = training.run or _default_run(script, training.resume, training.task)
    with open_run(path) as folder:
        _say_what_was_there(folder, script, training, console)
        if folder.finished is not None:
            console.say(f"{folder.path.name} has finished; there is nothing to do")
            done = Outcome(
                how="finished", exit_code=0, step=folder.finished.get("step")
            )
            return done, folder.path
        as_it_is = console.is_terminal and not training.all_ranks
        job = _job(training, script, folder.path, shown=as_it_is)
        return _run_job(job, training, folder, console, stop), folder.path


def follow(training: Training, task: Task) -> int:
    """Does what the launcher of task 0 says; returns the exit status of the run.

    Raises:
        RendezvousError: That launcher is not there, or sends this one away.
        PeerLostError: It was there, is gone, and did not come back.
    """
    script = find_script(training.script)
    path = training.run or _default_run(script, training.resume, task)
    path = path.expanduser().absolute()
    if training.resume == "auto" and (path / "finished.json").exists():
        return 0  # task 0 has nothing to do, and says so
    return follow_head(task, _job(training, script, path))


def _run_job(
    job: Job,
    training: Training,
    folder: RunFolder,
    console: Console,
    stop: StopRequests,
) -> Outcome:
    """Brings the hosts together, and runs the job on them."""

    def log(text: str) -> None:
        folder.note("notice", text=text)
        console.warn(text)

    try:
        with _company_of(training, job, log, stop) as company:
            folder.begin(job.script, job.arguments)
            outcome = _supervise(training, company.crews, folder, console, stop)
            company.status = outcome.exit_code
            return outcome
    except RendezvousError:
        if not stop.is_wanted:
            raise
        how: Literal["interrupted", "preempted"]
        how = "interrupted" if stop.exit_code == 130 else "preempted"
        return Outcome(how=how, exit_code=stop.exit_code)


def _job(training: Training, script: Path, folder: Path, shown: bool = False) -> Job:
    return Job(
        folder=folder,
        script=script,
        arguments=training.arguments,
        processes=training.processes,
        shown=(0,) if shown else (),
    )


def _company_of(
    training: Training, job: Job, log: Log, stop: StopRequests
) -> AbstractContextManager[Company]:
    """Who runs the processes: those of this host, and of others."""

    def is_stopping() -> bool:
        return stop.is_wanted

    public = training.allow_public_bind
    if training.hosts:
        return company_by_ssh(
            training.hosts,
            job,
            log=log,
            is_stopping=is_stopping,
            allow_public_bind=public,
        )
    if training.task is not None and training.task.count > 1:
        return company_of_tasks(
            training.task,
            job,
            log=log,
            is_stopping=is_stopping,
            allow_public_bind=public,
        )
    return company_of_one(job)


def find_script(script: Path) -> Path:
    """The script, absolute.

    Raises:
        RunError: It is not there, or is no file.
    """
    path = script.expanduser().absolute()
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "is not there"
    near = _near_misses(path)
    raise RunError(
        f"The script {script} {what}{f'; near it: {near}' if near else ''}.",
        "meshwright train runs a Python script.",
        "Give the path of a script, then -- and its own arguments.",
    )


def _near_misses(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    scripts = [entry.name for entry in path.parent.glob("*.py")]
    return ", ".join(get_close_matches(path.name, scripts))


def _default_run(script: Path, resume: Resume, task: Task | None) -> Path:
    """A folder that the same command finds again, or a new one; all tasks find it."""
    name = script.stem
    if resume == "never":
        job = None if task is None else task.job
        name += f"-{job or f'{datetime.now():%Y%m%d-%H%M%S}'}"
    return Path("runs", name)


def _say_what_was_there(
    folder: RunFolder, script: Path, training: Training, console: Console
) -> None:
    """Looks at the run that lies in the folder; another script's is refused."""
    if training.resume == "never":
        if folder.has_begun:
            place = folder.set_aside()
            console.say(f"the run that was in {folder.path} is in {place} now")
        return
    before = folder.config
    if before is None:
        return
    if before.get("script") != str(script):
        raise RunError(
            f"{folder.path} is a run of {before.get('script')}, not of {script}.",
            "A run folder belongs to one script; its checkpoints are of that one.",
            "Give another folder with --run DIR, or start anew with --resume never.",
        )
    arguments = redact_arguments(training.arguments)
    if before.get("arguments") == arguments:
        return
    then, now = (shlex.join(a) or "none" for a in (before["arguments"], arguments))
    if folder.finished is not None:
        raise RunError(
            f"{folder.path} has finished with the arguments {then}, not {now}.",
            "A finished run is not run again.",
            "Give another folder with --run DIR, or start anew with --resume never.",
        )
    console.warn(f"the run began with the arguments {then}; it goes on with {now}")


def _supervise(
    training: Training,
    crews: Sequence[Crew],
    folder: RunFolder,
    console: Console,
    stop: StopRequests,
) -> Outcome:
    for line in _where_it_runs(training, crews, folder):
        console.say(line)
    folder.begin_launch(sum(len(crew.ranks) for crew in crews))
    orders = Orders(
        run=str(folder.path),
        save_every=training.save_every,
        save_minutes=training.minutes_between_saves,
        keep=training.keep,
        resume=training.resume == "auto",
        on_nan=training.on_nan,
        fault=os.environ.get(_FAULT_VARIABLE, ""),
        launched_at=folder.began,
        wall_before=folder.wall_before,
    )
    supervisor = Supervisor(
        crews,
        orders,
        folder=folder,
        console=console,
        stop=stop,
        restarts=training.restarts,
        limits=training.limits,
    )
    how, exit_code = "crashed", 1
    try:
        outcome = supervisor.run()
        how, exit_code = outcome.how, outcome.exit_code
        if outcome.how == "finished":
            folder.finish({"step": outcome.step, "seconds": time.time() - folder.began})
        return outcome
    except MeshwrightError as error:  # a host is gone, and does not come back
        how, exit_code = "failed", error.exit_code
        raise
    finally:
        folder.end_launch(how, exit_code)
        folder.note("end", outcome=how, exit_code=exit_code)
        if folder.unwritten:
            console.warn(
                f"some of the run's records were not written: {folder.unwritten}"
            )


def _where_it_runs(
    training: Training, crews: Sequence[Crew], folder: RunFolder
) -> list[str]:
    world = sum(len(crew.ranks) for crew in crews)
    processes = "1 process" if world == 1 else f"{world} processes"
    hosts = ", ".join(crew.host for crew in crews)
    command = shlex.join([training.script.name, *redact_arguments(training.arguments)])
    shares = [
        f"rank {rank}: {share.says}"
        for crew in crews
        if isinstance(crew, LocalCrew)
        for rank, share in zip(crew.ranks, crew.shares, strict=True)
    ]
    lines = [
        f"{command} on {processes} of {hosts}"
        + (f" ({'; '.join(shares)})" if shares else ""),
        f"run folder {folder.path}",
    ]
    if world > 1 and not training.all_ranks:
        lines.append("shows rank 0; --all-ranks shows all; logs/ has everything")
    return lines
