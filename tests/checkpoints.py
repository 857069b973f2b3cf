"""Checkpoints for tests, and disks of their own for them."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.train.checkpoint_folder import examine, files_in
from meshwright.train.checkpoint_manifest import DamageError
from meshwright.train.checkpoint_store import CheckpointStore, Found, Snapshot

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def snapshot(step: int, arrays: Mapping[str, Any] | None = None, **facts: Any) -> Any:
    """A checkpoint of a few arrays, all of whose values depend on the step."""
    arrays = {"weights/kernel": jnp.full((3, 4), step)} if arrays is None else arrays
    return Snapshot(step, arrays, {"callback/best": np.arange(3) + step}, facts)


def save(store: CheckpointStore, *steps: int, **facts: Any) -> None:
    """Saves steps, and waits for each."""
    for step in steps:
        store.save(snapshot(step, **facts), wait=True)
        assert store.failure is None


def found(store: CheckpointStore) -> Found:
    """The newest good checkpoint; there must be one."""
    good = store.find_good()
    assert good is not None
    return good


def targets(arrays: Mapping[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Where arrays are, as a place for others."""
    return {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for name, a in arrays.items()
    }


def sharding(num_devices: int, *spec: str | None) -> NamedSharding:
    """A sharding over the first devices."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("axis",))
    return NamedSharding(mesh, PartitionSpec(*spec))


def damage_of(folder: Path) -> str:
    """What is found to be wrong with a checkpoint; empty if nothing is."""
    try:
        examine(folder)
    except DamageError as damage:
        return str(damage)
    return ""


def files_of(folder: Path) -> list[str]:
    return sorted(files_in(folder))


@contextmanager
def disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own, of a few megabytes, in memory."""
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no way to mount a file system")
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no right to mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Changes the options of such a disk."""
    command = ["mount", "-o", f"remount,{options}", str(folder)]
    subprocess.run(command, check=True)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
