"""`meshwright each`."""

from dataclasses import asdict

from meshwright.cli.output import explain, json_option, print_json
from meshwright.launch.console import Console
from meshwright.launch.side_by_side import (
    ScriptEnd,
    name_scripts,
    parse_commands,
    run_each,
)
from meshwright.launch.stop import StopRequests

import click


@click.command()
@click.argument("scripts", nargs=-1, required=True)
@json_option
def each(scripts: tuple[str, ...], as_json: bool) -> int:
    """Run several scripts at once, each on its own part of this host.

    Each gets as many of the GPUs, or of the cores, as the others and sees no more than
    these. One that needs arguments is written in quotes: 'b.py --epochs 3'. If one
    fails the others go on, and the exit status is that of the first that failed.
    Ctrl-C stops all of them.
    """
    commands = parse_commands(scripts)
    names = name_scripts(commands)
    console = Console(all_ranks=True, is_quiet=as_json, names=names)
    with StopRequests() as stop:
        ends = run_each(commands, console, stop)
        stopped = stop.exit_code if stop.is_wanted else 0
    failed = [end for end in ends if end.status]
    if as_json:
        print_json({"scripts": [asdict(end) for end in ends]})
    elif stopped:
        console.say(f"stopped; {len(failed)} of {len(ends)} scripts did not end well")
    elif failed:
        _explain(failed, ends)
    else:
        console.say(f"all {len(ends)} scripts have ended well")
    return stopped or (failed[0].exit_code if failed else 0)


def _explain(failed: list[ScriptEnd], ends: list[ScriptEnd]) -> None:
    first, *others = failed
    more = "".join(f", and {end.name} {end.how}" for end in others)
    explain(
        f"{first.name} ({first.command}) on {first.share} {first.how} after "
        f"{first.seconds:.1f} s{more}",
        f"scripts side by side have nothing to do with each other, so the others went "
        f"on to their end ({len(ends) - len(failed)} of {len(ends)} ended well)",
        f"look at the lines above that begin with [{first.name}]; to run it alone: "
        f"python {first.command}",
    )
