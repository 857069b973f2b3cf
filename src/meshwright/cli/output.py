"""What the verbs have in common when they print."""

import json
import os
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
        why = str(error.strerror)
        raise _no_page(target, what, option, why) from error


def check_page(target: Path, what: str, option: str) -> None:
    """Refuses a place where a page cannot be, before the work that it is to show."""
    if not os.access(target.parent, os.W_OK):
        missing = "No such file or directory"
        why = "Permission denied" if target.parent.is_dir() else missing
        raise _no_page(target, what, option, why)


def _no_page(target: Path, what: str, option: str, why: str) -> RunError:
    return RunError(
        f"{what} was to be written to {str(target)!r}: {why}.",
        "It is one file in a folder that exists and can be written to.",
        f"Choose another place with {option} FILE.html.",
    )


def explain(received: str, rule: str, change: str) -> None:
    """Prints an error in its three beats."""
    click.echo(f"error: {received}\nrule: {rule}\nfix: {change}", err=True)
