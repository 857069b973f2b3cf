"""`meshwright train`."""

import math
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from meshwright.cli.output import explain, json_option, print_json
from meshwright.cluster.orders import OnNan
from meshwright.launch.console import Console
from meshwright.launch.schedulers import find_task
from meshwright.launch.stop import StopRequests
from meshwright.launch.supervisor import Outcome
from meshwright.launch.training import SAVE_MINUTES, Resume, Training, follow
from meshwright.launch.training import train as run_training
from meshwright.launch.watch import STEP_SECONDS, Limits

import click

MOST_PROCESSES = 4096


def _finite(
    context: click.Context, parameter: click.Parameter, value: float | None
) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def _names(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[str, ...]:
    return () if value is None else tuple(name.strip() for name in value.split(","))


class _TrainCommand(click.Command):
    """Says where the arguments of the script stand, when they stand elsewhere."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except click.NoSuchOption as error:
            hint = "Arguments of the script stand behind it and a --."
            raise click.UsageError(
                f"{error.format_message()} {hint}", context
            ) from error


@click.command(cls=_TrainCommand)
@click.argument("script", metavar="SCRIPT.py", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--processes",
    type=click.IntRange(1, MOST_PROCESSES),
    help="Processes on each host; each gets its part of the GPUs or cores. 1 if left "
    "out.",
)
@click.option(
    "--hosts",
    metavar="A,B",
    callback=_names,
    help="Hosts to run on, through ssh; all see the run folder.",
)
@click.option(
    "--allow-public-bind",
    is_flag=True,
    help="Let MESHWRIGHT_INTERFACE be an address that stands for every interface.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="The run folder; runs/<name of the script> if left out.",
)
@click.option(
    "--save-every", type=click.IntRange(min=1), help="Save after so many steps."
)
@click.option(
    "--save-minutes",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    help=f"Save after so many minutes; {SAVE_MINUTES:g} if nothing is said.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Keep so many of the newest good checkpoints.",
)
@click.option(
    "--resume",
    type=click.Choice(["auto", "never"]),
    default="auto",
    show_default=True,
    help="Go on with the run in the folder, or start anew.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Restart so often in a row without getting further.",
)
@click.option(
    "--step-timeout",
    type=click.FloatRange(min=0, min_open=True),
    callback=_finite,
    default=STEP_SECONDS,
    show_default=True,
    help="Seconds that a step may take.",
)
@click.option(
    "--on-nan",
    type=click.Choice(["stop", "skip", "rollback"]),
    default="stop",
    show_default=True,
    help="What to do when the loss is not a finite number.",
)
@click.option("--all-ranks", is_flag=True, help="Show the output of all processes.")
@json_option
def train(
    script: Path,
    arguments: tuple[str, ...],
    processes: int | None,
    hosts: tuple[str, ...],
    allow_public_bind: bool,
    run: Path | None,
    save_every: int | None,
    save_minutes: float | None,
    keep: int,
    resume: Resume,
    restarts: int,
    step_timeout: float,
    on_nan: OnNan,
    all_ranks: bool,
    as_json: bool,
) -> int:
    """Run a training script, save it, and go on when something breaks.

    Without --processes and --hosts it sees whether Slurm, Open MPI, PMI, torchrun or an
    indexed job of Kubernetes has started it, and then runs on all of their tasks.

    The script is an ordinary one, and runs without this command as well. The same
    command again goes on after the newest good checkpoint. Exit statuses: 75 and 130
    say that it was asked to stop, 6 and 7 that a process was lost or hung; all of these
    can go on.
    """
    task = find_task(os.environ) if processes is None and not hosts else None
    training = Training(
        script=script,
        arguments=arguments,
        processes=processes or 1,
        hosts=hosts,
        task=task,
        allow_public_bind=allow_public_bind,
        run=run,
        save_every=save_every,
        save_minutes=save_minutes,
        keep=keep,
        resume=resume,
        restarts=restarts,
        limits=Limits(step=step_timeout),
        on_nan=on_nan,
        all_ranks=all_ranks,
    )
    if task is not None and task.number > 0:
        return follow(training, task)
    console = Console(all_ranks=all_ranks, is_quiet=as_json)
    with StopRequests() as stop:
        outcome, folder = run_training(training, console, stop)
    again = _command_to_go_on(folder if run is None else run, resume)
    if as_json:
        print_json({**outcome.to_json(), "run": str(folder), "go_on": again})
    else:
        _show_end(outcome, folder, again, console)
    return outcome.exit_code


def _command_to_go_on(folder: Path, resume: Resume) -> str:
    """What was typed; a run that was begun anew goes on where it is."""
    given = sys.argv[1:]
    if resume == "never":
        # The last word on an option counts.
        place = given.index("--") if "--" in given else len(given)
        given[place:place] = ["--run", str(folder), "--resume", "auto"]
    return shlex.join(["meshwright", *given])


def _show_end(outcome: Outcome, folder: Path, again: str, console: Console) -> None:
    done = "" if outcome.step is None else f" after step {outcome.step}"
    if outcome.failure is not None:
        failure = outcome.failure
        times = outcome.failures
        first = f" ({times} times in a row; this is the first)" if times > 1 else ""
        explain(f"{failure.received}{first}", failure.rule, failure.change)
    if outcome.how == "finished":
        if not (folder / "checkpoints").exists():
            console.warn(
                "the script trained no model by a strategy, so there is no checkpoint; "
                "with strategy.scope() or mw.distribute there is one for every fit"
            )
        console.say(f"finished{done}; results are in {folder}")
        return
    kept = "" if outcome.saved is None else f", saved up to step {outcome.saved}"
    how: dict[str, Any] = {
        "failed": "failed",
        "preempted": "stopped",
        "interrupted": "interrupted",
    }
    console.say(f"{how[outcome.how]}{done}{kept}; what there is lies in {folder}")
    console.say(f"to go on: {again}")
