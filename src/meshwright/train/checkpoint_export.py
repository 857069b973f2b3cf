"""Checkpoints as files that others read: `.keras` and safetensors."""

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from meshwright.errors import CheckpointError
from meshwright.train.checkpoint_arrays import ArrayReader
from meshwright.train.checkpoint_folder import examine
from meshwright.train.checkpoint_listing import check_all_good, list_checkpoints
from meshwright.train.checkpoint_manifest import DamageError, Entry, OtherFormatError
from meshwright.train.checkpoint_match import check_match
from meshwright.train.model_state import named_variables

import jax

_SAFE_DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{"bfloat16": "BF16", "bool": "BOOL"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"},
}
_NOT_OF_THE_MODEL = ("optimizer state/", "metrics/")


def newest_good(folder: Path) -> int:
    """The newest step whose digests hold.

    Raises:
        CheckpointError: There is none.
    """
    listed = list_checkpoints(folder, verify=True)
    good = [found.step for found in listed if found.damage is None]
    if not good:
        check_all_good(folder, listed)
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            "What is exported is a checkpoint that is complete.",
            "Train with --save-every, or name another run folder.",
        )
    return good[0]


def open_good(folder: Path, step: int) -> ArrayReader:
    """A checkpoint to read from, after it was examined.

    Raises:
        CheckpointError: It is not there, or damaged.
    """
    path = folder / str(step)
    try:
        return ArrayReader(path, examine(path))
    except (DamageError, OtherFormatError, OSError) as error:
        here = ", ".join(str(found.step) for found in list_checkpoints(folder))
        raise CheckpointError(
            f"Checkpoint {step} in {folder} cannot be used: {error}.",
            "What is exported is a checkpoint whose digests hold.",
            f"Use one of these: {here or 'none'}; meshwright ckpt verify tells which "
            "are good.",
        ) from error


def write_safetensors(reader: ArrayReader, file: BinaryIO) -> None:
    """Writes the arrays of a model, without those of its optimizer and metrics.

    The format is a header in JSON and the bytes of the arrays, so no package is needed.
    """
    entries = _of_the_model(reader.manifest.arrays)
    header: dict[str, Any] = {"__metadata__": {"step": str(reader.manifest.step)}}
    begin = 0
    for name, entry in entries.items():
        if entry.dtype not in _SAFE_DTYPES:
            raise CheckpointError(
                f"{name} is {entry}.",
                f"A safetensors file holds {', '.join(_SAFE_DTYPES)}.",
                "Export to a .keras file.",
            )
        end = begin + entry.num_bytes
        header[name] = {
            "dtype": _SAFE_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for entry in entries.values():
        file.write(reader.read(entry).tobytes())


def give_values(model: Any, reader: ArrayReader) -> None:
    """Gives a Keras model, and its optimizer, the values of a checkpoint.

    Raises:
        CheckpointError: The checkpoint is that of another model.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = _without_metrics(named_variables(model))
    arrays = _without_metrics(reader.manifest.arrays)
    wanted = {
        name: jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for name, variable in variables.items()
    }
    check_match(arrays, wanted, f"Checkpoint {reader.manifest.step}")
    for name, variable in variables.items():
        variable.assign(reader.read(arrays[name]))


def replace_file(path: Path, write: Callable[[Path], None], *, force: bool) -> None:
    """Writes a file beside its place, and puts it there when it is complete.

    Arguments:
        path: The place.
        write: Called with the path to write to.
        force: Whether to take the place of a file that is there.

    Raises:
        CheckpointError: There is a file, or the place cannot be written.
    """
    if path.exists() and not force:
        raise CheckpointError(
            f"{path} exists.",
            "An export takes the place of another file only if it is told to.",
            "Name another file, or add --force.",
        )
    try:
        with TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
            beside = Path(folder) / path.name
            write(beside)
            with beside.open("rb+") as file:
                os.fsync(file.fileno())
            beside.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} was not written: {error.strerror or error}.",
            "An export is complete, or it is not there.",
            "Name a folder that is there, can be written, and has room.",
        ) from error


def _without_metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is not counted anew in every epoch, and is there before the first step."""
    return {name: v for name, v in found.items() if not name.startswith("metrics/")}


def _of_the_model(arrays: Mapping[str, Entry]) -> dict[str, Entry]:
    """The arrays of a model by the paths of its variables, where these are unique."""
    own = {k: e for k, e in arrays.items() if not k.startswith(_NOT_OF_THE_MODEL)}
    paths = {name: name.partition("/")[2] or name for name in own}
    if len(set(paths.values())) < len(paths):
        return own
    return {paths[name]: entry for name, entry in own.items()}
