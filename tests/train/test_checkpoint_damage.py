"""Nothing in a checkpoint changes unseen, and none is trusted for what it says.

faults.md rows 27, 28, 47 and G2.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.train.checkpoint_folder import examine, read_manifest
from meshwright.train.checkpoint_manifest import DamageError, OtherFormatError
from meshwright.train.checkpoint_store import CheckpointStore

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import damage_of, files_of, found, sharding, snapshot, targets

FILES = {
    "manifest.json",
    "facts.json",
    "arrays/0/_METADATA",
    "arrays/0/joined/.zarray",
    "arrays/0/joined/0",
    "arrays/0/array0/.zarray",
    "arrays/0/array0/0",
}
ARRAYS = {
    "weights/kernel": np.arange(80, dtype=np.float32).reshape(20, 4),
    "weights/large": np.arange(1 << 19, dtype=np.float32),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint, to copy."""
    folder = tmp_path_factory.mktemp("whole")
    arrays = {name: jnp.asarray(value) for name, value in ARRAYS.items()}
    store = CheckpointStore(folder)
    store.save(snapshot(7, arrays, epoch=3), wait=True)
    return folder / "7"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "checkpoints" / "7")


def test_a_whole_one_is_whole(copy: Path) -> None:
    assert set(files_of(copy)) == FILES
    assert examine(copy).step == 7


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def test_every_flipped_bit_is_caught_and_its_file_named(copy: Path) -> None:
    chance = random.Random(28)  # noqa: S311
    tried = 0
    for name in sorted(FILES):
        file = copy / name
        num_bits = 8 * file.stat().st_size
        bits = chance.sample(range(num_bits), min(num_bits, 300))
        for bit in (0, num_bits - 1, *bits):
            flip(file, bit)
            assert damage_of(copy).startswith(f"{name} "), (name, bit)
            flip(file, bit)
            tried += 1
    assert tried > 1000
    assert not damage_of(copy)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0")


def take_away(file: Path) -> None:
    file.unlink()


def replace_by_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def replace_by_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        empty,
        lengthen,
        take_away,
        replace_by_a_folder,
        replace_by_a_pipe,
    ],
)
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_damaged_file_is_named(
    copy: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(copy / name)
    assert damage_of(copy).startswith(f"{name} ")


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_link_to_the_same_bytes_is_refused(
    copy: Path, tmp_path: Path, name: str
) -> None:
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    assert damage_of(copy).startswith(f"{name} ")


def test_a_manifest_is_not_read_through_a_link(copy: Path, tmp_path: Path) -> None:
    (copy / "manifest.json").rename(tmp_path / "elsewhere")
    (copy / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamageError) as caught:
        read_manifest(copy)
    assert str(caught.value) == (
        "manifest.json cannot be read (Too many levels of symbolic links)"
    )


def test_links_to_folders_are_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "arrays").rename(tmp_path / "elsewhere")
    (copy / "arrays").symlink_to(tmp_path / "elsewhere")
    assert damage_of(copy) == "arrays is a link"
    copy.rename(tmp_path / "whole")
    copy.symlink_to(tmp_path / "whole")
    assert damage_of(copy) == "7 is no folder"


@pytest.mark.parametrize(
    "name", ["more.txt", "arrays/1", "arrays/0/joined/1", "arrays/0/array0/zarr.json"]
)
def test_a_file_too_many_is_named(copy: Path, name: str) -> None:
    (copy / name).write_text("")
    assert damage_of(copy) == f"{name} is not in the manifest"


def test_a_checkpoint_under_the_name_of_another_step_is_refused(copy: Path) -> None:
    other = copy.rename(copy.parent / "8")
    assert damage_of(other) == "manifest.json is that of step 7"


def sealed(content: Any) -> bytes:
    """A manifest as it is written, of any content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"digest":"{digest}","manifest":{text}}}\n'.encode()


def reseal(copy: Path, change: Callable[[Any], Any]) -> None:
    """Changes what a manifest says, as somebody would who knows how it is sealed."""
    content = json.loads((copy / "manifest.json").read_text())["manifest"]
    changed = change(content)
    (copy / "manifest.json").write_bytes(
        sealed(content if changed is None else changed)
    )


def test_a_manifest_that_is_sealed_again_is_as_good(copy: Path) -> None:
    reseal(copy, lambda manifest: None)
    assert not damage_of(copy)


def set_entry(**changes: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["arrays"]["weights/kernel"].update(changes)

    return change


def set_piece(index: int, value: Any) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["arrays"]["weights/kernel"]["pieces"][0][index] = value

    return change


def add_file(name: str) -> Callable[[Any], None]:
    def change(manifest: Any) -> None:
        manifest["files"][name] = manifest["files"]["facts.json"]

    return change


@pytest.mark.parametrize(
    "change",
    [
        add_file("/etc/passwd"),
        add_file("../8/facts.json"),
        add_file("arrays/../../8/facts.json"),
        add_file("arrays//0"),
        add_file("."),
        lambda manifest: manifest["files"].pop("facts.json") and None,
        lambda manifest: manifest["files"].pop("arrays/0/joined/0") and None,
        lambda manifest: manifest["files"].update({"facts.json": [-1, "0" * 64]}),
        lambda manifest: manifest["files"].update({"facts.json": [2, "../../x"]}),
        lambda manifest: manifest.update(step="7"),
        lambda manifest: manifest.update(arrays=[1, 2]),
        lambda manifest: manifest.pop("host") and None,
        set_entry(shape=[1 << 60, 1 << 60]),
        set_entry(shape=[-1, -80]),
        set_entry(shape=[20.0, 4.0]),
        set_entry(shape=[20, 4, 1]),
        set_entry(shape=[20, 5]),
        set_entry(dtype="O"),
        set_entry(dtype="float128"),
        set_entry(dtype="V8"),
        set_entry(dtype="float64"),
        set_entry(pieces=[]),
        lambda manifest: manifest["arrays"]["weights/kernel"]["pieces"].append(
            manifest["arrays"]["weights/kernel"]["pieces"][0]
        ),
        set_entry(pieces=[[0, "joined", 0, [0, 0], [10, 4]]] * 2),
        set_piece(0, -1),
        set_piece(0, "../0"),
        set_piece(1, "../joined"),
        set_piece(1, "array7"),
        set_piece(2, 1 << 40),
        set_piece(3, [1, 0]),
        set_piece(4, [1 << 60, 4]),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    copy: Path, change: Callable[[Any], Any]
) -> None:
    reseal(copy, change)
    assert damage_of(copy) == "manifest.json says what no checkpoint is"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"digest": "", "manifest": {}}',
        b"[" * 100_000,
        b'{"manifest":' * 50_000,
    ],
    ids=["nothing", "list", "null", "no text", "no digest", "deep", "deeper"],
)
def test_what_is_no_manifest_is_refused(copy: Path, data: bytes) -> None:
    (copy / "manifest.json").write_bytes(data)
    assert damage_of(copy) == (
        "manifest.json does not have the digest that it was given"
    )


@pytest.mark.parametrize("content", [[], "text", 7, None, {"format": 2}, {}])
def test_whole_manifests_of_other_formats_are_told_from_damaged_ones(
    copy: Path, content: Any
) -> None:
    (copy / "manifest.json").write_bytes(sealed(content))
    with pytest.raises(OtherFormatError):
        examine(copy)


def replace(copy: Path, name: str, data: bytes) -> None:
    """Changes a file together with what the manifest says of it."""
    (copy / name).write_bytes(data)

    def change(manifest: Any) -> None:
        digest = hashlib.sha256(data).hexdigest()
        manifest["files"][name] = [len(data), digest]

    reseal(copy, change)


HEADER = {
    "chunks": [1 << 21],
    "compressor": None,
    "dimension_separator": ".",
    "dtype": "|u1",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [1 << 21],
    "zarr_format": 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shape": [1 << 50], "chunks": [1 << 50]},
        {"chunks": [1 << 50]},
        {"shape": [1 << 50]},
        {"compressor": {"id": "zlib", "level": 1}},
        {"filters": [{"id": "pickle"}]},
        {"dtype": "|O"},
        {"dtype": "<f8"},
        [],
    ],
    ids=[str(number) for number in range(9)],
)
def test_headers_of_arrays_are_not_believed(copy: Path, changes: Any) -> None:
    header = changes if changes == [] else {**HEADER, **changes}
    replace(copy, "arrays/0/array0/.zarray", json.dumps(header).encode())
    good = found(CheckpointStore(copy.parent))
    where = targets({k: jnp.asarray(v) for k, v in ARRAYS.items()})
    store = CheckpointStore(copy.parent)
    if changes == {}:
        restored = store.restore(good, where)["weights/large"]
        np.testing.assert_array_equal(restored, ARRAYS["weights/large"])
        return
    with pytest.raises(CheckpointError) as caught:
        store.restore(good, where)
    assert str(caught.value).split("\n") == [
        f"Checkpoints in {copy.parent} cannot be read: DamageError: "
        "arrays/0/array0/.zarray is not that of plain bytes",
        "A checkpoint is read as it was written.",
        "Look at the folder and at its disk; meshwright ckpt verify names files.",
    ]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"tree_metadata": {}, "use_zarr3": true}', '{"use_ocdbt": true}'],
)
def test_what_orbax_says_of_arrays_is_not_believed(copy: Path, text: str) -> None:
    replace(copy, "arrays/0/_METADATA", text.encode())
    with pytest.raises(CheckpointError, match="cannot be read"):
        found(CheckpointStore(copy.parent))


def test_facts_that_are_too_deep_are_refused(copy: Path) -> None:
    replace(copy, "facts.json", b"[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read: RecursionError"):
        found(CheckpointStore(copy.parent))


def test_damage_between_examining_and_restoring_is_an_error(copy: Path) -> None:
    store = CheckpointStore(copy.parent)
    good = found(store)
    (copy / "arrays/0/array0/0").unlink()
    where = jax.ShapeDtypeStruct((1 << 19,), np.float32, sharding=sharding(1))
    kernel = jax.ShapeDtypeStruct((20, 4), np.float32, sharding=sharding(1))
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.restore(good, {"weights/large": where, "weights/kernel": kernel})


def test_damage_says_its_file() -> None:
    damage = DamageError("facts.json", "is missing")
    assert (damage.file, str(damage)) == ("facts.json", "facts.json is missing")
