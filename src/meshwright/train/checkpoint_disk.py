"""Why a checkpoint could not be written: how much room there is, what was said."""

import errno
import os
import re
from pathlib import Path

from meshwright.devices.sizes import format_bytes
from meshwright.errors import CheckpointError

RULE = (
    "A checkpoint is whole, or it is not there; older ones are kept, and training goes "
    "on."
)

_IN_TENSORSTORE = re.compile(r"os_error_code='(\d+)'")
_SPACE = {errno.ENOSPC, errno.EDQUOT}
_RIGHTS = {errno.EROFS, errno.EACCES, errno.EPERM}


def check_room(folder: Path, num_bytes: int, num_files: int) -> None:
    """Raises `ENOSPC` if a file system has no room for a checkpoint.

    Arguments:
        folder: Where it is to be written; need not be there.
        num_bytes: What it takes.
        num_files: How many files and folders it has.
    """
    found = os.statvfs(_nearest(folder))
    if found.f_bavail * found.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Some file systems count no inodes.
    if found.f_files and found.f_favail < num_files:
        raise OSError(
            errno.ENOSPC,
            f"No inodes left on device: {found.f_favail} free, {num_files} needed",
        )


def explain(error: Exception, step: int, folder: Path, needed: int) -> CheckpointError:
    """What happened to a save, in words.

    Arguments:
        error: What was raised.
        step: The step that was saved.
        folder: Where.
        needed: The bytes of the checkpoint.
    """
    if isinstance(error, CheckpointError):
        return error
    number, said = _number_of(error), _said(error)
    return CheckpointError(
        f"Step {step} was not saved in {folder}: {said}; "
        f"{format_bytes(_free(folder))} free, {format_bytes(needed)} needed.",
        RULE,
        _change(number, folder),
    )


def _change(number: int | None, folder: Path) -> str:
    if number in _SPACE:
        return "Free space there, or use another folder."
    if number == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)."
    if number in _RIGHTS:
        return f"Make {folder} writable, or use another folder."
    return "The next save tries again; look at the folder if that fails too."


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # Orbax passes on what TensorStore says, which is a text.
    found = _IN_TENSORSTORE.search(str(error))
    return int(found[1]) if found else None


def _said(error: Exception) -> str:
    number = _number_of(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if number is not None:
        return os.strerror(number)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _free(folder: Path) -> int:
    found = os.statvfs(_nearest(folder))
    return found.f_bavail * found.f_frsize


def _nearest(folder: Path) -> Path:
    """The folder itself, or the innermost one around it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
