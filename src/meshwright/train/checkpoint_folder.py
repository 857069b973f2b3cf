"""The folders of checkpoints: which there are, whether they are whole, how they go.

A folder has its final name when everything in it is on the disk, and loses it before
anything in it is deleted. So whatever has a final name was whole once.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path

from meshwright.train.checkpoint_manifest import (
    FACTS,
    MANIFEST,
    DamageError,
    Manifest,
    OtherFormatError,
    Seal,
)

SAVING, REPLACED, DELETED = ".saving-", ".replaced-", ".deleted-"
"""What folders are called that are no checkpoints yet, or no more."""

_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


def steps_in(folder: Path) -> list[int]:
    """The steps that have a folder, the newest first."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except FileNotFoundError:
        return []
    return sorted((int(n) for n in names if _STEP.fullmatch(n)), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, which says its own step.

    Raises:
        DamageError: There is none, or it is damaged.
        OtherFormatError: It is of another version.
    """
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise DamageError(folder.name, "is no folder")
    manifest = Manifest.from_bytes(read_file(folder, MANIFEST))
    if folder.name != str(manifest.step):
        raise DamageError(MANIFEST, f"is that of step {manifest.step}")
    return manifest


def read_facts(folder: Path, manifest: Manifest) -> bytes:
    """The file `facts.json`, as it was written."""
    data = read_file(folder, FACTS)
    if Seal(len(data), hashlib.sha256(data).hexdigest()) != manifest.files[FACTS]:
        raise DamageError(FACTS, "does not have the digest that it was given")
    return data


def read_file(folder: Path, name: str) -> bytes:
    """A whole file; a link is not followed."""
    with os.fdopen(_open(folder, name), "rb") as file:
        return file.read()


def examine(folder: Path, part: int = 0, parts: int = 1) -> Manifest:
    """Compares a checkpoint with its manifest, file by file.

    Arguments:
        folder: The checkpoint.
        part: Which share of the files to read; all are counted.
        parts: How many processes share them.

    Raises:
        DamageError: The first file that is missing, too many, no file, or changed.
        OtherFormatError: It is of another version.
    """
    manifest = read_manifest(folder)
    found = set(files_in(folder)) - {MANIFEST}
    for name in sorted(manifest.files.keys() - found):
        raise DamageError(name, "is missing")
    for name in sorted(found - manifest.files.keys()):
        raise DamageError(name, "is not in the manifest")
    for name in sorted(manifest.files)[part::parts]:
        _compare(folder, name, manifest.files[name])
    return manifest


def files_in(folder: Path, below: str = "") -> Iterator[str]:
    """The files in a folder, by their paths in it.

    Raises:
        DamageError: There is something that is neither a file nor a folder.
    """
    with os.scandir(folder / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from files_in(folder, name)
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                what = "a link" if entry.is_symlink() else "no file"
                raise DamageError(name, f"is {what}")


def seal_file(folder: Path, name: str) -> Seal:
    """The size and the digest of a file, read from the disk."""
    with os.fdopen(_open(folder, name), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return Seal(size, hashlib.file_digest(file, "sha256").hexdigest())


def _compare(folder: Path, name: str, wanted: Seal) -> None:
    size = os.lstat(folder / name).st_size
    if size != wanted.size:
        raise DamageError(name, f"has {size} bytes instead of {wanted.size}")
    if seal_file(folder, name) != wanted:
        raise DamageError(name, "does not have the digest that it was given")


def _open(folder: Path, name: str) -> int:
    try:
        number = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DamageError(name, "is missing") from None
    except OSError as error:
        raise DamageError(name, f"cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise DamageError(name, "is no file")
    return number


def write_file(folder: Path, name: str, data: bytes) -> Seal:
    """Writes a file that must not be there yet, down to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / name, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Seal(len(data), hashlib.sha256(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def give_name(complete: Path, folder: Path, step: int) -> None:
    """Gives a complete checkpoint its final name, in the place of one of that step.

    If this is interrupted between the two names, `tidy` brings the older one back.
    """
    final, replaced = folder / str(step), folder / f"{REPLACED}{step}"
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    complete.rename(final)
    sync_folder(folder)
    remove(replaced)


def delete(folder: Path, step: int) -> None:
    """Deletes a checkpoint: first its name, then its files."""
    deleted = folder / f"{DELETED}{step}"
    remove(deleted)
    (folder / str(step)).rename(deleted)
    sync_folder(folder)
    remove(deleted)


def remove(folder: Path) -> None:
    """Removes a folder that is no checkpoint, if it is there.

    Threads of a save that failed may still be clearing away what they have written:
    what vanishes meanwhile is no reason to leave the rest.
    """
    while os.path.lexists(folder):
        with suppress(FileNotFoundError):
            shutil.rmtree(folder)


def tidy(folder: Path) -> None:
    """Clears away what interrupted saves and deletions have left.

    Only for who writes here: what looks like a leftover may be a save under way.
    """
    with suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            step = path.name.removeprefix(REPLACED)
            if step != path.name and not (folder / step).exists():
                path.rename(folder / step)
            elif path.name.startswith((SAVING, REPLACED, DELETED)):
                remove(path)


def superfluous(folder: Path, keep: int, damaged: Set[int] = frozenset()) -> list[int]:
    """The steps that retention deletes; never the only good one.

    Arguments:
        folder: The folder of the checkpoints.
        keep: So many of the newest good ones stay; at least one.
        damaged: Steps that are known not to be good. They do not count, and go when
            enough good ones are newer.
    """
    found, newest = [], 0
    for step in steps_in(folder):
        if newest >= max(keep, 1) and not _is_kept(folder / str(step)):
            found.append(step)
        newest += step not in damaged
    return found


def _is_kept(folder: Path) -> bool:
    try:
        return read_manifest(folder).keep
    except OtherFormatError:
        return True  # not ours to judge
    except DamageError:
        return False
