"""What the verbs have in common when they print."""

import json
from collections.abc import Callable
from typing import Any

import click

json_option: Callable[..., Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)


def print_json(value: Any) -> None:
    """Prints a value as JSON; NaN is no JSON and raises."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def explain(received: str, rule: str, change: str) -> None:
    """Prints an error in its three beats."""
    click.echo(f"error: {received}\nrule: {rule}\nfix: {change}", err=True)
