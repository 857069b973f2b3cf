"""Small JSON files that are whole or not there, and lines that are added to others."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def write_text(path: Path, text: str) -> None:
    """Writes a file beside, syncs it and renames it; only its owner may read it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with open(os.open(beside, _NEW, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file that is whole or not there."""
    write_text(path, f"{json.dumps(value, indent=2, ensure_ascii=False)}\n")


def append_json(path: Path, value: Any) -> None:
    """Adds a line at once; one that was cut off by a crash before does not spoil it."""
    line = f"{json.dumps(value, ensure_ascii=False)}\n".encode()
    descriptor = os.open(path, _MORE, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of lines; what is no object is left out."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        value = _parse(line)
        if isinstance(value, dict):
            yield value


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
