"""`meshwright ckpt`: what checkpoints a run has."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.cli.output import json_option, print_json
from meshwright.devices.sizes import format_bytes
from meshwright.train.checkpoint_listing import (
    Listed,
    check_all_good,
    checkpoints_of,
    list_checkpoints,
    unfinished,
)
from meshwright.train.checkpoint_listing import prune as prune_folder

import click

run_argument: Callable[..., Any] = click.argument(
    "run", metavar="DIR", type=click.Path(path_type=Path)
)


@click.group()
def ckpt() -> None:
    """List, verify, export or prune the checkpoints of a run."""


@ckpt.command()
@run_argument
@json_option
def ls(run: Path, as_json: bool) -> None:
    """List the checkpoints of a run, the newest first.

    Only manifests are read; `verify` reads everything.
    """
    folder = checkpoints_of(run)
    listed, open_ones = list_checkpoints(folder), unfinished(folder)
    if as_json:
        found = [one.to_json() for one in listed]
        print_json({"checkpoints": found, "unfinished": open_ones})
        return
    for one in listed:
        click.echo(_line(one))
    for step in open_ones:
        click.echo(f"step {step}  is being saved, or its save was interrupted")
    click.echo(f"{_count(listed)}; are all files whole? meshwright ckpt verify {run}")


@ckpt.command()
@run_argument
@json_option
def verify(run: Path, as_json: bool) -> None:
    """Compare every file of every checkpoint with its digest.

    The exit status is 5 if one is damaged; its step and its file are named.
    """
    folder = checkpoints_of(run)
    listed = list_checkpoints(folder, verify=True)
    if as_json:
        print_json({"checkpoints": [one.to_json() for one in listed]})
    else:
        for one in listed:
            click.echo(_line(one, good="good"))
        click.echo(f"{_count(listed)} in {folder}, verified")
    check_all_good(folder, listed)


@ckpt.command()
@run_argument
@click.option("--step", type=click.IntRange(min=0), help="The newest good one if left.")
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    required=True,
    help="A .keras or .safetensors file.",
)
@click.option("--model", help="FILE.py:make_model, for a .keras file.")
@click.option("--force", is_flag=True, help="Take the place of a file that is there.")
@json_option
def export(
    run: Path,
    step: int | None,
    target: Path,
    model: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a checkpoint as a .keras or .safetensors file.

    A .keras file has the model, its weights and its optimizer, and needs --model. A
    .safetensors file has the weights and statistics, by the paths of the variables.
    """
    kind = target.suffix
    if kind not in (".keras", ".safetensors"):
        raise click.UsageError(f"--to takes .keras or .safetensors files, not {target}")
    if kind == ".keras" and model is None:
        raise click.UsageError("a .keras file needs --model FILE.py:make_model")
    # Reading arrays takes JAX and Orbax, which the other verbs can do without.
    from meshwright.train.checkpoint_export import newest_good, open_good, replace_file

    folder = checkpoints_of(run)
    chosen = newest_good(folder) if step is None else step
    reader = open_good(folder, chosen)
    replace_file(target, _writer(reader, model), force=force)
    size = target.stat().st_size
    if as_json:
        print_json({"step": chosen, "file": str(target), "num_bytes": size})
    else:
        click.echo(f"step {chosen} is in {target} ({format_bytes(size)})")


@ckpt.command()
@run_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="How many of the newest good ones stay.",
)
@click.option("--dry-run", is_flag=True, help="Delete nothing; say what would be.")
@json_option
def prune(run: Path, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete old checkpoints, after a look at which are good.

    Those that a run still needs, and the only good one, stay.
    """
    folder = checkpoints_of(run)
    deleted = prune_folder(folder, keep, dry_run=dry_run)
    left = [one.step for one in list_checkpoints(folder) if one.step not in deleted]
    if as_json:
        print_json({"deleted": deleted, "left": left, "dry_run": dry_run})
        return
    word = "would be deleted" if dry_run else "deleted"
    click.echo(f"{word}: {_steps(deleted)}; left: {_steps(left)}")


def _writer(reader: Any, model: str | None) -> Callable[[Path], None]:
    from meshwright.train.checkpoint_export import give_values, write_safetensors

    def write_model(path: Path) -> None:
        from meshwright.cli.model_file import load_model

        built = load_model(str(model), with_values=True)
        give_values(built, reader)
        built.save(path)

    def write_arrays(path: Path) -> None:
        with path.open("xb") as file:
            write_safetensors(reader, file)

    return write_arrays if model is None else write_model


def _line(one: Listed, good: str = "complete") -> str:
    if one.damage is not None:
        return f"step {one.step}  damaged: {one.damage}"
    parts = [
        f"step {one.step}",
        _age(time.time() - (one.made_at or 0.0)),
        format_bytes(one.num_bytes or 0),
        f"{one.num_processes} process{'es' * (one.num_processes != 1)}",
        *(["kept"] if one.kept else []),
        good,
    ]
    return "  ".join(parts)


def _age(seconds: float) -> str:
    """How long ago; clocks of several hosts may differ, so it may lie ahead."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _count(listed: list[Listed]) -> str:
    return f"{len(listed)} checkpoint{'s' * (len(listed) != 1)}"


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
