"""`meshwright plan` as a process of its own, with the real planner."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import OF_TESTS

pytestmark = pytest.mark.processes

MODEL = """
import keras

def make_model():
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(8)]
    model = keras.Sequential([keras.Input((512,)), *layers], name="net")
    model.compile("adam", "mse")
    return model

def make_nothing():
    return None
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py:make_model"


def meshwright(
    tmp_path: Path, *arguments: object
) -> "subprocess.CompletedProcess[str]":
    base = {k: v for k, v in os.environ.items() if k not in OF_TESTS}
    return subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "plan", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**base, "MESHWRIGHT_CALIBRATION": str(tmp_path)},
        timeout=120,
    )


def test_a_plan_is_printed_with_its_argument(tmp_path: Path, target: str) -> None:
    done = meshwright(
        *(tmp_path, target, "--devices", "8xH200", "--batch", 1024),
        *("--samples", 10**6, "--epochs", 3, "--timeline"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "Plans for 'net', a global batch of 1,024, on 8 x H200, NVLink 4"
    )
    assert "The decision, step by step" in lines
    assert any(line.startswith("Strong scaling, predicted") for line in lines)
    assert any(line.startswith("Weak scaling, predicted") for line in lines)
    assert "The plan has no stages, so there is no timetable." in lines
    assert lines[-1].startswith("Use it: mw.distribute(model, mw.")


def test_json_is_one_object_with_a_plan_that_fits(tmp_path: Path, target: str) -> None:
    done = meshwright(
        tmp_path, target, "--devices", "8xH200", "--batch", 1024, "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["best"]["fits"]
    assert facts["best"] == facts["candidates"][0]
    assert facts["best"]["memory_bytes"] > 3 * 4 * 8 * 512 * 512 / 8
    assert facts["machine"]["name"] == "8 x H200, NVLink 4"
    assert facts["batch_size"] == 1024


def test_nothing_fits_ends_with_3_and_shows_the_least_bad_plan_and_its_timetable(
    tmp_path: Path, target: str
) -> None:
    done = meshwright(
        *(tmp_path, target, "--devices", "8xH200", "--batch", 64),
        *("--memory", "100KiB", "--objective", "smallest", "--timeline"),
    )
    assert (done.returncode, done.stderr) == (3, "")
    lines = done.stdout.splitlines()
    at = lines.index("No plan fits. The least bad one, predicted:")
    closest = lines[at + 1]
    assert " per device > 100.0 KiB" in " ".join(lines[at + 1 : at + 3])
    assert "stages=" in closest
    assert any(line.startswith("stage 0 ") for line in lines), done.stdout
    assert lines[-1] == (
        f"Try more: meshwright plan {target} --devices 2x8xH200 --batch 64"
    )


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        (
            ("model.py:make_model", "--devices", "8xH20O", "--batch", 8),
            "error: 'H20O' is not an accelerator of the catalog.",
        ),
        (
            ("modle.py:make_model", "--devices", "8xH200", "--batch", 8),
            "error: The file modle.py does not exist.",
        ),
        (
            ("model.py:make_nothing", "--devices", "8xH200", "--batch", 8),
            "error: model.py:make_nothing returned None (a NoneType).",
        ),
        (
            ("model.py:make_model", "--devices", "8xH200", "--batch", 0),
            "Error: Invalid value for '--batch': 0 is not in the range x>=1.",
        ),
    ],
    ids=["hardware", "file", "function", "batch"],
)
def test_bad_input_ends_with_2_and_prints_no_plan(
    tmp_path: Path, target: str, arguments: tuple[object, ...], received: str
) -> None:
    done = meshwright(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert received in done.stderr.splitlines()
    assert "Traceback" not in done.stderr
