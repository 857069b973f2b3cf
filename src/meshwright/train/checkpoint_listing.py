"""What checkpoints a run has, which of them are good, and which may go."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, RunError
from meshwright.train.checkpoint_folder import (
    SAVING,
    delete,
    examine,
    read_manifest,
    steps_in,
    superfluous,
)
from meshwright.train.checkpoint_manifest import (
    FORMAT,
    DamageError,
    Manifest,
    OtherFormatError,
)


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a line of a list."""

    step: int
    damage: str | None = None
    """What is wrong with it, with the file; None if nothing was found."""
    made_at: float | None = None
    """Seconds since the epoch."""
    num_bytes: int | None = None
    kept: bool = False
    """Whether retention leaves it alone."""
    num_processes: int | None = None
    """How many processes have written it."""

    def to_json(self) -> dict[str, Any]:
        """As an object, with `complete` in words that scripts can ask for."""
        return {**asdict(self), "complete": self.damage is None}


def checkpoints_of(run: Path) -> Path:
    """The folder of the checkpoints of a run.

    Raises:
        RunError: The run has none, or is no folder.
    """
    folder = run / "checkpoints"
    if folder.is_dir():
        return folder
    what = "has no folder named checkpoints" if run.is_dir() else "is no folder"
    near = run.parent if run.name == "checkpoints" else run.parent.parent
    raise RunError(
        f"{run} {what}.",
        "A run folder is one that meshwright train has made; checkpoints lie in it.",
        f"Did you mean {near}?"
        if (near / "checkpoints").is_dir()
        else "Name the folder that was given to --run.",
    )


def list_checkpoints(folder: Path, *, verify: bool = False) -> list[Listed]:
    """All checkpoints in a folder, the newest first.

    Arguments:
        folder: That of the checkpoints.
        verify: Whether to read all files and compare their digests. Otherwise only the
            manifests are read.
    """
    look = examine if verify else read_manifest
    return [_listed(folder / str(step), step, look) for step in steps_in(folder)]


def unfinished(folder: Path) -> list[int]:
    """Steps that are being saved now, or whose save was interrupted."""
    names = [path.name for path in folder.glob(f"{SAVING}*")]
    return sorted(int(name.removeprefix(SAVING)) for name in names)


def check_all_good(folder: Path, listed: list[Listed]) -> None:
    """Raises `CheckpointError` if one of them is damaged, naming step and file."""
    damaged = [found for found in listed if found.damage is not None]
    if damaged:
        told = "; ".join(f"step {found.step}: {found.damage}" for found in damaged)
        raise CheckpointError(
            f"{len(damaged)} of {len(listed)} checkpoints in {folder} "
            f"{'is' if len(damaged) == 1 else 'are'} damaged: {told}.",
            "Every file of a checkpoint has the size and the digest that its manifest "
            "says.",
            "A run goes on from the newest good one; see meshwright ckpt ls.",
        )


def prune(folder: Path, keep: int, *, dry_run: bool = False) -> list[int]:
    """Deletes all but the newest good checkpoints and those that are to be kept.

    Arguments:
        folder: That of the checkpoints.
        keep: How many good ones stay, at least one.
        dry_run: Whether to delete nothing, and only to say what.

    Returns:
        The steps that were deleted.

    Raises:
        CheckpointError: None of them is good, so none is deleted.
    """
    listed = list_checkpoints(folder, verify=True)
    damaged = {found.step for found in listed if found.damage is not None}
    if listed and len(damaged) == len(listed):
        check_all_good(folder, listed)
    steps = superfluous(folder, keep, damaged)
    for step in () if dry_run else steps:
        delete(folder, step)
    return steps


def _listed(folder: Path, step: int, look: Any) -> Listed:
    try:
        manifest: Manifest = look(folder)
    except (DamageError, OSError) as error:
        return Listed(step, str(error))
    except OtherFormatError as error:
        return Listed(step, f"has format {error.version!r}; {FORMAT} is known here")
    entries = manifest.arrays.values()
    processes = {piece.process for entry in entries for piece in entry.pieces}
    return Listed(
        step=step,
        made_at=manifest.made_at,
        num_bytes=manifest.num_bytes,
        kept=manifest.keep,
        num_processes=len(processes),
    )
