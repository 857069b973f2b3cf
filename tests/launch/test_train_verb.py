"""`meshwright train` as people run it: its output, its signals, its end."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.cluster.records import read_lines

import pytest

from staged_workers import is_alive

pytestmark = pytest.mark.processes

STEPPING = """
import os, signal, sys, time
from meshwright.cluster.channel import channel
from meshwright.cluster.preemption import preemption_wanted

line = channel()
line.enter("step")
for step in range(1, 2000):
    if step > 5 and preemption_wanted():
        line.enter("checkpoint")
        {saving}
        line.say(saved=step - 1)
        sys.exit(75)
    time.sleep(0.02)
    line.finish_step(step)
    if step == 5:
        print("five", flush=True)
"""

ORPHANS = """
import ctypes, os, subprocess, time
from meshwright.cluster.channel import channel
child = subprocess.Popen(["sleep", "1000"])
print("pids", os.getpid(), child.pid, flush=True)
channel().enter("step")
ctypes.PyDLL(None).sleep(1000)
"""


class Launcher:
    """A launcher in a process of its own, and what it prints."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-Pm", "meshwright.cli.main", "train", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""

    def wait_for(self, words: str) -> None:
        assert self.process.stdout is not None
        while words not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line

    def end(self, status: int) -> str:
        rest, _ = self.process.communicate(timeout=60)
        self.said += rest
        assert self.process.returncode == status, self.said
        return self.said

    def events(self, run: str = "runs/script") -> list[dict[str, Any]]:
        return list(read_lines(self.folder / run / "events.jsonl"))


@contextlib.contextmanager
def launch(tmp_path: Path, source: str, *arguments: str) -> Iterator[Launcher]:
    (tmp_path / "script.py").write_text(source)
    launcher = Launcher(tmp_path, *arguments, "script.py")
    try:
        yield launcher
    finally:
        launcher.process.kill()
        launcher.process.communicate()


def test_sigterm_lets_workers_save_and_exits_with_75(tmp_path: Path) -> None:
    # faults.md row 7
    with launch(tmp_path, STEPPING.format(saving="time.sleep(0.3)")) as launcher:
        launcher.wait_for("five")
        launcher.process.send_signal(signal.SIGTERM)
        said = launcher.end(75)
        assert "stopping: workers save and end; again to stop at once" in said
        last, go_on = said.splitlines()[-2:]
        assert "stopped after step " in last
        assert ", saved up to step " in last
        assert last.endswith(f"what there is lies in {tmp_path / 'runs/script'}")
        assert go_on == "meshwright: to go on: meshwright train script.py"
        (saved,) = [e for e in launcher.events() if e["event"] == "saved"]
        assert saved["step"] >= 5


def test_a_second_sigterm_ends_at_once_with_75(tmp_path: Path) -> None:
    # faults.md row 7
    with launch(tmp_path, STEPPING.format(saving="time.sleep(60)")) as launcher:
        launcher.wait_for("five")
        launcher.process.send_signal(signal.SIGTERM)
        launcher.wait_for("stopping")
        began = time.monotonic()
        launcher.process.send_signal(signal.SIGTERM)
        launcher.end(75)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_is_graceful_once_and_at_once_twice_and_shows_no_traceback(
    times: int, tmp_path: Path
) -> None:  # faults.md row 8
    saving = "time.sleep(0.2)" if times == 1 else "time.sleep(60)"
    with launch(tmp_path, STEPPING.format(saving=saving)) as launcher:
        launcher.wait_for("five")
        # As a terminal does it: to all processes of its foreground group.
        os.killpg(launcher.process.pid, signal.SIGINT)
        launcher.wait_for("stopping")
        if times == 2:
            os.killpg(launcher.process.pid, signal.SIGINT)
        said = launcher.end(130)
        assert "Traceback" not in said
        assert ("saved up to step" in said) == (times == 1)
        assert "meshwright: interrupted after step " in said


def test_nothing_survives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    # faults.md row 9; the worker is stuck in native code and cannot do anything
    with launch(tmp_path, ORPHANS) as launcher:
        launcher.wait_for("pids")
        _, worker, child = launcher.said.splitlines()[-1].split()
        launcher.process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and (
            is_alive(int(worker)) or is_alive(int(child))
        ):
            time.sleep(0.02)
        assert not is_alive(int(worker))
        assert not is_alive(int(child))


def test_the_lock_goes_with_a_killed_launcher_whose_life_counts(tmp_path: Path) -> None:
    # faults.md rows 9 and 23
    with launch(
        tmp_path, "print('here', flush=True); import time; time.sleep(60)"
    ) as a:
        a.wait_for("here")
        refused = Launcher(tmp_path, "script.py")
        said = refused.end(2)
        assert f"in use: process {a.process.pid} on {os.uname().nodename}" in said
        assert "rule: One launcher works on a run at a time." in said
        assert (
            "fix: Wait for it, end it, or give another folder with --run DIR." in said
        )
        a.process.kill()
        a.process.wait()
    (tmp_path / "script.py").write_text(
        "from meshwright.cluster.orders import current_orders\n"
        "print(current_orders().wall_before)"
    )
    said = Launcher(tmp_path, "script.py").end(0)
    assert any(0 < float(line) < 60 for line in said.splitlines() if line[0].isdigit())
    launches = list(read_lines(tmp_path / "runs/script/launches.jsonl"))
    assert [line.get("outcome") for line in launches] == [
        None,
        "killed",
        None,
        "finished",
    ]


def test_an_exception_is_shown_once_and_the_run_fails_with_1(tmp_path: Path) -> None:
    source = "def f():\n    raise KeyError('boom')\nf()\n"
    with launch(tmp_path, source, "--restarts", "0") as launcher:
        said = launcher.end(1)
    assert said.count("Traceback (most recent call last)") == 1
    assert "runpy" not in said
    assert f'[rank 0]   File "{tmp_path / "script.py"}", line 2, in f' in said
    host = os.uname().nodename
    error, rule, fix = said.splitlines()[-5:-2]
    assert error == (
        f"error: Rank 0 on {host} raised KeyError in its script: 'boom' (script.py:2)."
    )
    assert rule == "rule: A script ends well if it comes to its end in every process."
    assert fix.startswith("fix: Look at the traceback, or at the logs in ")
    assert "The same command goes on from the last checkpoint." in fix


def test_typed_errors_have_three_beats_and_their_own_exit_code(tmp_path: Path) -> None:
    source = (
        "import meshwright as mw\n"
        "raise mw.errors.DataError('x has 3 rows.', 'It needs 4.', 'Add one.')"
    )
    with launch(tmp_path, source) as launcher:
        said = launcher.end(4)
    assert "error: x has 3 rows.\nrule: It needs 4.\nfix: Add one.\n" in said
    assert "Traceback" not in said
    assert "restart" not in said


@pytest.mark.parametrize(("code", "status"), [("0", 0), ("3", 3), ("75", 75)])
def test_exit_statuses_of_a_script_pass_through(
    code: str, status: int, tmp_path: Path
) -> None:
    with launch(tmp_path, f"import sys; sys.exit({code})") as launcher:
        said = launcher.end(status)
    assert ("ended its script with sys.exit(3) in its script" in said) == (status == 3)


def test_the_outcome_as_json_is_all_there_is_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('much')")
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "train", "--json", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    run = str(tmp_path / "runs/script")
    assert json.loads(done.stdout) == {
        **{"outcome": "finished", "exit_code": 0, "step": None, "saved": None},
        **{"restarts": 0, "failure": None, "run": run},
        "go_on": "meshwright train --json script.py",
    }


def test_a_finished_run_does_nothing_and_says_so(tmp_path: Path) -> None:
    with launch(tmp_path, "print('works')") as launcher:
        said = launcher.end(0)
    assert "meshwright: script.py on 1 process of " in said.splitlines()[0]
    assert "\nworks\n" in said
    assert (
        "meshwright: the script trained no model by a strategy, so there is no "
        "checkpoint; with strategy.scope() or mw.distribute there is one for every fit"
    ) in said
    said = Launcher(tmp_path, "script.py").end(0)
    assert "works" not in said
    assert "script has finished; there is nothing to do" in said


def test_scripts_see_their_own_arguments_and_folder_and_run_without_a_launcher(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "ein Ordner mit ü"
    folder.mkdir()
    (folder / "beside.py").write_text("WORDS = 'imported'")
    (folder / "click.py").write_text("raise SystemExit('shadowed')")
    (folder / "script.py").write_text(
        "import sys, beside\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], beside.WORDS, __file__)"
    )
    link = tmp_path / "link"
    link.symlink_to(folder)
    words = f"['--lr', '3', 'a b'] imported {folder / 'script.py'}"
    arguments = ["--lr", "3", "a b"]
    run = ["--run", "läufe/mein lauf"]
    said = Launcher(link, *run, "script.py", "--", *arguments).end(0)
    assert words in said.splitlines()
    assert (folder / "läufe/mein lauf/finished.json").exists()
    alone = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=link,
        capture_output=True,
        text=True,
        check=True,
    )
    assert alone.stdout.splitlines() == [words]


def test_on_a_terminal_output_passes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, os\n"
        "print(sys.stdout.isatty(), os.get_terminal_size().columns)\n"
        "print(' 10%\\r 20%', flush=True)"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 61, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", "train", "script.py"],
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
    )
    assert process.wait(timeout=60) == 0
    os.close(theirs)
    said = os.read(ours, 65536)
    os.close(ours)
    assert b"True 61\r\n 10%\r 20%\r\n" in said
    assert (tmp_path / "runs/script/logs/0-0.txt").read_bytes().endswith(b"10%\r 20%\n")


@pytest.fixture
def on_a_terminal_that_tells() -> Iterator[None]:
    """Tests may run under nohup, which a launcher would rightly inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("on_a_terminal_that_tells")
def test_a_terminal_that_closes_lets_workers_save(tmp_path: Path) -> None:
    with launch(tmp_path, STEPPING.format(saving="pass")) as launcher:
        launcher.wait_for("five")
        launcher.process.send_signal(signal.SIGHUP)
        assert "saved up to step" in launcher.end(75)


def test_a_script_that_has_not_come_to_a_step_does_not_hold_up_a_stop(
    tmp_path: Path,
) -> None:
    source = "import time; from meshwright.cluster.channel import channel\n"
    source += "channel().enter('start'); print('waits', flush=True); time.sleep(60)"
    with launch(tmp_path, source) as launcher:
        launcher.wait_for("waits")
        launcher.process.send_signal(signal.SIGTERM)
        said = launcher.end(75)
    assert (
        "rank 0 did not end at its start within 2 s of being asked to, and was ended"
        in said
    )


def test_another_script_or_other_arguments_are_not_mixed_with_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(status: int, *arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--run", "r", *arguments])
        out, err = capsys.readouterr()
        assert stopped.value.code == status, out + err
        return out + err

    (tmp_path / "a.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    (tmp_path / "b.py").write_text("print('b')")
    call(3, "a.py", "--", "3")
    said = call(0, "a.py", "--", "0")
    assert "the run began with the arguments 3; it goes on with 0" in said
    said = call(2, "b.py")
    assert said.splitlines() == [
        f"error: {tmp_path}/r is a run of {tmp_path}/a.py, not of {tmp_path}/b.py.",
        "rule: A run folder belongs to one script; its checkpoints are of that one.",
        "fix: Give another folder with --run DIR, or start anew with --resume never.",
    ]
    said = call(2, "a.py", "--", "1")
    assert said.splitlines()[:2] == [
        f"error: {tmp_path}/r has finished with the arguments 3, not 1.",
        "rule: A finished run is not run again.",
    ]
    said = call(0, "--resume", "never", "b.py")
    assert f"the run that was in {tmp_path}/r is in {tmp_path}/r/earlier/1 now" in said
    assert (tmp_path / "r/earlier/1/finished.json").exists()
    assert "has finished" in call(0, "b.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [  # faults.md row 45
        (["--procesess", "2", "script.py"], "Did you mean one of: '--processes'"),
        (["script.py", "--lr", "3"], "No such option '--lr'"),
        (["script.py", "--lr", "3"], "of the script stand behind it and a --."),
        (["--processes", "-1", "script.py"], "-1 is not in the range"),
        (["--processes", "9" * 30, "script.py"], "is not in the range 1<=x<=4096"),
        (["--processes", "two", "script.py"], "'two' is not a valid integer"),
        (["--step-timeout", "0", "script.py"], "0.0 is not in the range x>0"),
        (["--step-timeout", "nan", "script.py"], "nan is not a finite number."),
        (["--save-minutes", "inf", "script.py"], "inf is not a finite number."),
        (["--keep", "0", "script.py"], "0 is not in the range x>=1"),
        (["--resume", "maybe", "script.py"], "'maybe' is not one of 'auto', 'never'"),
        ([], "Missing argument 'SCRIPT.py'"),
        (
            ["scirpt.py"],
            "error: The script scirpt.py is not there; near it: script.py.",
        ),
        (["."], "error: The script . is a folder."),
        (
            ["nothing.py"],
            "fix: Give the path of a script, then -- and its own arguments.",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["script.py"]


def test_a_program_that_a_script_starts_is_no_worker_of_the_run(tmp_path: Path) -> None:
    source = (
        "import os, subprocess, sys\n"
        "from meshwright.cluster.orders import current_orders\n"
        "print('worker', current_orders() is not None, flush=True)\n"
        "words = 'import os; print(os.environ.get(\"MESHWRIGHT_ORDERS\"))'\n"
        "subprocess.run([sys.executable, '-c', words], check=True)"
    )
    with launch(tmp_path, source) as launcher:
        assert "\nworker True\nNone\n" in launcher.end(0)


def test_a_run_that_was_begun_anew_is_gone_on_with_where_it_is(tmp_path: Path) -> None:
    with launch(tmp_path, "import sys; sys.exit(75)", "--resume", "never") as launcher:
        said = launcher.end(75)
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"script-\d{8}-\d{6}", folder.name)
    assert said.splitlines()[-1] == (
        "meshwright: to go on: meshwright train --resume never script.py "
        f"--run {folder} --resume auto"
    )
