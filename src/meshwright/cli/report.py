"""`meshwright report`: what became of a run, as one file."""

from pathlib import Path

from meshwright.cli.output import json_option, print_json, write_page
from meshwright.report.run_page import run_page
from meshwright.report.run_record import RunRecord

import click


@click.command()
@click.argument("run", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--out",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Where to write it; report.html in the run folder if left out.",
)
@json_option
def report(run: Path, out: Path | None, as_json: bool) -> None:
    """Write what became of a run as one HTML file, which needs nothing else.

    Loss and metrics, throughput, where the time went, what lay on which device, the
    plan and why others lost, what happened, and the command to do it again.
    """
    record = RunRecord.read(run)
    target = out or run / "report.html"
    write_page(target, run_page(record), f"The report of {str(run)!r}", "--out")
    if as_json:
        print_json({"run": str(run), "state": record.state, "report": str(target)})
        return
    click.echo(f"{record.name}: {record.state}\nthe report lies in {target}")
