"""Disks that are full, read-only or gone: what was there stays, and training goes on.

faults.md rows 26, 34, 36 and G3, on real file systems of a few megabytes.
"""

import errno
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, CheckpointWarning
from meshwright.train import checkpoint_save, checkpoint_store
from meshwright.train.checkpoint_arrays import write_leaves
from meshwright.train.checkpoint_disk import explain
from meshwright.train.checkpoint_folder import remove
from meshwright.train.checkpoint_store import CheckpointStore, Outcome

import jax.numpy as jnp
import pytest

from checkpoints import damage_of, disk, found, names_in, remount, save, snapshot

RULE = (
    "A checkpoint is whole, or it is not there; older ones are kept, and training goes "
    "on."
)
LARGE = {"weights/large": jnp.arange(3 << 18, dtype=jnp.float32)}


@pytest.fixture
def told() -> list[Outcome]:
    return []


def fail(store: CheckpointStore, step: int, arrays: Any = None) -> CheckpointError:
    """Saves, which fails, loudly; returns why."""
    with pytest.warns(CheckpointWarning) as caught:
        store.save(snapshot(step, arrays), wait=True)
    assert store.failure is not None
    assert [str(warning.message) for warning in caught] == [str(store.failure)]
    assert store.failure.exit_code == 5
    assert store.failure.rule == RULE
    return store.failure


@contextmanager
def no_look_at_the_room() -> Iterator[None]:
    """As if others had filled the disk after the look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_save, "check_room", lambda *room: None)
        yield


def test_what_vanishes_while_a_folder_is_removed_does_not_save_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of a save that failed clear away what they wrote, too."""
    (tmp_path / "folder").mkdir()
    for name in "abc":
        (tmp_path / "folder" / name).touch()
    unlink = os.unlink
    gone: list[str] = []

    def unlink_as_second(name: str, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        if not gone:
            gone.append(name)
            raise FileNotFoundError(errno.ENOENT, "another was quicker", name)

    monkeypatch.setattr(os, "unlink", unlink_as_second)
    remove(tmp_path / "folder")
    assert gone
    assert not (tmp_path / "folder").exists()
    remove(tmp_path / "folder")


def test_a_full_disk_is_seen_before_anything_is_written(
    tmp_path: Path, told: list[Outcome]
) -> None:
    with disk(tmp_path / "disk", "size=8m") as folder:
        store = CheckpointStore(folder / "run/checkpoints", keep=1, told=told.append)
        store.save(snapshot(20, LARGE), wait=True)
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(3 << 20))
        failure = fail(store, 40, LARGE)
        assert failure.received == (
            f"Step 40 was not saved in {folder}/run/checkpoints: No space left on "
            "device; 2.0 MiB free, 3.1 MiB needed."
        )
        assert failure.change == "Free space there, or use another folder."
        assert [(o.what, o.step) for o in told] == [("saved", 20), ("failed", 40)]
        assert told[-1].text == failure.received
        assert names_in(folder / "run/checkpoints") == ["20"]
        assert found(store).step == 20
        ballast.unlink()
        store.save(snapshot(60, LARGE), wait=True)
        assert store.failure is None
        assert names_in(folder / "run/checkpoints") == ["60"]


@pytest.mark.parametrize("free", [0, 4096, 1 << 16, 1 << 20, 3 << 20])
def test_a_disk_that_gets_full_during_a_save_keeps_what_was_there(
    tmp_path: Path, free: int
) -> None:
    with disk(tmp_path / "disk", "size=8m") as folder:
        store = CheckpointStore(folder / "checkpoints")
        save(store, 20)
        room = os.statvfs(folder)
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - free))
        with no_look_at_the_room():
            failure = fail(store, 40, LARGE)
        assert "No space left on device" in failure.received
        assert failure.change == "Free space there, or use another folder."
        assert names_in(folder / "checkpoints") == ["20"]
        assert not damage_of(folder / "checkpoints/20")
        ballast.unlink()
        save(store, 60)


def test_a_disk_without_inodes_is_seen_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with disk(tmp_path / "disk", "size=8m,nr_inodes=18") as folder:
        store = CheckpointStore(folder / "checkpoints")
        save(store, 20)
        failure = fail(store, 40)
        assert "No inodes left on device: " in failure.received
        with no_look_at_the_room():
            assert "No space left on device" in fail(store, 40).received
        assert names_in(folder / "checkpoints") == ["20"]


def test_a_read_only_disk_is_told_and_can_be_resumed_from(tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "size=8m") as folder:
        store = CheckpointStore(folder / "checkpoints")
        save(store, 20)
        (folder / "checkpoints/.saving-30").mkdir()
        remount(folder, "ro")
        failure = fail(store, 40)
        assert "Read-only file system" in failure.received
        assert failure.change == (
            f"Make {folder}/checkpoints writable, or use another folder."
        )
        assert found(store).step == 20
        remount(folder, "rw")
        save(store, 60)
        assert names_in(folder / "checkpoints") == ["20", "60"]


def test_files_that_may_not_be_so_large_are_told(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        failure = fail(store, 40, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in failure.received
    assert failure.change == "Raise the limit on the size of files (ulimit -f)."
    assert names_in(tmp_path) == ["20"]


def test_a_folder_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run/checkpoints")
    save(store, 20)
    shutil.rmtree(tmp_path / "run")
    save(store, 40)
    assert names_in(tmp_path / "run/checkpoints") == ["40"]


def test_a_folder_that_is_deleted_during_a_save_fails_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "run/checkpoints")
    save(store, 20)

    def delete_and_write(*what: Any) -> None:
        write_leaves(*what)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(checkpoint_save, "write_leaves", delete_and_write)
    failure = fail(store, 40)
    assert "No such file or directory" in failure.received
    assert failure.change == (
        "The next save tries again; look at the folder if that fails too."
    )
    monkeypatch.undo()
    save(store, 60)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    store = CheckpointStore(tmp_path / "checkpoints")
    assert "File exists" in fail(store, 20).received


def test_old_ones_that_cannot_be_deleted_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 20)

    def refuse(*what: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_store, "delete", refuse)
    with pytest.warns(CheckpointWarning) as caught:
        store.save(snapshot(40), wait=True)
    assert str(caught[0].message) == (
        f"Older checkpoints in {tmp_path} were not deleted: Permission denied. They "
        "stay until that works again."
    )
    assert store.failure is None
    assert found(store).step == 40


def test_an_error_that_no_disk_makes_is_told_with_its_type(tmp_path: Path) -> None:
    error = explain(MemoryError("too much\nand more"), 7, tmp_path / "gone", 0)
    assert error.received.startswith(
        f"Step 7 was not saved in {tmp_path}/gone: MemoryError: too much; "
    )
    assert error.received.endswith(" free, 0 B needed.")


def test_without_rights_it_says_whose(tmp_path: Path) -> None:
    error = explain(PermissionError(13, "Permission denied"), 7, tmp_path, 0)
    assert error.change == f"Make {tmp_path} writable, or use another folder."


def test_without_room_it_says_so_whether_by_quota_or_not(tmp_path: Path) -> None:
    error = explain(OSError(errno.EDQUOT, "Disk quota exceeded"), 7, tmp_path, 0)
    assert "Disk quota exceeded" in error.received
    assert error.change == "Free space there, or use another folder."


def test_folders_that_other_hosts_make_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults.md row 35: a network file system shows them after a while
    def make_folder() -> None:
        (tmp_path / "temporary" / "1").mkdir()

    with pytest.raises(FileNotFoundError):
        checkpoint_save.when_visible(make_folder)
    monkeypatch.setattr(checkpoint_save, "process_count", lambda: 2)
    other = threading.Timer(0.2, (tmp_path / "temporary").mkdir)
    other.start()
    checkpoint_save.when_visible(make_folder)
    assert (tmp_path / "temporary" / "1").is_dir()
    monkeypatch.setattr(checkpoint_save, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(FileNotFoundError):
        checkpoint_save.when_visible((tmp_path / "gone" / "1").mkdir)


def test_a_save_that_fails_is_over_when_the_next_one_begins(tmp_path: Path) -> None:
    # faults.md row 34: it fails while nobody waits for it
    (tmp_path / "checkpoints").write_text("")
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(20))
    with pytest.warns(CheckpointWarning, match="Step 20 was not saved"):
        store.save(snapshot(40))
    with pytest.warns(CheckpointWarning, match="Step 40 was not saved"):
        store.wait()
    (tmp_path / "checkpoints").unlink()
    save(store, 60)
