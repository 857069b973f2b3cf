"""`meshwright tune` as people run it: its output, its signals, its end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.cli.main import main

import pytest

from staged_workers import is_alive

pytestmark = pytest.mark.processes

OBJECTIVES = Path(__file__).parents[1] / "trials" / "objectives.py"


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def start(folder: Path) -> "subprocess.Popen[str]":
    """A launcher that runs the first trial, which waits for the file `go`."""
    for at in folder.glob("at-*"):
        at.unlink()
    command = [sys.executable, "-Pm", "meshwright.cli.main", "tune"]
    launcher = subprocess.Popen(
        [
            *command,
            f"{OBJECTIVES}:counted",
            "--trials",
            "3",
            "--devices",
            "1",
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while not pids_in(folder):
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return launcher


def pids_in(folder: Path) -> list[int]:
    """The processes of trials that have come so far as to wait."""
    return [int(text) for at in folder.glob("at-*") if (text := at.read_text())]


def test_a_study_survives_what_is_done_to_its_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = start(tmp_path)
    (trial,) = pids_in(tmp_path)
    killed.kill()
    killed.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while is_alive(trial):
        assert time.monotonic() < deadline, "the trial outlives its launcher"
        time.sleep(0.01)

    ended = start(tmp_path)
    (trial,) = pids_in(tmp_path)
    ended.send_signal(signal.SIGTERM)
    said, _ = ended.communicate(timeout=60)
    assert ended.returncode == 75, said
    assert "trial 0 is lost: the launcher that ran it is gone" in said
    assert "stops; trials that run are given back to the study" in said
    assert "to go on: meshwright tune " in said
    assert not is_alive(trial)

    interrupted = start(tmp_path)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.stdout is not None
    said = ""
    while "stops when the 1 that run have ended" not in said:
        line = interrupted.stdout.readline()
        assert line, said
        said += line
    (tmp_path / "go").touch()
    said += interrupted.communicate(timeout=60)[0]
    assert interrupted.returncode == 130, said
    assert "1 of 3" in said
    assert "Traceback" not in said

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshwright", "tune", "..."])
    capsys.readouterr()
    assert (
        call(f"{OBJECTIVES}:counted", "--trials", "3", "--devices", "1", "--json") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [t["state"] for t in found["trials"]] == ["complete"] * 3
    asked = [float(x) for x in (tmp_path / "asked").read_text().split()]
    assert asked[0] == asked[1] == asked[2] == found["trials"][0]["value"]
    assert found["trials"][0]["attempts"] == 2, "to be asked to stop counts for nothing"
    assert len(asked) == 5
    assert found["outcome"] == "finished"
    assert Path(found["report"]).is_file()


def test_the_result_is_told_with_its_place_and_failures_have_their_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshwright", "tune", "..."])
    assert call(f"{OBJECTIVES}:plain", "--trials", "1", "--devices", "CPU:1") == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs/objectives-plain"
    assert "study objectives-plain: 1 trials of objectives.py:plain, one trial" in out
    assert f"results are in {folder}, with charts in {folder}/report.html" in out

    nan = f"{OBJECTIVES}:always_nan"
    assert call(nan, "--trials", "1", "--devices", "1", "--name", "nan") == 8
    error = capsys.readouterr().err
    assert error.startswith(
        "error: objectives.py:always_nan failed in all 1 trials: it returned nan.\n"
        "rule: A search goes on past trials that fail, as long as some do not.\n"
        "fix: "
    )
    assert call(f"{OBJECTIVES}:no_such", "--devices", "1") == 1
    error = capsys.readouterr().err
    assert "cannot be loaded: LookupError: there is no function 'no_such'" in error
    assert "stands under if __name__ == '__main__':. All of the error is in" in error
    assert call(str(tmp_path / "nothing.py")) == 2
    assert "nothing.py is not there" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["runs"]
