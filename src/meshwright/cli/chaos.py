"""`meshwright chaos`."""

import secrets
from datetime import datetime
from pathlib import Path

from meshwright.cli.output import json_option, print_json
from meshwright.launch.chaos import save_report, unleash
from meshwright.launch.training import find_script

import click

DIFFERENT = 1


@click.command()
@click.argument("script", metavar="SCRIPT.py", type=click.Path(path_type=Path))
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--faults",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How many faults strike.",
)
@click.option("--seed", type=click.IntRange(min=0), help="What chance depends on.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of the run.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Save after so many steps.",
)
@click.option(
    "--step-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Seconds that a step may take.",
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    help="Where both runs are kept; runs/<script>-chaos-<time> if left out.",
)
@json_option
def chaos(
    script: Path,
    arguments: tuple[str, ...],
    faults: int,
    seed: int | None,
    processes: int,
    save_every: int,
    step_timeout: float,
    run: Path | None,
    as_json: bool,
) -> int:
    """Disturb a training on purpose, and compare it with an undisturbed one.

    Processes are killed, hang, become slow, get NaN, a full disk, a damaged checkpoint,
    or the wish to stop; the launcher is killed, too. What was trained in the end must
    be the same, bit for bit. The exit status is 1 if it is not.
    """
    script = find_script(script)
    folder = run or Path("runs", f"{script.stem}-chaos-{datetime.now():%Y%m%d-%H%M%S}")
    seed = secrets.randbelow(10**6) if seed is None else seed

    def command(run: Path) -> list[str]:
        options = {
            "--run": run,
            "--processes": processes,
            "--save-every": save_every,
            "--step-timeout": step_timeout,
            "--restarts": faults + 1,
            "--on-nan": "rollback",
        }
        flags = [str(word) for pair in options.items() for word in pair]
        return [*flags, str(script), "--", *arguments]

    found = unleash(
        command,
        folder,
        faults=faults,
        seed=seed,
        processes=processes,
        save_every=save_every,
        say=lambda text: click.echo(f"meshwright: {text}", err=True),
    )
    save_report(folder, found)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo(found)
        click.echo(f"\nThe log is in {folder}/chaos.md; seed {seed} gives it again.")
    return 0 if found.is_identical else DIFFERENT
