"""An ensemble in a folder: a file for each member, and a manifest that names them.

The manifest is written last and read first. Files bear a part of their digest in their
name, so saving into a folder again leaves what the old manifest names as it is until
the new one has taken its place.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.cluster.records import write_json
from meshwright.errors import CheckpointError

MANIFEST = "ensemble.json"

_FORMAT = 1
_RULE = (
    "An ensemble's folder has a manifest, ensemble.json, and the .keras files that it "
    "names, unchanged."
)


def save_members(folder: Path, members: Sequence[Any]) -> None:
    """Writes members into a folder, all of them or none.

    Raises:
        CheckpointError: They cannot be written; what was there before still is.
    """
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = []
        for number, member in enumerate(members):
            path, digest = _write_member(folder, number, member)
            written.append(path)
            entries.append({"name": member.name, "file": path.name, "sha256": digest})
        write_json(folder / MANIFEST, {"format": _FORMAT, "members": entries})
    except Exception as error:
        _clear_away(folder)
        raise CheckpointError(
            f"Ensemble.save could not write {folder}: {error}.",
            "An ensemble is saved whole or not at all.",
            "Make room or choose another folder; what was saved there before is "
            "unchanged.",
        ) from error
    _clear_away(folder)


def load_members(
    folder: Path, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> list[Any]:
    """The members that were saved in a folder.

    Raises:
        CheckpointError: There are none, or they are damaged.
    """
    entries = _read_manifest(folder)
    for entry in entries:
        _check_file(folder / entry["file"], entry["sha256"])
    return [
        _load_member(folder / entry["file"], custom_objects, safe_mode)
        for entry in entries
    ]


def _write_member(folder: Path, number: int, member: Any) -> tuple[Path, str]:
    beside = folder / f".member-{number}.{os.getpid()}.keras"
    try:
        member.save(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        digest = _digest(beside)
        path = folder / f"member-{number}-{digest[:8]}.keras"
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
    return path, digest


def _clear_away(folder: Path) -> None:
    """Removes files of members that the manifest does not name."""
    named: set[str] = set()
    with contextlib.suppress(CheckpointError):
        named = {entry["file"] for entry in _read_manifest(folder)}
    for path in folder.glob("member-*-*.keras"):
        if path.name not in named:
            with contextlib.suppress(OSError):
                path.unlink()


def _read_manifest(folder: Path) -> list[dict[str, str]]:
    path = folder / MANIFEST
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        entries = [
            {key: str(entry[key]) for key in ("name", "file", "sha256")}
            for entry in said["members"]
        ]
        is_known = said["format"] == _FORMAT and len(entries) > 0
    except OSError as error:
        raise CheckpointError(
            f"Ensemble.load found no manifest at {path}: {error.strerror}.",
            _RULE,
            "Pass the folder that Ensemble.save was given.",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"is no manifest ({type(error).__name__}: {error})") from (
            error
        )
    if not is_known or any(Path(e["file"]).name != e["file"] for e in entries):
        raise _damaged(path, "is a manifest that this version cannot read")
    return entries


def _check_file(path: Path, expected: str) -> None:
    try:
        digest = _digest(path)
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror})") from error
    if digest != expected:
        raise _damaged(
            path, f"has digest {digest[:8]}, and was saved as {expected[:8]}"
        )


def _load_member(
    path: Path, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Any:
    import keras

    try:
        return keras.models.load_model(
            path, custom_objects=dict(custom_objects or {}), safe_mode=safe_mode
        )
    except Exception as error:
        raise CheckpointError(
            f"Ensemble.load could not make a model of {path}: "
            f"{str(error).splitlines()[0]}",
            "The classes and functions of a member are known where it is loaded.",
            "Pass custom_objects={...}, or safe_mode=False for Lambda layers of files "
            "that you trust.",
        ) from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"Ensemble.load found that {path} {what}.",
        _RULE,
        "Bring the file back from a copy, or save the ensemble again.",
    )
