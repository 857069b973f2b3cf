"""`meshwright doctor`."""

from meshwright.cli.output import json_option, print_json
from meshwright.launch.doctor import FAIL, diagnose

import click


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check that this machine is ready, and print a block to paste into a report.

    The exit status is 1 if a check fails.
    """
    diagnosis = diagnose()
    if as_json:
        print_json(diagnosis.to_json())
    else:
        click.echo(str(diagnosis))
    return 1 if diagnosis.status == FAIL else 0
