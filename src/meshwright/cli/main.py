"""`meshwright`: the verbs, and what their errors look like."""

import io
import sys
import traceback
from collections import UserDict
from importlib import import_module
from typing import Any

from meshwright import __version__
from meshwright.cli.output import explain
from meshwright.devices.startup import raise_held_error
from meshwright.errors import MeshwrightError

import click

VERBS = (
    *("bench", "chaos", "ckpt", "demo", "devices", "doctor"),
    *("each", "plan", "report", "train", "tune"),
)


class _Verbs(UserDict[str, Any]):
    """Verbs by their names: the file of one is imported when somebody asks for it.

    All of them together need as long as JAX.
    """

    def __getitem__(self, name: str) -> Any:
        return getattr(import_module(super().__getitem__(name)), name)


@click.group(
    commands=_Verbs({name: f"meshwright.cli.{name}" for name in VERBS}),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="meshwright")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Train one Keras model on many devices."""
    raise_held_error()


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits with the status of its outcome."""
    given = sys.argv[1:] if arguments is None else arguments
    _take_what_streams_can()
    sys.exit(_run(given))


def _take_what_streams_can() -> None:
    """Puts question marks where a terminal or a pipe does not know a letter."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(arguments: list[str]) -> int:
    try:
        status = cli.main(arguments, prog_name="meshwright", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except MeshwrightError as error:
        _explain(error.received, error.rule, error.change, arguments)
        return error.exit_code
    except Exception as error:
        _explain(
            f"{type(error).__name__}: {error}",
            "this is a fault of Meshwright, not yours",
            "run it again with --debug before the verb, and report the output",
            arguments,
        )
        return 1


def _explain(received: str, rule: str, change: str, arguments: list[str]) -> None:
    if "--debug" in arguments:
        traceback.print_exc()
    explain(received, rule, change)


if __name__ == "__main__":
    main()
