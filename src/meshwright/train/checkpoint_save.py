"""One save, by all processes of a run: it is complete when all of them have written."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.cluster.identity import process_count, process_index
from meshwright.errors import CheckpointError
from meshwright.train.checkpoint_agreement import all_do, first_does
from meshwright.train.checkpoint_arrays import Copies, write_leaves
from meshwright.train.checkpoint_disk import check_room, explain
from meshwright.train.checkpoint_folder import (
    SAVING,
    files_in,
    give_name,
    remove,
    seal_file,
    sync_folder,
    tidy,
    write_file,
)
from meshwright.train.checkpoint_manifest import (
    ARRAYS,
    FACTS,
    MANIFEST,
    Entry,
    Manifest,
    Seal,
)
from meshwright.train.checkpoint_versions import versions

_TOPIC = "checkpoint/save"
_PATIENCE_SECONDS = 10.0
_CLEARING_SECONDS = 2.0
_BLOCK = 4096


@dataclass(frozen=True)
class Save:
    """What is to be saved, after it was copied; `write` writes it.

    All processes of a run write one, at the same time. None of them goes on to the next
    part before all have done the last one, and what fails in one fails in all.
    """

    folder: Path
    step: int
    copies: Copies
    facts: bytes
    keep: bool
    num_bytes: int
    """What the arrays of all processes take."""
    began: float = field(default_factory=time.time)

    def write(self) -> int:
        """Writes the checkpoint, gives it its name, and returns its size.

        Raises:
            CheckpointError: It could not be written; nothing of it is left.
        """
        try:
            name = first_does(_TOPIC, self._begin, self._explain)
            written = all_do(_TOPIC, lambda: self._write_arrays(name), self._explain)
            size = first_does(_TOPIC, lambda: self._complete(written), self._explain)
        except CheckpointError:
            if process_index() == 0:
                self._clear_away()
            raise
        return int(size)

    def _clear_away(self) -> None:
        """Removes what was written; what is left, the next save removes.

        When one array could not be written, threads may still be at others, and make
        its folder anew.
        """
        deadline = time.monotonic() + _CLEARING_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError):
                remove(self._temporary)
            time.sleep(0.05)
            if not self._temporary.exists():
                return

    @property
    def _temporary(self) -> Path:
        return self.folder / f"{SAVING}{self.step}"

    @property
    def needed(self) -> int:
        """The bytes that it takes on a disk, about."""
        return self.num_bytes + len(self.facts) + self._num_files * _BLOCK

    @property
    def _num_files(self) -> int:
        """With folders; as if all processes wrote as many as this one."""
        return 5 + process_count() * (2 + 3 * len(self.copies.leaves))

    def _explain(self, error: Exception) -> CheckpointError:
        return explain(error, self.step, self.folder, self.needed)

    def _begin(self) -> str:
        """Makes the folder to write into, after a look at the room for it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tidy(self.folder)
        check_room(self.folder, self.needed, self._num_files)
        self._temporary.mkdir(mode=0o700)
        (self._temporary / ARRAYS).mkdir(mode=0o700)
        return self._temporary.name

    def _write_arrays(self, name: str) -> str:
        """Writes the part of this process; returns what it consists of."""
        own = f"{ARRAYS}/{process_index()}"
        folder = self.folder / name / own
        when_visible(lambda: folder.mkdir(mode=0o700))
        if self.copies.leaves:
            write_leaves(folder, self.copies.leaves)
        for leaf in self.copies.leaves:
            sync_folder(folder / leaf)
        sync_folder(folder)
        files = files_in(self._temporary, own)
        written = {
            "arrays": _as_json(self.copies.arrays),
            "host": _as_json(self.copies.host),
            "files": _as_json({f: seal_file(self._temporary, f) for f in files}),
        }
        return json.dumps(written)

    def _complete(self, written: Iterable[str]) -> str:
        """Seals what all have written, and gives it its name."""
        parts = [json.loads(word) for word in written]
        files = {
            name: Seal.from_json(found)
            for part in parts
            for name, found in part["files"].items()
        }
        files[FACTS] = write_file(self._temporary, FACTS, self.facts)
        manifest = Manifest(
            step=self.step,
            made_at=self.began,
            keep=self.keep,
            versions=versions(),
            arrays=_merged(part["arrays"] for part in parts),
            host=_merged(part["host"] for part in parts),
            files=files,
        )
        content = manifest.to_bytes()
        Manifest.from_bytes(content)  # what cannot be read is not written either
        write_file(self._temporary, MANIFEST, content)
        sync_folder(self._temporary / ARRAYS)
        sync_folder(self._temporary)
        give_name(self._temporary, self.folder, self.step)
        return str(manifest.num_bytes)


def _as_json(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.to_json() for name, value in found.items()}


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Entry]:
    """The arrays of all processes, each with its parts from all of them.

    Before its first step a pipeline has all of its weights in every process; those of
    the first one count.
    """
    merged: dict[str, Entry] = {}
    for part in parts:
        for name, content in part.items():
            entry = Entry.from_json(content)
            before = merged[name].pieces if name in merged else ()
            regions = {(piece.start, piece.shape) for piece in before}
            others = [p for p in entry.pieces if (p.start, p.shape) not in regions]
            merged[name] = Entry(entry.shape, entry.dtype, (*before, *others))
    return merged


def when_visible(act: Callable[[], None]) -> None:
    """Does something in a folder that another host has made, when it is seen here."""
    deadline = time.monotonic() + _PATIENCE_SECONDS * (process_count() > 1)
    while True:
        try:
            return act()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
