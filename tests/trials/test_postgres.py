"""Several launchers on one study, in a real PostgreSQL server."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.trials import storage

import pytest

from postgres import Server, postgres_server

pytestmark = pytest.mark.processes

HERE = Path(__file__).with_name("objectives.py")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres_server() as running:
        yield running


def start_launcher(
    server: Server, objective: str, trials: int, *options: str
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            *(sys.executable, "-Pm", "meshwright.cli.main", "tune"),
            *(f"{HERE}:{objective}", "--trials", str(trials)),
            *("--storage", server.url, "--devices", "1", *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 100
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


def test_launchers_share_the_trials_of_a_study(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launchers = [
        start_launcher(server, "shared", 7, "--run", f"run-{i}", "--json")
        for i in range(2)
    ]
    ends = [launcher.communicate(timeout=100)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ends
    assert len([*tmp_path.glob("by-*")]) == 2, "both took part"
    one, other = (json.loads(end) for end in ends)
    assert len(one["trials"]) == 7
    assert [t["state"] for t in one["trials"]] == ["complete"] * 7
    assert one["trials"] == other["trials"]
    assert one["best_params"] == other["best_params"]


def test_a_launcher_that_shows_no_sign_of_life_loses_its_trials_to_others(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped = start_launcher(server, "reporting", 2, "--run", "stopped")
    try:
        wait_for(Path("at-0"))
        stopped.send_signal(signal.SIGSTOP)
        Path("go").touch()
        found = mw.tune(
            f"{HERE}:reporting",
            2,
            devices=["CPU:0"],
            storage=server.url,
            heartbeat=0.25,
        )
    finally:
        stopped.send_signal(signal.SIGCONT)
    said, _ = stopped.communicate(timeout=100)
    assert [t.state for t in found.trials] == ["complete"] * 2
    assert [t.attempts for t in found.trials] == [2, 1]
    assert "showed no sign of life for 2 s" in found.trials[0].because
    first, *rest = Path("asked").read_text().split()
    assert first in rest, "with the same parameters"
    assert stopped.returncode == 0, said
    assert "trial 0 was given up by another launcher" in said
    assert "2 of 2" in said


def test_a_server_that_is_restarted_loses_nothing(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    is_missed = threading.Event()
    monkeypatch.setattr(storage, "_pause", is_missed.set)

    def restart() -> None:
        wait_for(Path("at-0"))
        server.stop()
        Path("go").touch()
        is_missed.wait(60)
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    found: Any = mw.tune(
        f"{HERE}:counted", 2, devices=["CPU:0"], storage=server.url, name="restarted"
    )
    restarting.join()
    assert [t.state for t in found.trials] == ["complete"] * 2
    assert [t.attempts for t in found.trials] == [1, 1]
    assert "the database answers again" in capsys.readouterr().out
