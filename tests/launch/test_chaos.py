"""Runs that are disturbed end bit for bit as those that are not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.errors import RunError
from meshwright.launch import chaos
from meshwright.launch.chaos import Chaos, Trouble, compare, draw_troubles
from meshwright.train.checkpoint_store import CheckpointStore, Snapshot

import jax.numpy as jnp
import pytest

SCRIPT = Path(__file__).with_name("trained.py")
STEPS = 60


def test_faults_are_drawn_again_by_their_seed() -> None:
    drawn = draw_troubles(200, 1000, 3, 10, seed=5)
    assert drawn == draw_troubles(200, 1000, 3, 10, seed=5)
    assert drawn != draw_troubles(200, 1000, 3, 10, seed=6)
    assert {trouble.kind for trouble in drawn} == set(chaos.KINDS)
    assert {trouble.rank for trouble in drawn} == {None, 0, 1, 2}
    steps = [trouble.step for trouble in drawn]
    assert steps == sorted(steps)
    assert min(steps) >= 2
    assert max(steps) <= 1000


def test_no_checkpoint_is_damaged_while_there_is_nothing_to_fall_back_to() -> None:
    drawn = draw_troubles(500, 1000, 1, 100, seed=1)
    early = {trouble.kind for trouble in drawn if trouble.step < 400}
    assert "corrupt-last" not in early


def save(run: Path, **arrays: Any) -> None:
    store = CheckpointStore(run / "checkpoints")
    store.save(Snapshot(3, arrays, {}, {}), wait=True)


def test_a_single_bit_is_a_difference(tmp_path: Path) -> None:
    kernel, bias = jnp.arange(3.0), jnp.zeros(2)
    save(tmp_path / "a", kernel=kernel, bias=bias)
    save(tmp_path / "b", kernel=kernel, bias=bias)
    save(tmp_path / "c", kernel=kernel, bias=-bias)
    save(tmp_path / "d", kernel=kernel)
    assert compare(tmp_path / "a", tmp_path / "b") == (2, ())
    assert compare(tmp_path / "a", tmp_path / "c") == (2, ("bias",))
    assert compare(tmp_path / "a", tmp_path / "d") == (2, ("bias",))


def test_the_log_says_what_struck_and_what_was_lost() -> None:
    troubles = (
        Trouble(kind="kill", rank=1, step=7, struck=2.0, resumed=5, lost_seconds=3.5),
        Trouble(kind="launcher", rank=None, step=9),
    )
    found = Chaos(
        steps=10,
        troubles=troubles,
        launches=2,
        restarts=1,
        different=("kernel",),
        arrays=2,
        seconds=30,
        undisturbed_seconds=10,
    )
    assert str(found).splitlines() == [
        "| step | fault | rank | struck after | went on after step | lost |",
        "|---|---|---|---|---|---|",
        "| 7 | kill | 1 | 2.0 s | 5 | 3.5 s |",
        "| 9 | launcher | launcher | - | - | - |",
        "",
        "1 of 2 faults struck a run of 10 steps; 1 restarts, 2 launches, 30 s instead "
        "of 10 s.",
        "Compared with the undisturbed run: 1 of 2 arrays differ: kernel.",
    ]
    assert found.to_json()["identical"] is False


@pytest.mark.processes
def test_two_processes_lose_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # faults.md rows 1, 2, 6, 9 and 29; G5 and G9
    troubles = [
        Trouble(kind="kill", rank=1, step=15),
        Trouble(kind="term", rank=1, step=33),
        Trouble(kind="corrupt-last", rank=0, step=48),
    ]
    # JAX looks once a second whether somebody has asked, and these steps are short.
    monkeypatch.setenv("PAUSE_SECONDS", "2.5")
    monkeypatch.setattr(chaos, "draw_troubles", lambda *drawn, **by: troubles)
    where = ["--processes", "2", "--save-every", "5", "--run", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        main(["chaos", "--json", "--faults", "3", *where, str(SCRIPT)])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert (found["identical"], found["struck"], found["steps"]) == (True, 3, STEPS)
    assert (found["launches"], found["restarts"]) == (2, 2)
    killed, asked, damaged = found["troubles"]
    assert killed["resumed"] <= 10
    assert asked["resumed"] >= 33, "whoever is asked to stop saves before"
    assert damaged["resumed"] == 40, "the newest is damaged, so an older one is used"
    events = (tmp_path / "disturbed" / "events.jsonl").read_text()
    assert "Checkpoint 45" in events
    assert "is damaged" in events
    assert Path(tmp_path, "chaos.md").read_text().startswith("| step | fault |")


@pytest.mark.processes
def test_a_script_that_trains_nothing_is_told_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('nothing')\n")
    command = ["chaos", "--run", str(tmp_path / "runs"), str(script)]
    ran = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *command],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == RunError.exit_code
    assert ran.stderr.splitlines()[1:] == [
        f"error: The run in {tmp_path}/runs/undisturbed has no step.",
        "rule: Faults strike between the steps of a fit.",
        "fix: Let the script train a model with a strategy: with strategy.scope(), or "
        "mw.distribute(model, strategy).",
    ]


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, 2])
def test_thirty_faults_lose_nothing(
    processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / "long.py"
    long.write_text(SCRIPT.read_text().replace("epochs=3", "epochs=40"))
    faults = ["--faults", "30", "--seed", "1", "--step-timeout", "5"]
    where = ["--processes", str(processes), "--run", str(tmp_path / "runs")]
    with pytest.raises(SystemExit) as end:
        main(["chaos", "--json", *faults, *where, str(long)])
    found = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert found["identical"]
    assert found["struck"] == 30
