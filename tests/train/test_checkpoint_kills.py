"""A save that is killed, wherever it is, leaves everything readable.

faults.md rows 25 and G1, with real SIGKILLs to real processes.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshwright.train.checkpoint_folder import steps_in
from meshwright.train.checkpoint_store import CheckpointStore

import pytest

from checkpoints import damage_of, found, names_in

pytestmark = pytest.mark.processes

SAVER = Path(__file__).with_name("checkpoint_saver.py")


def save_in_processes(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The exit status of each, and how many calls to the system it had made."""
    done = subprocess.run(
        [sys.executable, str(SAVER), json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints 20 and 40, to copy."""
    folder = tmp_path_factory.mktemp("before") / "checkpoints"
    cases = [{"folder": str(folder), "step": step} for step in (20, 40)]
    assert [status for status, _ in save_in_processes(cases)] == [0, 0]
    assert names_in(folder) == ["20", "40"]
    return folder


def kill(
    before: Path, tmp_path: Path, step: int, kills: list[dict[str, Any]]
) -> list[Path]:
    """Saves a step once for each kill, and returns the folders."""
    folders = [tmp_path / str(number) for number in range(len(kills))]
    for folder in folders:
        shutil.copytree(before, folder)
    saves = [
        {"folder": str(folder), "step": step, **how}
        for folder, how in zip(folders, kills, strict=True)
    ]
    for (status, _), how in zip(save_in_processes(saves), kills, strict=True):
        # A process may be through before a late kill comes.
        assert status == -signal.SIGKILL or (status == 0 and "delay" in how), how
    return folders


def check(folder: Path) -> int:
    """All that has the name of a checkpoint is good; returns the newest."""
    wrong = {step: damage_of(folder / str(step)) for step in steps_in(folder)}
    assert not any(wrong.values()), wrong
    newest = found(CheckpointStore(folder)).step
    assert not [name for name in names_in(folder) if name.startswith(".")]
    return newest


def test_a_save_is_killed_before_each_of_its_calls(
    before: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(before, whole)
    ((status, number),) = save_in_processes([{"folder": str(whole), "step": 60}])
    assert status == 0
    assert names_in(whole) == ["40", "60"], "the oldest was deleted"
    assert number > 20
    kills = [{"call": call} for call in range(number)]
    newest = [check(folder) for folder in kill(before, tmp_path, 60, kills)]
    assert newest == sorted(newest), "it is there from some call on"
    assert set(newest) == {40, 60}


def test_a_save_in_the_place_of_the_only_checkpoint_is_killed_before_each_call(
    before: Path, tmp_path: Path
) -> None:
    only = tmp_path / "only"
    shutil.copytree(before / "40", only / "40")
    whole = tmp_path / "whole"
    shutil.copytree(only, whole)
    ((status, number),) = save_in_processes([{"folder": str(whole), "step": 40}])
    assert status == 0
    # The first half is as in the test before: a folder that has no final name yet.
    kills = [{"call": call} for call in range(number // 2, number)]
    for folder in kill(only, tmp_path, 40, kills):
        assert check(folder) == 40


def kill_at_random(before: Path, tmp_path: Path, number: int) -> None:
    chance = random.Random(number)  # noqa: S311
    kills = [{"delay": chance.uniform(0, 0.035)} for _ in range(number)]
    newest = [check(folder) for folder in kill(before, tmp_path, 60, kills)]
    assert set(newest) <= {40, 60}


def test_saves_are_killed_at_random(before: Path, tmp_path: Path) -> None:
    kill_at_random(before, tmp_path, 12)


@pytest.mark.soak
def test_fifty_saves_are_killed_at_random(before: Path, tmp_path: Path) -> None:
    kill_at_random(before, tmp_path, 50)
