"""`meshwright plan`."""

import meshwright as mw
from meshwright.cli.model_file import load_model
from meshwright.cli.output import json_option, print_json
from meshwright.parallel.plan import PRECISIONS, Precision
from meshwright.planner.machines import Machine, parse_machine
from meshwright.planner.money import Wishes
from meshwright.planner.report import PlanReport

import click

NOTHING_FITS = 3


@click.command()
@click.argument("model", metavar="FILE.py:make_model")
@click.option("--devices", help="'8xH200', '4x8xH100', ...; those here if left out.")
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    required=True,
    help="Samples of the global batch.",
)
@click.option("--memory", help="What a step may use of each device, as '40GiB'.")
@click.option("--objective", help="fastest, cheapest or smallest.")
@click.option(
    "--precision", type=click.Choice(PRECISIONS), help="What layers compute in."
)
@click.option("--samples", type=int, help="Samples of an epoch, for time and money.")
@click.option("--epochs", type=int, help="Epochs of the whole training.")
@click.option("--finish-by", type=float, help="Hours that the training may take.")
@click.option("--at-most", type=float, help="US dollars that the training may cost.")
@click.option("--timeline", is_flag=True, help="Show the timetable of the stages.")
@json_option
def plan(
    model: str,
    devices: str | None,
    batch: int,
    memory: str | None,
    objective: str | None,
    precision: Precision | None,
    samples: int | None,
    epochs: int | None,
    finish_by: float | None,
    at_most: float | None,
    timeline: bool,
    as_json: bool,
) -> int:
    """Say which plan to use for a model, what it takes and costs, and why.

    FILE.py:make_model names a function that returns a compiled and built Keras model.
    Nothing is allocated or run. The exit status is 3 if no plan fits.
    """
    # What is wrong with these is said before a model is built.
    machine = parse_machine(devices, memory=memory)
    wishes = Wishes(
        objective=objective,
        finish_by=finish_by,
        at_most=at_most,
        samples=samples,
        epochs=epochs,
    )
    built = load_model(model)
    report = mw.plan(
        built,
        batch,
        devices,
        memory=memory,
        objective=wishes.objective,
        precision=precision,
        samples=samples,
        epochs=epochs,
        finish_by=finish_by,
        at_most=at_most,
    )
    if as_json:
        drawn = {"timeline": report.timeline()} if timeline else {}
        print_json({**report.to_json(), **drawn})
    else:
        _show(report, timeline)
        if report.best is None:
            more = _more_devices(machine)
            click.echo(
                f"\nTry more: meshwright plan {model} --devices {more} --batch {batch}"
            )
    return NOTHING_FITS if report.best is None else 0


def _show(report: PlanReport, timeline: bool) -> None:
    click.echo(report.argument())
    if timeline:
        click.echo(f"\n{report.timeline()}")
    for line in report.how_to_go_on():
        click.echo(line)


def _more_devices(machine: Machine) -> str:
    """Twice as many of the same: in one host up to eight, then in more hosts."""
    if machine.is_here and machine.accelerator is None:
        return "8xH200"
    hosts, per_host = machine.num_hosts, machine.devices_per_host
    if per_host < 8:
        per_host *= 2
    else:
        hosts *= 2
    name = machine.title
    return f"{hosts}x{per_host}x{name}" if hosts > 1 else f"{per_host}x{name}"
