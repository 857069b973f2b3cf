"""`meshwright train`: a script on all processes of a run, again until it has ended."""

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from meshwright.cluster.orders import OnNan, Orders
from meshwright.errors import RunError
from meshwright.launch.console import Console
from meshwright.launch.crew import Crew
from meshwright.launch.local_crew import LocalCrew, worker_command
from meshwright.launch.redaction import redact_arguments
from meshwright.launch.run_folder import RunFolder, open_run
from meshwright.launch.stop import StopRequests
from meshwright.launch.supervisor import Outcome, Supervisor
from meshwright.launch.watch import Limits

Resume = Literal["auto", "never"]

_FAULT_VARIABLE = "MESHWRIGHT_FAULT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is to be run, where, and how much it may go wrong.

    Attributes:
        run: The run folder; one that is named after the script if left out.
        resume: Whether to go on with a run that lies in the folder. If not, that one is
            set aside within it, or a new folder is taken if none was given.
        restarts: So often in a row may it fail without getting further.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    processes: int = 1
    run: Path | None = None
    save_every: int | None = None
    save_minutes: float | None = None
    keep: int = 3
    resume: Resume = "auto"
    restarts: int = 3
    limits: Limits = field(default_factory=Limits)
    on_nan: OnNan = "stop"
    all_ranks: bool = False


def train(
    training: Training, console: Console, stop: StopRequests
) -> tuple[Outcome, Path]:
    """Runs a script until it has ended; returns how that went, and the run folder.

    Raises:
        RunError: There is no such script, or the run folder cannot be used.
        ConfigurationError: This host's GPUs cannot be divided between processes.
    """
    script = find_script(training.script)
    path = training.run or _default_run(script, training.resume)
    with open_run(path) as folder:
        _say_what_was_there(folder, script, training, console)
        if folder.finished is not None:
            console.say(f"{folder.path.name} has finished; there is nothing to do")
            done = Outcome(
                how="finished", exit_code=0, step=folder.finished.get("step")
            )
            return done, folder.path
        crews = crews_for(training, script, console)
        folder.begin(script, training.arguments)
        return _supervise(training, crews, folder, console, stop), folder.path


def crews_for(
    training: Training, script: Path, console: Console | None = None
) -> list[Crew]:
    """Who runs the processes: those of this host, and of others."""
    ranks = range(training.processes)
    as_it_is = console is not None and console.is_terminal and not training.all_ranks
    crew = LocalCrew(
        ranks,
        worker_command(script, training.arguments),
        on_terminal=[0] if as_it_is else [],
    )
    return [crew]


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


def _default_run(script: Path, resume: Resume) -> Path:
    """A folder that the same command finds again, or a new one."""
    name = script.stem
    if resume == "never":
        name += f"-{datetime.now():%Y%m%d-%H%M%S}"
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
    folder.begin_launch(training.processes)
    orders = Orders(
        run=str(folder.path),
        save_every=training.save_every,
        save_minutes=training.save_minutes,
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
        f"{command} on {processes} of {hosts} ({'; '.join(shares)})",
        f"run folder {folder.path}",
    ]
    if world > 1 and not training.all_ranks:
        lines.append("shows rank 0; --all-ranks shows all; logs/ has everything")
    return lines
