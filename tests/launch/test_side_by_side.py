"""Several scripts by one command: what each sees, how they end, what is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from meshwright.cli.main import main
from meshwright.errors import ConfigurationError, RunError
from meshwright.launch import shares
from meshwright.launch.console import Console
from meshwright.launch.side_by_side import parse_commands, run_each
from meshwright.launch.stop import StopRequests

import pytest

from staged_workers import is_alive

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples/two_scripts"

MEETS = """
import os, pathlib, sys, time
own, other = sys.argv[1:]
pathlib.Path(own).write_text(" ".join(map(str, sorted(os.sched_getaffinity(0)))))
while not pathlib.Path(other).exists():
    time.sleep(0.01)
print("met", other)
"""
FAILS = "import sys; print('about to fail', file=sys.stderr); sys.exit(3)"
GOES_ON = """
import os, time
text = lambda: os.path.exists("pid") and open("pid").read()
while not text() or os.path.exists(f"/proc/{text()}"):  # until its end was noticed
    time.sleep(0.01)
print("done")
"""
WAITS = """
import os, signal, sys, time
{handling}
print("pid", os.getpid(), flush=True)
time.sleep(300)
"""


class Command:
    """`meshwright each` in a process of its own."""

    def __init__(self, folder: Path, *scripts: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-Pm", "meshwright.cli.main", "each", *scripts],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def pids(self, count: int) -> list[int]:
        """What so many scripts that wait say of themselves."""
        assert self.process.stdout is not None
        found: list[int] = []
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, "it ended"
            found += [int(line.split()[-1])] if "pid" in line.split() else []
        return found

    def end(self, status: int) -> str:
        said, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == status, said
        return said


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Command]:
    (tmp_path / "a.py").write_text(WAITS.format(handling=""))
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    (tmp_path / "b.py").write_text(WAITS.format(handling=ignoring))
    command = Command(tmp_path, "a.py", "b.py")
    yield command
    command.process.kill()
    command.process.communicate()


def test_scripts_run_at_the_same_time_each_on_cores_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.py").write_text(MEETS)
    with pytest.raises(SystemExit) as stop:
        main(["each", "a.py 1 2", "b.py 2 1"])
    assert stop.value.code == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("meshwright: [a] is a.py 1 2 on ")
    assert {"[a] met 2", "[b] met 1"} <= set(lines)
    assert lines[-1] == "meshwright: all 2 scripts have ended well"
    cores = [set(Path(name).read_text().split()) for name in "12"]
    if len(os.sched_getaffinity(0)) > 1:
        assert cores[0].isdisjoint(cores[1])


def test_each_sees_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoGpus:
        gpus = (0, 1)

    monkeypatch.setattr(shares, "read_nvml", TwoGpus)
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    sees = tmp_path / "sees.py"
    sees.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    files = [tmp_path / name for name in "ab"]
    commands = [[str(sees), str(file)] for file in files]
    console = Console(is_quiet=True, names=["a", "b", "c"])
    with StopRequests() as stop:
        ends = run_each(commands, console, stop)
        assert sorted(end.share for end in ends) == ["GPU 0", "GPU 1"]
        with pytest.raises(ConfigurationError) as caught:
            run_each([*commands, commands[0]], console, stop)
    assert [file.read_text() for file in files] == ["0", "1"]
    assert str(caught.value).split("\n") == [
        "each received 3 scripts. 3 processes were asked for on a host with 2 visible "
        "GPUs (0, 1).",
        "Every script gets as many GPUs as the others, and none is shared.",
        "Run another number of scripts, or make other GPUs visible with "
        "CUDA_VISIBLE_DEVICES; JAX_PLATFORMS=cpu computes on the CPU.",
    ]


def test_one_that_fails_is_the_headline_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(
        f"import os; open('pid', 'w').write(str(os.getpid()));{FAILS}"
    )
    Path("goes_on.py").write_text(GOES_ON)
    with pytest.raises(SystemExit) as stop:
        main(["each", "fails.py", "goes_on.py"])
    assert stop.value.code == 3
    out, err = capfd.readouterr()
    assert "[goes_on] done" in out.splitlines()
    said = err.splitlines()
    assert said[0] == "[fails] about to fail"
    assert said[1] == "meshwright: [fails] ended with exit status 3; the others go on"
    error, rule, fix = said[-3:]
    assert error.startswith("error: fails (fails.py) on ")
    assert " ended with exit status 3 after " in error
    assert rule == (
        "rule: scripts side by side have nothing to do with each other, so the others "
        "went on to their end (1 of 2 ended well)"
    )
    assert fix == (
        "fix: look at the lines above that begin with [fails]; to run it alone: python "
        "fails.py"
    )


def test_all_that_failed_are_named_with_the_signal_that_ended_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("same.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(SystemExit) as stop:
        main(["each", "same.py", "same.py"])
    assert stop.value.code == 128 + 9
    error = capfd.readouterr().err.splitlines()[-3]
    assert "error: same " in error
    assert error.count("was ended by SIGKILL") == 2


def test_json_tells_of_every_script_and_nothing_else_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text(FAILS)
    with pytest.raises(SystemExit) as stop:
        main(["each", "--json", "fails.py"])
    assert stop.value.code == 3
    out, err = capfd.readouterr()
    (told,) = json.loads(out)["scripts"]
    assert (told["name"], told["status"], err) == ("fails", 3, "")


def test_ctrl_c_is_passed_on_and_a_second_one_ends_what_does_not_listen(
    waiting: Command,
) -> None:
    listens, ignores = sorted(waiting.pids(2), key=_ignores_interrupts)
    waiting.process.send_signal(signal.SIGINT)
    while is_alive(listens):
        time.sleep(0.02)
    assert is_alive(ignores)
    waiting.process.send_signal(signal.SIGINT)
    said = waiting.end(130)
    assert "KeyboardInterrupt" in said, "the script was interrupted as by Ctrl-C"
    assert said.endswith("meshwright: stopped; 2 of 2 scripts did not end well\n")
    assert not is_alive(ignores)


def _ignores_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if "SigIgn" in line]
    return bool(int(mask, 16) & 1 << (signal.SIGINT - 1))


def test_a_command_that_is_killed_leaves_no_script_behind(waiting: Command) -> None:
    pids = waiting.pids(2)
    waiting.process.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, pids))


def test_a_script_that_is_not_there_stops_all_before_they_start(
    tmp_path: Path,
) -> None:
    there = tmp_path / "my script.py"
    there.touch()
    assert parse_commands([str(there), f"'{there}' -n 3"]) == [
        [str(there)],
        [str(there), "-n", "3"],
    ]
    with pytest.raises(RunError) as caught:
        parse_commands([str(there), "gone.py --fast"])
    assert str(caught.value).split("\n") == [
        "each received 'gone.py --fast', and 'gone.py' is no file.",
        "Every word is a script, or a script with its arguments in quotes.",
        "Write, for example: meshwright each a.py 'b.py --epochs 3'",
    ]


def test_the_example_trains_two_models_on_two_devices(tmp_path: Path) -> None:
    scripts = [str(EXAMPLES / name) for name in ("digits.py", "waves.py")]
    said = Command(tmp_path, *scripts).end(0)
    assert "[digits] accuracy on new digits: 0." in said
    assert "[waves] mean squared error: 0." in said
    assert said.count("sees /device:CPU:0") == 2
