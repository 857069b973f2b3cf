"""Faults on purpose: how they are spelled, and that each strikes once."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from meshwright.cluster.faults import Injector, flip_bit, parse_faults
from meshwright.errors import ConfigurationError

import pytest


def test_faults_are_spelled_as_they_are_printed() -> None:
    text = "kill@rank=1,step=37; slow:2.5x@step=3;nan"
    found = parse_faults(text)
    assert [str(fault) for fault in found] == [
        "kill@rank=1,step=37",
        "slow:2.5x@rank=0,step=3",
        "nan@rank=0,step=1",
    ]
    assert parse_faults("; ".join(map(str, found))) == found
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    "text",
    ["explode", "kill@", "kill@step", "kill@step=-1", "kill@where=3", "slow", "nan:2x"],
)
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_faults(f"kill; {text}")
    assert str(caught.value).split("\n") == [
        f"MESHWRIGHT_FAULT received {text!r}.",
        "A fault is one of kill, hang, gil, slow, nan, raise, disk-full, corrupt-last, "
        "term, where slow has a factor (slow:3x), then @ and its rank and step; "
        "several are divided by ;.",
        "Write, for example, MESHWRIGHT_FAULT='kill@rank=1,step=37'.",
    ]


def test_a_fault_strikes_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    faults = parse_faults("raise@step=7")
    injector = Injector(faults, 0, tmp_path)
    assert not injector.strike(1, 6)
    with pytest.raises(RuntimeError, match="injected fault: raise@rank=0,step=7"):
        injector.strike(7, 12)
    assert not injector.strike(7, 12)
    assert not Injector(faults, 0, tmp_path).strike(7, 12)
    (line,) = (tmp_path / "faults.jsonl").read_text().splitlines()
    assert json.loads(line)["fault"] == "raise@rank=0,step=7"


def test_a_fault_strikes_its_own_rank(tmp_path: Path) -> None:
    faults = parse_faults("raise@rank=1,step=1")
    assert not Injector(faults, 0, tmp_path).strike(1, 1)
    with pytest.raises(RuntimeError):
        Injector(faults, 1, tmp_path).strike(1, 1)


def test_weights_become_nan_in_all_processes(tmp_path: Path) -> None:
    faults = parse_faults("nan@rank=1,step=3")
    injectors = [Injector(faults, rank, tmp_path) for rank in range(3)]
    assert [each.strike(3, 3) for each in injectors] == [True] * 3
    assert len((tmp_path / "faults.jsonl").read_text().splitlines()) == 1


def test_a_slow_host_takes_as_many_times_as_long(tmp_path: Path) -> None:
    injector = Injector(parse_faults("slow:3x@step=2"), 0, tmp_path)
    began = time.monotonic()
    injector.strike(1, 1)
    injector.drag(10)
    injector.strike(2, 2)
    injector.drag(0.05)
    assert time.monotonic() - began >= 0.1


def test_no_file_grows_while_the_disk_is_full(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    injector = Injector(parse_faults("disk-full"), 0, tmp_path)
    injector.strike(1, 1)
    try:
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "large").write_bytes(bytes(10_000))
    finally:
        injector.make_room()
    (tmp_path / "large").write_bytes(bytes(10_000))
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_one_bit_of_the_newest_checkpoint_is_flipped(tmp_path: Path) -> None:
    flip_bit(tmp_path)  # there is none yet, which is no reason to fail
    for step in (9, 10):
        (tmp_path / str(step)).mkdir()
        (tmp_path / str(step) / "array").write_bytes(bytes(100))
        (tmp_path / str(step) / "small").write_bytes(b"small")
    flip_bit(tmp_path)
    assert sum((tmp_path / "10" / "array").read_bytes()) == 1
    assert sum((tmp_path / "9" / "array").read_bytes()) == 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "number"), [("kill", signal.SIGKILL), ("term", signal.SIGTERM)]
)
def test_a_process_kills_itself(kind: str, number: int, tmp_path: Path) -> None:
    source = (
        "import sys\nfrom pathlib import Path\n"
        "from meshwright.cluster.faults import Injector, parse_faults\n"
        f"Injector(parse_faults({kind!r}), 0, Path(sys.argv[1])).strike(1, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], timeout=60)
    assert done.returncode == -number


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["hang", "gil"])
def test_a_process_hangs_for_good(kind: str, tmp_path: Path) -> None:
    source = (
        "import faulthandler, signal, sys\nfrom pathlib import Path\n"
        "from meshwright.cluster.faults import Injector, parse_faults\n"
        "faulthandler.register(signal.SIGUSR1)\n"
        f"Injector(parse_faults({kind!r}), 0, Path(sys.argv[1])).strike(1, 1)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "faults.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGUSR1)  # a look at its stacks does not wake it
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
    finally:
        child.kill()
        child.wait()
