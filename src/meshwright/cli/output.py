"""What the verbs have in common when they print."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.cluster.records import write_text
from meshwright.errors import RunError

import click

json_option: Callable[..., Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)


def print_json(value: Any) -> None:
    """Prints a value as JSON; NaN is no JSON and raises."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def write_page(target: Path, text: str, what: str, option: str) -> None:
    """Writes a page, whole or not at all.

    Arguments:
        target: The file.
        text: What is in it.
        what: What the page is, for the error.
        option: That names the file, for the error.

    Raises:
        RunError: It cannot be written there.
    """
    try:
        write_text(target, text)
    except OSError as error:
        raise RunError(
            f"{what} was to be written to {str(target)!r}: {error.strerror}.",
            "It is one file in a folder that exists and can be written to.",
            f"Choose another place with {option} FILE.html.",
        ) from error


def explain(received: str, rule: str, change: str) -> None:
    """Prints an error in its three beats."""
    click.echo(f"error: {received}\nrule: {rule}\nfix: {change}", err=True)
