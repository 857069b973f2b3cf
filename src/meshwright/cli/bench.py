"""`meshwright bench`."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.bench.comparison import NAMED, compare_strategies
from meshwright.bench.feeding import measure_feeding
from meshwright.bench.fleet import Fleet, fleet_of
from meshwright.bench.scaling import Scaling, measure_scaling
from meshwright.bench.table import Table
from meshwright.cli.model_file import load_function, load_model
from meshwright.cli.output import check_page, json_option, print_json, write_page
from meshwright.cluster.redaction import redact_arguments, redact_environment
from meshwright.report.bench_page import bench_page

import click


class Counts(click.ParamType[tuple[int, ...]]):
    """Numbers of devices, as `1,2,4,8`."""

    name = "counts"

    def convert(self, value: Any, *where: Any) -> tuple[int, ...]:
        """Reads them."""
        try:
            return tuple(int(each) for each in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers as 1,2,4,8", *where)


def _check_target(context: Any, option: Any, html: Path | None) -> Path | None:
    if html is not None:
        check_page(html, "The benchmark", "--html")
    return html


def _options(*names: str) -> Callable[[Any], Any]:
    known = {
        "devices": click.option(
            "--devices",
            type=Counts(),
            help="Numbers of devices, as 1,2,4,8; all powers of two if left out.",
        ),
        "machine": click.option(
            "--machine", help="'8xH200', for predictions alone; what is here if not."
        ),
        "batch": click.option(
            "--batch",
            type=click.IntRange(min=1),
            default=256,
            show_default=True,
            help="Samples of the global batch.",
        ),
        "samples": click.option(
            "--samples",
            type=click.IntRange(min=1),
            help="Samples of an epoch; a hundred batches if left out.",
        ),
        "epochs": click.option(
            "--epochs",
            type=click.IntRange(min=1),
            default=1,
            show_default=True,
            help="Epochs of the whole training.",
        ),
        "price": click.option(
            "--price", type=float, help="US dollars for a device for an hour."
        ),
        "data": click.option(
            "--data",
            help="FILE.py:make_data, a function that returns (x, y) or batches.",
        ),
        "markdown": click.option(
            "--markdown", is_flag=True, help="Print tables for a page of text."
        ),
        "html": click.option(
            "--html",
            metavar="FILE.html",
            type=click.Path(path_type=Path),
            callback=_check_target,
            help="Write a page with charts besides, which needs nothing else.",
        ),
    }

    def add(function: Any) -> Any:
        for name in reversed(names):
            function = known[name](function)
        return json_option(function)

    return add


_OURS = "MESHWRIGHT_"
"""Variables that decide what is measured."""

_MODEL = click.argument("model", metavar="FILE.py:make_model")


@click.group()
def bench() -> None:
    """Measure a model here: how it scales, which strategy, its cost, its input.

    FILE.py:make_model names a function that returns a compiled and built Keras model.
    """


@bench.command()
@_MODEL
@_options("devices", "machine", "batch", "samples", "markdown", "html")
@click.option(
    "--strategy",
    type=click.Choice(NAMED),
    help="Whose plans are measured; the fastest ones, by prediction, if left out.",
)
def scaling(
    model: str,
    devices: Sequence[int] | None,
    machine: str | None,
    batch: int,
    samples: int | None,
    markdown: bool,
    html: Path | None,
    strategy: str | None,
    as_json: bool,
) -> None:
    """Strong and weak scaling: time of an epoch, speed-up, efficiency, bottleneck."""
    fleet = fleet_of(devices, machine)
    built = _load(model, fleet)
    options: dict[str, Any] = {"samples": samples, "strategy": strategy, "tell": _tell}
    found = measure_scaling(built, batch, fleet, **options)
    _print(found.tables(), markdown, as_json)
    _write(html, f"{model}: scaling", found.tables())


@bench.command()
@_MODEL
@_options(
    "devices", "machine", "batch", "samples", "epochs", "price", "markdown", "html"
)
def cost(
    model: str,
    devices: Sequence[int] | None,
    machine: str | None,
    batch: int,
    samples: int | None,
    epochs: int,
    price: float | None,
    markdown: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """What the whole training costs on 1, 2, 4, ... devices, and the best return."""
    fleet = fleet_of(devices, machine, price=price)
    found: Scaling = measure_scaling(
        _load(model, fleet),
        batch,
        fleet,
        samples=samples,
        epochs=epochs,
        weak=False,
        tell=_tell,
    )
    _print(found.costs(), markdown, as_json)
    _write(html, f"{model}: what it costs", found.costs())


@bench.command()
@_MODEL
@_options("devices", "batch", "markdown", "html")
def strategies(
    model: str,
    devices: Sequence[int] | None,
    batch: int,
    markdown: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """All strategies side by side on the devices here: time and memory of each."""
    fleet = fleet_of(devices)
    built = load_model(model, with_values=True)
    table = compare_strategies(built, batch, fleet, tell=_tell)
    _print([table], markdown, as_json)
    _write(html, f"{model}: strategies", [table])


@bench.command("input")
@_MODEL
@_options("batch", "data", "markdown", "html")
def input_(
    model: str,
    batch: int,
    data: str | None,
    markdown: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Whether data comes as fast as the devices train on it."""
    make_data = None if data is None else load_function(data)
    built = load_model(model, with_values=True)
    found = measure_feeding(built, mw.Mirrored(), make_data, batch)
    if as_json:
        print_json(found.to_json())
    elif markdown:
        _print(found.tables(), markdown, as_json)
    else:
        click.echo(str(found))
    _write(html, f"{model}: input", found.tables())


def _tell(text: str) -> None:
    """Says on the way what takes so long."""
    click.echo(f"meshwright: {text}", err=True)


def _load(model: str, fleet: Fleet) -> Any:
    """The model, with values if something is to be measured."""
    return load_model(model, with_values=fleet.here is not None)


def _print(tables: Sequence[Table], markdown: bool, as_json: bool) -> None:
    if as_json:
        print_json({"tables": [table.to_json() for table in tables]})
        return
    texts = [table.to_markdown() if markdown else str(table) for table in tables]
    click.echo("\n\n".join(texts))


def _write(html: Path | None, title: str, tables: Sequence[Table]) -> None:
    """Writes the page, if one is wanted."""
    if html is not None:
        known = redact_environment(os.environ).items()
        set_here = [f"{name}={v}" for name, v in known if name.startswith(_OURS)]
        words = [*set_here, "meshwright", *redact_arguments(sys.argv[1:])]
        write_page(html, bench_page(title, tables, words), "The benchmark", "--html")
