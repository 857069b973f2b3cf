"""Saving, finding and restoring checkpoints in one process."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError, CheckpointWarning
from meshwright.train import checkpoint_manifest, checkpoint_save, checkpoint_store
from meshwright.train.checkpoint_arrays import copy_arrays
from meshwright.train.checkpoint_store import CheckpointStore, Outcome
from meshwright.train.checkpoint_versions import versions

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import checkpoints
from checkpoints import (
    damage_of,
    found,
    names_in,
    save,
    sharding,
    snapshot,
    targets,
)
from conftest import Run


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def test_where_nothing_was_saved_nothing_is_found(store: CheckpointStore) -> None:
    assert store.find_good() is None


def test_the_newest_is_found_with_its_facts_and_host_arrays(
    store: CheckpointStore,
) -> None:
    save(store, 9, 20, 100, position=[1, 2.5, None], loss=float("nan"))
    good = found(store)
    assert good.step == 100
    assert good.facts["position"] == [1, 2.5, None]
    assert np.isnan(good.facts["loss"])
    np.testing.assert_array_equal(good.host["callback/best"], [100, 101, 102])


KINDS: dict[str, Any] = {
    "float32": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "float64": np.array([np.pi, -0.0, np.inf, np.nan]),
    "bfloat16": np.array([1.5, -2.0], jnp.bfloat16),
    "float8": np.array([1.5, -2.0, 0.25], jnp.float8_e4m3fn),
    "seed": np.array([1, 2**32 - 1], np.uint32),
    "count": np.array(7, np.int32),
    "flag": np.array([True, False, True]),
    "nothing": np.zeros((0, 4), np.float32),
    "byte": np.array([-1, 2], np.int8),
    "large": np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024),
}


def test_arrays_of_all_kinds_come_back_bit_for_bit(store: CheckpointStore) -> None:
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(value) for name, value in KINDS.items()}
        store.save(snapshot(1, arrays))
        restored = store.restore(found(store), targets(arrays))
    for name, value in KINDS.items():
        assert restored[name].dtype == value.dtype, name
        assert restored[name].shape == value.shape, name
        assert np.asarray(restored[name]).tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sharding(8, "axis"), sharding(3, "axis")),  # faults.md row 32
        (sharding(8, None, "axis"), sharding(4, "axis")),
        (sharding(1), sharding(8, None, "axis")),
        (sharding(8, "axis"), sharding(1)),
        (sharding(2, None, "axis"), sharding(8)),
    ],
    ids=["8 to 3", "columns to rows", "1 to 8", "8 to 1", "2 to 8 copies"],
)
@pytest.mark.parametrize("rows", [24, 24 * 1024], ids=["joined", "alone"])
def test_arrays_move_to_another_mesh(
    store: CheckpointStore, before: Any, after: Any, rows: int
) -> None:
    values = np.arange(rows * 48, dtype=np.float32).reshape(rows, 48)
    arrays = {"kernel": jax.device_put(values, before)}
    store.save(snapshot(1, arrays))
    place = {"kernel": jax.ShapeDtypeStruct(values.shape, np.float32, sharding=after)}
    restored = store.restore(found(store), place)["kernel"]
    assert restored.sharding == after
    np.testing.assert_array_equal(restored, values)


def test_what_is_saved_may_be_donated_at_once(store: CheckpointStore) -> None:
    change = jax.jit(lambda x: x * 0, donate_argnums=0)
    arrays = {
        "small": jax.device_put(np.ones(1000, np.float32), sharding(1)),
        "large": jax.device_put(np.ones(1 << 20, np.float32), sharding(8, "axis")),
    }
    where = targets(arrays)
    for step in range(5):
        store.save(snapshot(step, arrays))
        changed = {name: change(array) for name, array in arrays.items()}
        jax.block_until_ready(changed)
        restored = store.restore(found(store), where)
        for name, array in restored.items():
            assert np.asarray(array).all(), (step, name)
        arrays = {name: array + 1 for name, array in changed.items()}


@pytest.mark.parametrize("spec", [(), ("axis",)], ids=["copies", "rows"])
def test_what_is_restored_may_be_donated(store: CheckpointStore, spec: Any) -> None:
    values = np.arange(1 << 20, dtype=np.float32)
    arrays = {
        "small": jax.device_put(values[:64], sharding(8, *spec)),
        "large": jax.device_put(values, sharding(8, *spec)),
    }
    store.save(snapshot(1, arrays))
    change = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    restored = store.restore(found(store), targets(arrays))
    for name, array in restored.items():
        changed = change(change(array))
        for shard in changed.addressable_shards:
            wanted = np.asarray(arrays[name])[shard.index] * 4 + 3
            np.testing.assert_array_equal(shard.data, wanted, name)


def test_copies_share_no_memory_with_what_was_copied() -> None:
    arrays = {"small": jnp.ones(1000), "large": jnp.ones(1 << 20)}
    copies = copy_arrays(arrays, {}, 0)
    for leaf in copies.leaves.values():
        for array in arrays.values():
            assert not np.shares_memory(leaf, np.asarray(array))


def test_saves_are_told_from_their_thread(tmp_path: Path) -> None:
    told: list[tuple[Outcome, str]] = []

    def hear(outcome: Outcome) -> None:
        told.append((outcome, threading.current_thread().name))

    store = CheckpointStore(tmp_path, told=hear)
    save(store, 40)
    ((outcome, thread),) = told
    assert (outcome.what, outcome.step, thread) == ("saved", 40, "save of step 40")
    assert outcome.text.startswith("Step 40 is saved: ")
    assert outcome.num_bytes > 0
    assert outcome.seconds > 0


def test_the_newest_and_the_kept_ones_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10)
    save(store, 20, keep=True)
    save(store, 30, 40, 50)
    assert names_in(tmp_path) == ["20", "40", "50"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10, 20, turn=1)
    save(store, 10, turn=2)
    assert names_in(tmp_path) == ["10", "20"]
    assert json.loads((tmp_path / "10/facts.json").read_text()) == {"turn": 2}
    assert not damage_of(tmp_path / "10")


def test_who_opens_the_folder_clears_away_what_was_interrupted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 10, 20)
    (tmp_path / ".saving-30").mkdir()
    (tmp_path / ".saving-30" / "facts.json").write_text("{}")
    (tmp_path / "10").rename(tmp_path / ".deleted-10")
    (tmp_path / "20").rename(tmp_path / ".replaced-20")
    assert found(store).step == 20
    assert names_in(tmp_path) == ["20"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "007").mkdir()
    store = CheckpointStore(tmp_path, keep=1)
    assert store.find_good() is None
    save(store, 7, 8)
    assert names_in(tmp_path) == ["007", "8", "notes"]


@pytest.mark.parametrize("name", ["with spaces", "ünïcødé ✓", "per%cent", "a'b\"c"])
def test_folders_may_have_any_name(tmp_path: Path, name: str) -> None:
    # faults.md row 35
    store = CheckpointStore(tmp_path / name / "checkpoints")
    arrays = {"ünï/kernel ✓": jnp.arange(3.0)}
    store.save(snapshot(1, arrays))
    restored = store.restore(found(store), targets(arrays))
    np.testing.assert_array_equal(restored["ünï/kernel ✓"], [0, 1, 2])


def test_folders_may_be_relative_and_reached_by_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults.md rows 35 and G4
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(Path("link/run/checkpoints"))
    monkeypatch.chdir("/")
    save(store, 1)
    assert found(store).step == 1
    assert not damage_of(tmp_path / "real/run/checkpoints/1")


def test_nobody_else_may_look_into_the_folder(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "checkpoints"), 1)
    assert os.stat(tmp_path / "checkpoints").st_mode & 0o777 == 0o700


MODEL = {
    "weights/dense/kernel": jnp.zeros((3, 4)),
    "weights/dense/bias": jnp.zeros(4),
    "optimizer/rate": jnp.zeros(()),
}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"weights/dense/kernel": None},
            "it has, and the model has not, weights/dense/kernel",
        ),
        ({"weights/other": jnp.zeros(3)}, "it does not have weights/other"),
        (
            {"weights/dense/bias": None, "weights/dense_1/bias": jnp.zeros(4)},
            "it does not have weights/dense_1/bias (did you mean weights/dense/bias?); "
            "it has, and the model has not, weights/dense/bias",
        ),
        (
            {"weights/dense/bias": jnp.zeros(5)},
            "weights/dense/bias is float32[4] there and float32[5] here",
        ),
        (
            {"optimizer/rate": jnp.zeros((), jnp.bfloat16)},
            "optimizer/rate is float32[] there and bfloat16[] here",
        ),
        (
            {f"weights/new_{i}/gamma": jnp.zeros(1) for i in range(7)},
            "it does not have weights/new_0/gamma, weights/new_1/gamma, "
            "weights/new_2/gamma, weights/new_3/gamma, weights/new_4/gamma and 2 more",
        ),
    ],
    ids=["missing", "extra", "renamed", "other shape", "other dtype", "many"],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(
    store: CheckpointStore,
    changes: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # faults.md row 31
    store.save(snapshot(5, MODEL))
    good = found(store)
    monkeypatch.setattr(checkpoint_store, "ArrayReader", None)
    wanted = {k: v for k, v in {**MODEL, **changes}.items() if v is not None}
    with pytest.raises(CheckpointError) as caught:
        store.restore(good, targets(wanted))
    assert str(caught.value).split("\n") == [
        f"Checkpoint 5 in {good.folder.parent} is not of this model: {told}.",
        "A run goes on with the variables that it began with, of the same names, "
        "shapes and dtypes.",
        "Use the model that the checkpoint was made with, or another run folder.",
    ]
    assert caught.value.exit_code == 5


def test_other_versions_are_told_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # faults.md row 33
    told: list[Outcome] = []
    store = CheckpointStore(tmp_path, told=told.append)
    older = {**versions(), "jax": "0.9.1", "keras": "3.0"}
    monkeypatch.setattr(checkpoint_save, "versions", lambda: older)
    save(store, 1)
    assert found(store).step == 1
    assert told[-1] == Outcome(
        "notice",
        1,
        f"Checkpoint 1 was written with jax 0.9.1 (here {jax.__version__}), "
        f"keras 3.0 (here {keras.__version__}).",
    )


@pytest.mark.parametrize(("version", "which"), [(2, "a newer"), (0, "another")])
def test_another_format_is_refused_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, which: str
) -> None:
    # faults.md row 33
    store = CheckpointStore(tmp_path)
    save(store, 1)
    monkeypatch.setattr(checkpoint_manifest, "FORMAT", version)
    save(store, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError) as caught:
        store.find_good()
    assert str(caught.value).split("\n") == [
        f"Checkpoint 2 in {tmp_path} has format {version}.",
        "This Meshwright reads format 1.",
        f"Use {which} Meshwright, the one that wrote it.",
    ]


def test_checkpoints_of_another_format_are_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    monkeypatch.setattr(checkpoint_manifest, "FORMAT", 2)
    save(store, 1)
    monkeypatch.undo()
    save(store, 2, 3)
    assert names_in(tmp_path) == ["1", "3"]


def test_the_newest_is_damaged_and_the_one_before_is_used_loudly(
    tmp_path: Path,
) -> None:
    # faults.md rows 29 and G2
    told: list[Outcome] = []
    store = CheckpointStore(tmp_path, told=told.append)
    save(store, 20, 40, 60)
    (tmp_path / "60/facts.json").write_text("{ }")
    (tmp_path / "40/manifest.json").unlink()
    told.clear()
    with pytest.warns(CheckpointWarning) as caught:
        assert found(store).step == 20
    assert [str(warning.message) for warning in caught] == [
        f"Checkpoint 60 in {tmp_path} is damaged: facts.json has 3 bytes instead of 2. "
        "An older one is used, if there is one.",
        f"Checkpoint 40 in {tmp_path} is damaged: manifest.json is missing. "
        "An older one is used, if there is one.",
    ]
    assert caught[0].filename == checkpoints.__file__, "who has called find_good"
    assert [(o.what, o.step) for o in told] == [("damaged", 60), ("damaged", 40)]


def test_all_are_damaged_and_nothing_begins_anew(tmp_path: Path) -> None:
    # faults.md row 30
    store = CheckpointStore(tmp_path)
    save(store, 20, 40)
    for step in (20, 40):
        (tmp_path / f"{step}/facts.json").unlink()
    with (
        pytest.warns(CheckpointWarning, match="is damaged"),
        pytest.raises(CheckpointError) as caught,
    ):
        store.find_good()
    assert str(caught.value).split("\n") == [
        f"All checkpoints in {tmp_path} are damaged (2); the newest: Checkpoint 40 in "
        f"{tmp_path} is damaged: facts.json is missing.",
        "A run does not begin anew where there is something to go on from.",
        "Bring back the files of one, or begin another run in another folder.",
    ]
    assert caught.value.exit_code == 5


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    # faults.md row 35
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 20, 40)
    (tmp_path / "40/facts.json").unlink()
    with pytest.warns(CheckpointWarning, match="facts.json is missing"):
        found(store)
    save(store, 30)
    assert names_in(tmp_path) == ["20", "30", "40"]
    save(store, 50)
    assert names_in(tmp_path) == ["30", "40", "50"]
    save(store, 60)
    assert names_in(tmp_path) == ["50", "60"]


ENDS_DURING_A_SAVE = """
import sys
from pathlib import Path
import jax.numpy as jnp
from meshwright.train.checkpoint_store import CheckpointStore, Snapshot
store = CheckpointStore(Path('checkpoints'))
arrays = {f'large_{i}': jnp.ones(1 << 22) for i in range(5)}
store.save(Snapshot(1, arrays, {}, {}))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(75)", 75), ("raise RuntimeError('enough')", 1)],
    ids=["ends", "exits", "fails"],
)
def test_a_worker_that_ends_during_a_save_completes_it(
    tmp_path: Path, end: str, status: int
) -> None:
    # faults.md row 34
    script = tmp_path / "script.py"
    script.write_text(ENDS_DURING_A_SAVE + end)
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.launch.worker", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert "was not saved" not in done.stderr
    assert names_in(tmp_path / "checkpoints") == ["1"]
    assert not damage_of(tmp_path / "checkpoints/1")


@pytest.mark.processes
@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="no thread starts any more when Python ends"
)
def test_a_script_that_ends_during_a_save_completes_it(
    run_script: Run, tmp_path: Path
) -> None:
    # faults.md row 34
    run_script(ENDS_DURING_A_SAVE)
    assert names_in(tmp_path / "checkpoints") == ["1"]
    assert not damage_of(tmp_path / "checkpoints/1")
