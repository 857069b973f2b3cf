"""`meshwright tune`."""

import shlex
import sys
from pathlib import Path

from meshwright.cli.output import json_option, print_json
from meshwright.cluster.redaction import redact_arguments
from meshwright.launch.console import Console
from meshwright.launch.stop import StopRequests
from meshwright.report.study_page import write_study_page
from meshwright.trials.objective import find_objective
from meshwright.trials.results import Direction
from meshwright.trials.slots import deal_slots
from meshwright.trials.study import Wish, search

import click


@click.command()
@click.argument("objective", metavar="SCRIPT.py[:objective]")
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="How many trials the study is to have, with those that it has.",
)
@click.option(
    "--devices",
    default="auto",
    show_default=True,
    help="auto, a number of devices, or names as GPU:0,GPU:2.",
)
@click.option(
    "--per-device",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="So many trials share a device.",
)
@click.option("--memory", help="What each may have of a GPU's memory, as 8GiB.")
@click.option(
    "--direction",
    type=click.Choice(["minimize", "maximize"]),
    default="minimize",
    show_default=True,
    help="Whether values are to be small or large.",
)
@click.option(
    "--storage",
    help="The URL of a database, as postgresql://user@host/db; a file in the run "
    "folder if left out.",
)
@click.option("--name", help="The study's name; that of the objective if left out.")
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="The run folder; runs/<name> if left out.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Try a trial again so often that was killed or hung.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a trial may take.",
)
@click.option(
    "--heartbeat",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds between signs of life; a host that misses six is gone.",
)
@click.option("--seed", type=int, help="Makes the proposals the same every time.")
@json_option
def tune(
    objective: str,
    trials: int,
    devices: str,
    per_device: int,
    memory: str | None,
    direction: Direction,
    storage: str | None,
    name: str | None,
    run: Path | None,
    retries: int,
    timeout: float | None,
    heartbeat: float,
    seed: int | None,
    as_json: bool,
) -> int:
    """Search for the parameters that make an objective small or large.

    SCRIPT.py:objective names a function of a trial that returns a number. Every trial
    runs in a process of its own on a device of its own. The same command goes on with
    the study; with a PostgreSQL database, on any number of hosts at a time.

    Exit statuses: 130 and 75 say that it was asked to stop, 1 that no trial has a
    value, 8 that all values are NaN.
    """
    found = find_objective(objective)
    wish = Wish(
        objective=found,
        n_trials=trials,
        deal=deal_slots(
            int(devices) if devices.isdecimal() else devices, per_device, memory
        ),
        name=found.stem if name is None else name,
        direction=direction,
        storage=storage,
        run=run,
        retries=retries,
        trial_timeout=timeout,
        heartbeat=heartbeat,
        seed=seed,
    )
    console = Console(is_quiet=as_json)
    with StopRequests() as stop:
        report, how = search(wish, console, stop, write_study_page)
    again = shlex.join(["meshwright", *redact_arguments(sys.argv[1:])])
    if as_json:
        print_json({**report.to_json(), "outcome": how, "go_on": again})
    else:
        console.say(f"{how}\n{report}")
        console.say(f"results are in {report.folder}, with charts in {report.report}")
        if how != "finished":
            console.say(f"to go on: {again}")
    return 0 if how == "finished" else stop.exit_code
