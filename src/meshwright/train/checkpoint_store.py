"""Checkpoints of a training: saved beside it, found again, and placed anywhere."""

import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshwright.cluster.identity import process_count, process_index
from meshwright.devices.sizes import format_bytes
from meshwright.errors import CheckpointError, CheckpointWarning
from meshwright.train.checkpoint_agreement import all_do, first_does
from meshwright.train.checkpoint_arrays import ArrayReader, copy_arrays
from meshwright.train.checkpoint_disk import explain
from meshwright.train.checkpoint_folder import (
    delete,
    examine,
    read_facts,
    read_manifest,
    steps_in,
    superfluous,
    tidy,
)
from meshwright.train.checkpoint_manifest import (
    FORMAT,
    DamageError,
    Manifest,
    OtherFormatError,
)
from meshwright.train.checkpoint_match import check_match
from meshwright.train.checkpoint_save import Save
from meshwright.train.checkpoint_versions import differences

import jax
import numpy as np


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved."""

    step: int
    arrays: Mapping[str, jax.Array]
    """On any mesh, also one of several processes."""
    host: Mapping[str, np.ndarray]
    """Small arrays of this process; those of the first process are saved."""
    facts: Mapping[str, Any]
    """JSON; those of the first process are saved. With `keep`, it is never deleted."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was examined and is good."""

    step: int
    folder: Path
    manifest: Manifest
    facts: Mapping[str, Any]
    host: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Outcome:
    """What came of something."""

    what: Literal["saved", "failed", "damaged", "notice"]
    step: int
    text: str
    """A line for people."""
    num_bytes: int = 0
    seconds: float = 0.0
    """How long it took, beside the training."""


_stores: "weakref.WeakSet[CheckpointStore]" = weakref.WeakSet()


class CheckpointStore:
    """The checkpoints of a run, in a folder that all its processes share.

    All processes of a run make the same calls, in the same order.

    Arguments:
        folder: `DIR/checkpoints`; made when it is needed.
        keep: So many of the newest good ones stay.
        told: Called, from any thread, when a save is complete or has failed, and when
            something damaged was met.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp
        >>> store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints")
        >>> kernel = jnp.arange(3.0)
        >>> store.save(Snapshot(20, {"weights/kernel": kernel}, {}, {"epoch": 1}))
        >>> found = store.find_good()
        >>> found.step, found.facts
        (20, {'epoch': 1})
        >>> where = jax.ShapeDtypeStruct((3,), "float32", sharding=kernel.sharding)
        >>> store.restore(found, {"weights/kernel": where})
        {'weights/kernel': Array([0., 1., 2.], dtype=float32)}
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        told: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._told = told
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._warnings: list[str] = []
        self._damaged: set[int] = set()
        _stores.add(self)

    @property
    def failure(self) -> CheckpointError | None:
        """Why the last save that has ended failed; None if it did not."""
        return self._failure

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
        """Copies what is to be saved, and writes it while the training goes on.

        A save that fails does not raise: `failure` says why, and there is a
        `CheckpointWarning`. An earlier save is waited for.

        Arguments:
            snapshot: What to save; its arrays may be donated when this returns.
            wait: Whether to wait until it is complete.
        """
        self.wait()
        first = process_index() == 0
        host = snapshot.host if first else {}
        save = Save(
            folder=self._folder,
            step=snapshot.step,
            copies=copy_arrays(snapshot.arrays, host, process_index()),
            facts=json.dumps(snapshot.facts).encode() if first else b"",
            keep=bool(snapshot.facts.get("keep")),
            num_bytes=_num_bytes(snapshot),
        )
        self._thread = threading.Thread(
            target=self._write, args=[save], name=f"save of step {save.step}"
        )
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._warnings:
            warnings.warn(self._warnings.pop(0), CheckpointWarning, stacklevel=3)

    def find_good(self) -> Found | None:
        """The newest checkpoint that is whole, with all its digests; None without any.

        Each damaged one that is passed over gets a `CheckpointWarning`.

        Raises:
            CheckpointError: There are some, and none is good; or one is of a version of
                the format that cannot be read.
        """
        self.wait()
        steps = json.loads(first_does("checkpoint/steps", self._list, self._unreadable))
        told = []
        for step in steps:
            damage = self._damage(step)
            if damage is None:
                return self._open(step)
            self._damaged.add(step)
            text = f"Checkpoint {step} in {self._folder} is damaged: {damage}."
            told.append(text)
            self._told(Outcome("damaged", step, text))
            self._warnings.append(f"{text} An older one is used, if there is one.")
            self.wait()
        if not steps:
            return None
        raise CheckpointError(
            f"All checkpoints in {self._folder} are damaged ({len(steps)}); "
            f"the newest: {told[0]}",
            "A run does not begin anew where there is something to go on from.",
            "Bring back the files of one, or begin another run in another folder.",
        )

    def find_where(
        self, is_wanted: Callable[[Mapping[str, Any]], bool]
    ) -> Found | None:
        """The newest good checkpoint with such facts; None without any."""
        self.wait()
        steps = json.loads(first_does("checkpoint/steps", self._list, self._unreadable))
        good = (self._open(step) for step in steps if self._damage(step) is None)
        return next((found for found in good if is_wanted(found.facts)), None)

    def restore(
        self, found: Found, targets: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """The arrays of a checkpoint, on the devices where they are wanted.

        Arguments:
            found: What `find_good` has found.
            targets: The name, shape, dtype and sharding of each array. The mesh and the
                number of processes may be others than when it was saved.

        Raises:
            CheckpointError: It is that of another model, or cannot be read.
        """
        where = f"Checkpoint {found.step} in {self._folder}"
        check_match(found.manifest.arrays, targets, where)
        reader = ArrayReader(found.folder, found.manifest)
        restored = {}

        def place() -> str:
            for name, target in targets.items():
                entry = found.manifest.arrays[name]
                restored[name] = reader.place(entry, target.sharding)
            return ""

        all_do("checkpoint/restore", place, self._unreadable)
        return restored

    def _write(self, save: Save) -> None:
        """Writes in a thread beside the training."""
        try:
            size = save.write()
            self._failure = None
        except Exception as error:
            self._failure = explain(error, save.step, save.folder, save.needed)
            self._warnings.append(str(self._failure))
            self._told(Outcome("failed", save.step, self._failure.received))
            return
        seconds = time.time() - save.began
        text = f"Step {save.step} is saved: {format_bytes(size)} in {seconds:.1f} s."
        self._told(Outcome("saved", save.step, text, size, seconds))
        if process_index() == 0:
            self._damaged.discard(save.step)
            self._retire()

    def _retire(self) -> None:
        """Deletes what retention does not keep."""
        try:
            for step in superfluous(self._folder, self._keep, self._damaged):
                delete(self._folder, step)
        except OSError as error:
            self._warnings.append(
                f"Older checkpoints in {self._folder} were not deleted: "
                f"{error.strerror}. They stay until that works again."
            )

    def _list(self) -> str:
        with suppress(OSError):  # a disk that can only be read is read
            tidy(self._folder)
        return json.dumps(steps_in(self._folder))

    def _damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint; the processes share its files."""

        def look() -> str:
            try:
                examine(self._folder / str(step), process_index(), process_count())
            except (DamageError, OSError) as error:
                return str(error)
            except OtherFormatError as error:
                raise self._of_other_format(step, error.version) from None
            return ""

        found = all_do("checkpoint/examine", look, self._unreadable)
        return next(filter(None, found), None)

    def _open(self, step: int) -> Found:
        folder = self._folder / str(step)
        opened = []

        def read() -> str:
            manifest = read_manifest(folder)
            facts = json.loads(read_facts(folder, manifest))
            reader = ArrayReader(folder, manifest)
            host = {name: reader.read(entry) for name, entry in manifest.host.items()}
            opened.append(Found(step, folder, manifest, facts, host))
            return ""

        all_do("checkpoint/open", read, self._unreadable)
        other = differences(opened[0].manifest.versions)
        if other:
            text = f"Checkpoint {step} was written with {other}."
            self._told(Outcome("notice", step, text))
        return opened[0]

    def _of_other_format(self, step: int, version: Any) -> CheckpointError:
        age = "a newer" if isinstance(version, int) and version > FORMAT else "another"
        return CheckpointError(
            f"Checkpoint {step} in {self._folder} has format {version!r}.",
            f"This Meshwright reads format {FORMAT}.",
            f"Use {age} Meshwright, the one that wrote it.",
        )

    def _unreadable(self, error: Exception) -> CheckpointError:
        first = (str(error).strip().splitlines() or [""])[0]
        return CheckpointError(
            f"Checkpoints in {self._folder} cannot be read: "
            f"{type(error).__name__}: {first}",
            "A checkpoint is read as it was written.",
            "Look at the folder and at its disk; meshwright ckpt verify names files.",
        )


def complete_saves() -> None:
    """Completes the saves that are under way; called when a script ends."""
    for store in list(_stores):
        store.wait()


# Orbax uses Python's thread pools, which are closed before threads are waited for. Only
# what is registered here comes before that; it has no public name. From Python 3.12 on
# it comes too late for threads to start, so workers complete their saves before.
threading._register_atexit(complete_saves)  # type: ignore[attr-defined]


def _num_bytes(snapshot: Snapshot) -> int:
    """What the arrays of all processes take."""
    arrays: list[Any] = [*snapshot.arrays.values(), *snapshot.host.values()]
    return sum(array.nbytes for array in arrays)
