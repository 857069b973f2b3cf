"""`meshwright ckpt ls`, `verify`, `export` and `prune` on runs of a few checkpoints."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.train.checkpoint_folder import read_manifest
from meshwright.train.checkpoint_store import CheckpointStore

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from checkpoints import disk, names_in, save, snapshot

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["ckpt", *map(str, arguments)])
        assert isinstance(stopped.value.code, int)
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints 20, which is to be kept, 40, 60 and 80."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=9)
    save(store, 20, keep=True)
    save(store, 40, 60, 80)
    return tmp_path / "run"


def damage(run: Path, step: int) -> None:
    with (run / f"checkpoints/{step}/arrays/0/joined/0").open("r+b") as file:
        file.write(b"\xff")


def test_ls_says_step_age_size_and_what_is_kept(run: Path, call: Call) -> None:
    (run / "checkpoints/.saving-100").mkdir()
    (run / "checkpoints/60/manifest.json").unlink()
    status, out, _ = call("ls", run)
    assert (status, re.sub(r"\d+ B", "1 B", out).splitlines()) == (
        0,
        [
            "step 80  0 s ago  1 B  1 process  complete",
            "step 60  damaged: manifest.json is missing",
            "step 40  0 s ago  1 B  1 process  complete",
            "step 20  0 s ago  1 B  1 process  kept  complete",
            "step 100  is being saved, or its save was interrupted",
            f"4 checkpoints; are all files whole? meshwright ckpt verify {run}",
        ],
    )


def test_ls_as_json(run: Path, call: Call) -> None:
    status, out, _ = call("ls", run, "--json")
    listed = json.loads(out)
    assert status == 0
    assert listed["unfinished"] == []
    assert [one["step"] for one in listed["checkpoints"]] == [80, 60, 40, 20]
    newest = listed["checkpoints"][0]
    assert newest["complete"] is True
    assert newest["kept"] is False
    assert newest["num_bytes"] > 100


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-50, "0 s"), (119, "119 s"), (300, "5 min"), (7200, "2 h"), (2e5, "2 days")],
)
def test_ages_are_in_words(
    run: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    shown: str,
) -> None:
    # faults.md row 21: the clock of another host may be ahead
    manifest = read_manifest(run / "checkpoints/80")
    monkeypatch.setattr("time.time", lambda: manifest.made_at + seconds)
    _, out, _ = call("ls", run)
    assert out.startswith(f"step 80  {shown} ago  ")


def test_without_checkpoints_the_list_is_empty(tmp_path: Path, call: Call) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert call("ls", tmp_path)[:2] == (
        0,
        f"0 checkpoints; are all files whole? meshwright ckpt verify {tmp_path}\n",
    )
    assert call("verify", tmp_path)[0] == 0


def test_verify_reads_everything(run: Path, call: Call) -> None:
    status, out, _ = call("verify", run)
    assert status == 0
    assert out.splitlines()[0].endswith("  1 process  good")
    assert out.splitlines()[-1] == f"4 checkpoints in {run}/checkpoints, verified"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_verify_names_step_and_file_of_what_is_damaged(
    run: Path, call: Call, as_json: list[str]
) -> None:
    damage(run, 60)
    status, out, err = call("verify", run, *as_json)
    what = "arrays/0/joined/0 does not have the digest that it was given"
    assert status == 5
    assert err.splitlines() == [
        f"error: 1 of 4 checkpoints in {run}/checkpoints is damaged: step 60: {what}.",
        "rule: Every file of a checkpoint has the size and the digest that its "
        "manifest says.",
        "fix: A run goes on from the newest good one; see meshwright ckpt ls.",
    ]
    if as_json:
        found = {c["step"]: c["damage"] for c in json.loads(out)["checkpoints"]}
        assert found == {80: None, 60: what, 40: None, 20: None}
    else:
        assert f"step 60  damaged: {what}" in out.splitlines()


def test_verify_names_other_formats(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.checkpoint_manifest.FORMAT", 2)
    status, out, _ = call("verify", run)
    assert status == 5
    assert out.startswith("step 80  damaged: has format 1; ")


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_a_folder_that_is_no_run_is_named_with_the_near_miss(
    run: Path, call: Call, verb: str
) -> None:
    rule = (
        "rule: A run folder is one that meshwright train has made; checkpoints lie in "
        "it."
    )
    for given, what, near in (
        (run / "checkpoints", "has no folder named checkpoints", run),
        (run / "checkpoints/80", "has no folder named checkpoints", run),
        (run / "gone", "is no folder", None),
    ):
        status, _, err = call(verb, given)
        assert status == 2
        assert err.splitlines() == [
            f"error: {given} {what}.",
            rule,
            f"fix: Did you mean {near}?"
            if near
            else "fix: Name the folder that was given to --run.",
        ]


def test_prune_keeps_the_newest_good_ones_and_those_that_are_needed(
    run: Path, call: Call
) -> None:
    damage(run, 80)
    status, out, _ = call("prune", run, "--keep", "1", "--dry-run")
    assert (status, out) == (0, "would be deleted: 40; left: 80, 60, 20\n")
    assert names_in(run / "checkpoints") == ["20", "40", "60", "80"]
    status, out, _ = call("prune", run, "--keep", "1")
    assert (status, out) == (0, "deleted: 40; left: 80, 60, 20\n")
    assert names_in(run / "checkpoints") == ["20", "60", "80"]
    status, out, _ = call("prune", run, "--json")
    assert json.loads(out) == {"deleted": [], "left": [80, 60, 20], "dry_run": False}


def test_prune_deletes_nothing_if_none_is_good(run: Path, call: Call) -> None:
    for step in (20, 40, 60, 80):
        damage(run, step)
    status, _, err = call("prune", run, "--keep", "1")
    assert status == 5
    assert "4 of 4 checkpoints" in err
    assert names_in(run / "checkpoints") == ["20", "40", "60", "80"]


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    about = header.pop("__metadata__")
    kinds = {"F32": np.float32, "I8": np.int8, "BF16": jnp.bfloat16, "BOOL": np.bool_}
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        part = data[8 + length :][begin:end]
        arrays[name] = np.frombuffer(part, kinds[entry["dtype"]]).reshape(
            entry["shape"]
        )
    return arrays, about


ARRAYS = {
    "parameters/net/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "parameters/net/scale": np.array(0.5, jnp.bfloat16),
    "parameters/net/none": np.zeros((0, 2), np.float32),
    "model state/net/mask": np.array([True, False]),
    "model state/net/large": np.ones(3 << 20, np.int8),
    "optimizer state/adam/rate": np.array(1e-3, np.float32),
    "metrics/loss/total": np.array(1.0, np.float32),
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    for step in (20, 40):
        arrays = {name: jnp.asarray(value) for name, value in ARRAYS.items()}
        store.save(snapshot(step, arrays), wait=True)
    return tmp_path / "run"


def test_safetensors_have_weights_and_statistics_by_their_paths(
    trained: Path, tmp_path: Path, call: Call
) -> None:
    status, out, _ = call("export", trained, "--to", tmp_path / "w.safetensors")
    assert status == 0
    assert out == f"step 40 is in {tmp_path}/w.safetensors (3.0 MiB)\n"
    arrays, about = read_safetensors(tmp_path / "w.safetensors")
    assert about == {"step": "40"}
    assert set(arrays) == {
        f"net/{n}" for n in ["kernel", "scale", "none", "mask", "large"]
    }
    for name, value in arrays.items():
        kind = "model state" if name[4:] in ("mask", "large") else "parameters"
        wanted = ARRAYS[f"{kind}/{name}"]
        assert value.dtype == wanted.dtype
        assert value.shape == wanted.shape
        assert value.tobytes() == wanted.tobytes()


def test_safetensors_are_read_by_their_own_package(
    trained: Path, tmp_path: Path, call: Call
) -> None:
    package = pytest.importorskip("safetensors.numpy")
    arrays = {k: v for k, v in ARRAYS.items() if "scale" not in k}
    store = CheckpointStore(trained / "checkpoints")
    store.save(snapshot(60, {k: jnp.asarray(v) for k, v in arrays.items()}), wait=True)
    call("export", trained, "--to", tmp_path / "w.safetensors")
    loaded = package.load_file(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(loaded["net/kernel"], ARRAYS["parameters/net/kernel"])


def test_variables_of_one_path_keep_their_kinds(tmp_path: Path, call: Call) -> None:
    arrays = {"parameters/x": jnp.zeros(1), "model state/x": jnp.ones(1)}
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(1, arrays), wait=True)
    call("export", tmp_path, "--to", tmp_path / "w.safetensors")
    assert set(read_safetensors(tmp_path / "w.safetensors")[0]) == set(arrays)


def test_types_that_safetensors_do_not_have_are_refused(
    tmp_path: Path, call: Call
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(snapshot(1, {"parameters/x": jnp.zeros(1, jnp.complex64)}), wait=True)
    status, _, err = call("export", tmp_path, "--to", tmp_path / "w.safetensors")
    assert status == 5
    lines = err.splitlines()
    assert lines[0] == "error: x is complex64[1]."
    assert lines[1].startswith("rule: A safetensors file holds float16, float32, ")
    assert lines[2] == "fix: Export to a .keras file."
    assert not (tmp_path / "w.safetensors").exists()


MODEL_FILE = """
import keras

def make_model(units=4):
    keras.utils.clear_session()
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(units),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    ]
    model = keras.Sequential(layers, name="net")
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model

def make_other_model():
    return make_model(5)
"""


def variables(model: Any) -> dict[str, Any]:
    groups = {
        "parameters": model.trainable_variables,
        "model state": model.non_trainable_variables,
        "optimizer state": model.optimizer.variables,
        "metrics": model.metrics_variables,
    }
    return {f"{k}/{v.path}": v for k, group in groups.items() for v in group}


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[Path, Any, str]:
    """A run, the model that was trained in it, and the file that makes it."""
    file = tmp_path / "model.py"
    file.write_text(MODEL_FILE)
    space: dict[str, Any] = {}
    exec(MODEL_FILE, space)  # noqa: S102
    model = space["make_model"]()
    x = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    model.fit(x, np.ones((16, 4)), epochs=2, verbose=0)
    arrays = {name: v.value for name, v in variables(model).items()}
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(snapshot(4, arrays), wait=True)
    return tmp_path / "run", model, f"{file}:make_model"


def test_a_keras_file_has_model_weights_and_optimizer(
    fitted: tuple[Path, Any, str], tmp_path: Path, call: Call
) -> None:
    run, model, maker = fitted
    target = tmp_path / "out" / "model.keras"
    target.parent.mkdir()
    status, out, err = call("export", run, "--to", target, "--model", maker, "--json")
    assert status == 0, err
    assert json.loads(out) == {
        "step": 4,
        "file": str(target),
        "num_bytes": target.stat().st_size,
    }
    assert names_in(target.parent) == ["model.keras"]
    loaded = keras.models.load_model(target)
    for theirs, ours in (
        (loaded.weights, model.weights),
        (loaded.optimizer.variables, model.optimizer.variables),
    ):
        assert len(theirs) == len(ours) > 5
        for a, b in zip(theirs, ours, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_keras_file_of_another_model_is_refused(
    fitted: tuple[Path, Any, str], tmp_path: Path, call: Call
) -> None:
    # faults.md row 31
    run, _, maker = fitted
    other = maker.replace("make_model", "make_other_model")
    status, _, err = call("export", run, "--to", tmp_path / "m.keras", "--model", other)
    assert status == 5
    assert "error: Checkpoint 4 is not of this model: " in err
    assert "is float32[4] there and float32[5] here" in err
    assert not (tmp_path / "m.keras").exists()


def test_what_to_export_to_is_checked_first(trained: Path, call: Call) -> None:
    status, _, err = call("export", trained, "--to", "weights.h5")
    assert status == 2
    assert "--to takes .keras or .safetensors files, not weights.h5" in err
    status, _, err = call("export", trained, "--to", "model.keras")
    assert status == 2
    assert "a .keras file needs --model FILE.py:make_model" in err


def test_a_file_that_is_there_is_replaced_only_if_told_to(
    trained: Path, tmp_path: Path, call: Call
) -> None:
    target = tmp_path / "w.safetensors"
    target.write_text("precious")
    status, _, err = call("export", trained, "--to", target)
    assert status == 5
    assert err.splitlines() == [
        f"error: {target} exists.",
        "rule: An export takes the place of another file only if it is told to.",
        "fix: Name another file, or add --force.",
    ]
    assert target.read_text() == "precious"
    assert call("export", trained, "--to", target, "--force")[0] == 0
    assert len(read_safetensors(target)[0]) == 5


def test_an_export_that_has_no_room_leaves_what_was_there(
    trained: Path, tmp_path: Path, call: Call
) -> None:
    with disk(tmp_path / "disk", "size=1m") as folder:
        target = folder / "w.safetensors"
        target.write_text("precious")
        status, _, err = call("export", trained, "--to", target, "--force")
        assert status == 5
        assert err.splitlines() == [
            f"error: {target} was not written: No space left on device.",
            "rule: An export is complete, or it is not there.",
            "fix: Name a folder that is there, can be written, and has room.",
        ]
        assert target.read_text() == "precious"
        assert os.listdir(folder) == ["w.safetensors"]


def test_the_newest_good_one_is_exported_or_the_one_that_is_named(
    run: Path, tmp_path: Path, call: Call
) -> None:
    damage(run, 80)
    out = tmp_path / "w.safetensors"
    assert call("export", run, "--to", out)[1].startswith("step 60 is in ")
    _, said, _ = call("export", run, "--to", out, "--step", "40", "--force")
    assert said.startswith("step 40 is in ")
    for step, what in (
        (80, "arrays/0/joined/0 does not have the digest that it was given"),
        (70, f"[Errno 2] No such file or directory: '{run}/checkpoints/70'"),
    ):
        status, _, err = call("export", run, "--to", out, "--step", step, "--force")
        assert status == 5
        assert err.splitlines() == [
            f"error: Checkpoint {step} in {run}/checkpoints cannot be used: {what}.",
            "rule: What is exported is a checkpoint whose digests hold.",
            "fix: Use one of these: 80, 60, 40, 20; meshwright ckpt verify tells which "
            "are good.",
        ]


def test_without_a_good_one_there_is_nothing_to_export(
    tmp_path: Path, call: Call
) -> None:
    (tmp_path / "checkpoints").mkdir()
    out = tmp_path / "w.safetensors"
    status, _, err = call("export", tmp_path, "--to", out)
    assert status == 5
    assert err.splitlines() == [
        f"error: There is no checkpoint in {tmp_path}/checkpoints.",
        "rule: What is exported is a checkpoint that is complete.",
        "fix: Train with --save-every, or name another run folder.",
    ]
    save(CheckpointStore(tmp_path / "checkpoints"), 20)
    damage(tmp_path, 20)
    status, _, err = call("export", tmp_path, "--to", out)
    assert status == 5
    assert "1 of 1 checkpoints" in err
