"""The run folder: whose it is, what it tells, and that it outlives its launchers."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from meshwright.cluster.records import append_json, read_lines, write_json
from meshwright.cluster.redaction import redact_arguments, redact_environment
from meshwright.errors import RunError
from meshwright.launch.run_folder import open_run

import pytest


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("is_there", [False, True])
def test_nobody_else_can_look_into_it(is_there: bool, tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    if is_there:
        path.mkdir(parents=True, mode=0o755)
    with open_run(path) as folder:
        folder.begin(Path("script.py"), [])
    assert mode(path) == 0o700
    files = [p for p in path.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {"lock", "secret", "config.json"}
    assert {mode(p) for p in files} == {0o600}
    assert mode(path / "logs") == 0o700


def test_the_secret_stays_and_no_two_runs_have_the_same(tmp_path: Path) -> None:
    secrets = []
    for name in ("a", "a", "b"):
        with open_run(tmp_path / name):
            secrets.append((tmp_path / name / "secret").read_text())
    assert len(secrets[0].strip()) == 64
    assert secrets[0] == secrets[1] != secrets[2]


def test_a_second_launcher_is_refused_with_the_first_one_s_name(tmp_path: Path) -> None:
    # faults.md row 23
    host = os.uname().nodename
    with open_run(tmp_path / "run"), pytest.raises(RunError) as caught:
        open_run(tmp_path / "run")
    error = caught.value
    expected = (
        f"The run folder {tmp_path}/run is in use: process {os.getpid()} on {host} "
    )
    assert error.received.startswith(f"{expected}has held it since 20")
    assert error.rule == "One launcher works on a run at a time."
    assert error.change == (
        "Wait for it, end it, or give another folder with --run DIR."
    )
    assert error.exit_code == 2
    open_run(tmp_path / "run").__exit__(None, None, None)


def test_something_else_s_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(RunError) as caught:
        open_run(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path} holds 'thesis.txt' and no config.json.",
        "A run has a folder of its own, which is empty when it begins.",
        "Give another folder with --run DIR.",
    ]
    assert mode(tmp_path) == 0o755
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as caught:
        open_run(tmp_path / "file" / "run")
    assert str(caught.value).splitlines() == [
        f"The run folder {tmp_path}/file/run cannot be used: File exists "
        f"({tmp_path}/file).",
        "A run keeps its checkpoints, logs and events in a folder that it can make and "
        "write.",
        "Give another folder with --run DIR, or make this one yours.",
    ]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RunError, match="cannot be used"):
        open_run(tmp_path / "run")
    assert not (tmp_path / "victim").exists()


def test_a_config_that_is_no_json_is_not_overwritten(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as folder:
        folder.begin(Path("script.py"), [])
        (tmp_path / "run/config.json").write_text("{")
        with pytest.raises(RunError) as caught:
            folder.begin(Path("script.py"), [])
    assert "config.json is no JSON: " in caught.value.received
    assert caught.value.rule == (
        "It is written whole or not at all, so something else has changed it."
    )
    assert caught.value.change == "Repair it, or give another folder with --run DIR."


def test_the_lives_of_launchers_add_up_also_of_those_that_were_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    now = time.time()
    for line in (
        {"began": now - 100},
        {"began": now - 100, "ended": now - 90, "outcome": "preempted"},
        {"began": now - 50},
    ):
        append_json(path / "launches.jsonl", line)
    (path / "lock").write_text("")
    os.utime(path / "lock", (now - 30, now - 30))  # its last sign of life
    with open_run(path) as folder:
        assert folder.wall_before == pytest.approx(10 + 20, abs=0.1)
    with open_run(path) as folder:
        assert folder.wall_before == pytest.approx(10 + 20, abs=0.1)


def test_a_run_that_is_set_aside_lies_within_and_can_be_found(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for number in (1, 2):
        with open_run(path) as folder:
            folder.begin(Path("script.py"), [])
            (path / "checkpoints").mkdir()
            secret = (path / "secret").read_text()
            assert folder.set_aside() == path / "earlier" / str(number)
            assert folder.config is None
        assert (path / "earlier" / str(number) / "checkpoints").is_dir()
        assert (path / "secret").read_text() == secret


def test_events_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path / "run") as folder:
        (tmp_path / "run/events.jsonl").mkdir()
        folder.note("something")
        assert folder.unwritten == "events.jsonl: Is a directory"


def test_a_line_that_a_crash_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    append_json(path, {"a": 3})
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]
    assert path.read_text().count("\n") == 3


def test_a_json_file_is_replaced_whole_and_nothing_is_left_beside(
    tmp_path: Path,
) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_config_says_what_runs_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "s3cret")
    monkeypatch.setenv("https_proxy", "http://me:s3cret@proxy:3128")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    with open_run(tmp_path / "run") as folder:
        folder.begin(Path("/a/script.py"), ["--token", "s3cret", "--lr", "3"])
    text = (tmp_path / "run/config.json").read_text()
    assert "s3cret" not in text
    config = json.loads(text)
    assert config["script"] == "/a/script.py"
    assert config["arguments"] == ["--token", "***", "--lr", "3"]
    assert config["environment"]["https_proxy"] == "http://***@proxy:3128"
    assert config["environment"]["XLA_FLAGS"] == "--xla_a=1"
    assert "WANDB_API_KEY" not in config["environment"]
    assert set(config["versions"]) >= {"meshwright", "jax", "keras"}


def test_secrets_are_hidden_however_they_are_spelled() -> None:
    assert redact_arguments(
        ["--password=a", "api_token=b", "-x", "http://c:d@e/f"]
    ) == [*("--password=***", "api_token=***", "-x", "http://***@e/f")]
    assert redact_arguments(["--use-key", "--other", "v"]) == [
        "--use-key",
        "--other",
        "v",
    ]
    assert redact_environment({"JAX_SECRET_THING": "a", "HOME": "/b"}) == {
        "JAX_SECRET_THING": "***"
    }


@pytest.mark.processes
def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sys, time; from pathlib import Path\n"
            "from meshwright.launch.run_folder import open_run\n"
            "folder = open_run(Path(sys.argv[1]))\n"
            "print('held', flush=True); time.sleep(60)",
            str(tmp_path / "run"),
        ],
        stdout=subprocess.PIPE,
    )
    assert held.stdout is not None
    assert held.stdout.readline() == b"held\n"
    with pytest.raises(RunError, match=f"process {held.pid} "):
        open_run(tmp_path / "run")
    held.kill()
    held.communicate()
    with open_run(tmp_path / "run"):
        pass
