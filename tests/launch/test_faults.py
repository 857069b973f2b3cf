"""Workers that die, hang or misbehave: who it was is said, and the run goes on."""

import os
import time
from pathlib import Path

from meshwright.cluster.orders import Orders
from meshwright.errors import RunError
from meshwright.launch import attempt, supervisor
from meshwright.launch.console import Console
from meshwright.launch.crew import Printed
from meshwright.launch.watch import Limits

import pytest

from staged_workers import END, is_alive, play

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def restarts_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.02)


STEPS = """
say(resumed=0 if attempt == 0 else 20)
say(section="step")
say(step=20)
say(saved=20)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_is_named_and_all_start_again_from_the_last_checkpoint(
    victim: int, tmp_path: Path, capsys: Capture
) -> None:  # faults.md rows 1 and 2
    began = time.monotonic()
    done = play(
        tmp_path,
        STEPS
        + f"""
if attempt == 0 and rank == {victim}:
    say(step=37)
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    wait_for_others()
"""
        + END,
        restarts=3,
    )
    assert done.outcome.how == "finished"
    assert done.outcome.restarts == 1
    out, said = capsys.readouterr()
    host = os.uname().nodename
    assert (
        f"Rank {victim} on {host} was killed by SIGKILL in a step after step 37" in said
    )
    assert "restart 1 of 3 in " in said
    assert "goes on after step 20" in out
    (failed,) = done.events("failed")
    assert isinstance(failed["time"], float)
    assert time.monotonic() - began < 30
    named_after = failed["time"] - float(str(done.events("attempt")[0]["time"]))
    assert named_after < 5


def test_a_worker_that_jax_ends_because_of_another_is_not_called_the_cause(
    tmp_path: Path,
) -> None:  # faults.md row 2: the others follow the coordinator within 0.15 s
    done = play(
        tmp_path,
        """
say(section="step")
say(step=3)
if rank == 1:
    os.abort()
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert done.outcome.exit_code == 6
    assert done.outcome.failure is not None
    assert done.outcome.failure.rank == 0
    assert "SIGKILL" in done.outcome.failure.received


def test_an_error_about_another_process_is_not_called_the_cause(
    tmp_path: Path,
) -> None:
    done = play(
        tmp_path,
        """
say(section="step")
if rank == 0:
    say(failure={"type": "JaxRuntimeError", "received": "gloo", "follows": True,
                 "exit_code": 1})
    os._exit(1)
time.sleep(0.2)
say(failure={"type": "ValueError", "received": "boom", "exit_code": 1})
os._exit(1)
""",
    )
    assert done.outcome.failure is not None
    assert done.outcome.failure.rank == 1
    assert "raised ValueError in its first step: boom." in done.outcome.failure.received


def test_a_stopped_worker_is_named_within_the_step_timeout_and_restarted(
    tmp_path: Path, capsys: Capture
) -> None:  # faults.md row 3
    began = time.monotonic()
    done = play(
        tmp_path,
        STEPS
        + """
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if attempt == 0:
    wait_for_others()
"""
        + END,
        restarts=1,
        limits=Limits(step=1),
    )
    assert done.outcome.how == "finished"
    said = capsys.readouterr().err
    assert "Rank 1 on " in said
    assert "did not go on in a step after step 20: no sign for 1 s" in said
    assert "it is stopped (SIGSTOP)" in said
    assert time.monotonic() - began < 1 + 5 + 5


def test_a_worker_that_is_stopped_in_its_script_is_found_too(
    tmp_path: Path,
) -> None:  # faults.md row 3
    source = "if attempt == 0: os.kill(os.getpid(), signal.SIGSTOP)"
    done = play(tmp_path, source + END, world=1, restarts=1, limits=Limits(step=0.5))
    assert done.outcome.how == "finished"
    (failed,) = done.events("failed")
    assert "in its script" in str(failed["received"])
    assert "stopped (SIGSTOP)" in str(failed["received"])


def test_a_hang_in_python_shows_the_stacks_of_all_and_names_the_one_that_did_not_come(
    tmp_path: Path, capsys: Capture
) -> None:  # faults.md row 4
    done = play(
        tmp_path,
        """
def on_train_batch_end():
    time.sleep(100)

say(section="step")
say(step=5)
on_train_batch_end() if rank == 1 else wait_for_others()
""",
        limits=Limits(step=0.5),
    )
    assert (done.outcome.how, done.outcome.exit_code) == ("failed", 7)
    failure = done.outcome.failure
    assert failure is not None
    assert failure.rank == 1
    assert "it is in on_train_batch_end" in failure.received
    assert failure.rule == (
        "Each part of a run has a time limit; --step-timeout is that of a step."
    )
    assert f"stacks of all ranks in {done.folder}/stacks" in failure.change
    assert "on_train_batch_end" in (done.folder / "stacks/0-1.txt").read_text()
    assert "/lib/jax/_src/array.py" in (done.folder / "stacks/0-0.txt").read_text()
    said = capsys.readouterr().err
    assert "[rank 0]" in said
    assert "[rank 1]" in said


def test_a_worker_that_holds_the_interpreter_s_lock_is_found_from_outside(
    tmp_path: Path,
) -> None:  # faults.md row 5
    done = play(
        tmp_path,
        """
import ctypes
say(section="step")
if attempt == 0 and rank == 0:
    ctypes.PyDLL(None).sleep(1000)  # the signal for the stacks wakes it up
    say(section="end")
if attempt == 0:
    wait_for_others()
"""
        + END,
        restarts=1,
        limits=Limits(step=0.5),
    )
    assert done.outcome.how == "finished"
    (failed,) = done.events("failed")
    assert failed["rank"] == 0
    assert failed["kind"] == "hang"
    assert "did not go on in its first step" in str(failed["received"])


def test_of_a_worker_that_cannot_write_its_stacks_the_system_is_asked(
    tmp_path: Path,
) -> None:  # faults.md row 5
    done = play(
        tmp_path,
        """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
say(section="step")
time.sleep(100)
""",
        world=1,
        limits=Limits(step=0.5),
    )
    (stacks,) = done.events("stacks")
    assert "It wrote no stacks. The system says: sleeping, system call " in str(stacks)


def test_a_rank_that_is_behind_is_the_one_that_did_not_come(tmp_path: Path) -> None:
    done = play(
        tmp_path,
        """
say(section="step")
say(step=5 if rank == 1 else 6)
time.sleep(100)
""",
        limits=Limits(step=0.5),
    )
    assert done.outcome.failure is not None
    assert done.outcome.failure.rank == 1
    assert "the others have finished step 6" in done.outcome.failure.received


def test_sections_have_limits_of_their_own_and_signs_of_life_count(
    tmp_path: Path,
) -> None:
    done = play(
        tmp_path,
        """
say(section="compile")
time.sleep(0.5)
say(section="step")
for _ in range(4):
    say(alive=True)
    time.sleep(0.15)
say(section="script")
time.sleep(0.5)
"""
        + END,
        world=1,
        limits=Limits(step=0.4, compile=5),
    )
    assert done.outcome.how == "finished"


@pytest.mark.parametrize(
    ("section", "limits"),
    [
        ("start", Limits(start=0.3)),
        ("compile", Limits(compile=0.3)),
        ("checkpoint", Limits(checkpoint=0.3)),
        ("end", Limits(end=0.3)),
    ],
)
def test_every_section_but_the_script_ends_some_time(
    section: str, limits: Limits, tmp_path: Path
) -> None:
    source = f"say(section={section!r})\ntime.sleep(100)"
    done = play(tmp_path, source, world=1, limits=limits)
    assert done.outcome.exit_code == 7


def test_a_worker_that_ends_its_script_early_is_not_waited_for(
    tmp_path: Path,
) -> None:  # faults.md row 10: sys.exit(0), which waits for the others in JAX
    done = play(
        tmp_path,
        """
say(section="step")
say(step=8)
if rank == 1:
    say(section="end")
    time.sleep(100)
wait_for_others()
""",
        limits=Limits(alone=0.5),
    )
    failure = done.outcome.failure
    assert failure is not None
    assert failure.received == (
        "Rank 1 came to the end of the script, and rank 0 waited for it in a step "
        "after step 8, for 0.5 s."
    )
    assert done.outcome.exit_code == 7


def test_a_worker_that_leaves_in_the_middle_of_a_step_has_not_ended_well(
    tmp_path: Path,
) -> None:  # faults.md row 10: os._exit(0)
    source = "say(section='step')\nos._exit(0) if rank == 1 else wait_for_others()"
    done = play(tmp_path, source)
    failure = done.outcome.failure
    assert failure is not None
    assert "Rank 1 on " in failure.received
    assert "ended with exit status 0 in its first step." in failure.received
    assert failure.rule == "A script ends by coming to its end in every process."
    assert "Look at the end of its output in " in failure.change
    assert done.outcome.exit_code == 6


def test_a_segmentation_fault_is_called_by_its_name(tmp_path: Path) -> None:
    # faults.md row 11
    done = play(
        tmp_path,
        "print('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)",
        world=1,
    )
    failure = done.outcome.failure
    assert failure is not None
    assert "was killed by SIGSEGV in its script; it held " in failure.received
    assert "out of memory" not in failure.received
    assert failure.rule == "The processes of a run go on together or not at all."
    assert failure.tail == ("last words\n",)


def test_a_crash_loop_ends_with_the_first_failure_as_its_headline(
    tmp_path: Path, capsys: Capture
) -> None:  # faults.md row 13
    done = play(
        tmp_path,
        """
words = "the disk is gone" if attempt == 0 else "cannot connect"
say(failure={"type": "OSError", "received": words, "exit_code": 1,
             "traceback": f"Traceback of {words}"})
sys.exit(1)
""",
        world=1,
        restarts=2,
    )
    assert (done.outcome.how, done.outcome.exit_code) == ("failed", 1)
    assert (done.outcome.restarts, done.outcome.failures) == (2, 3)
    assert done.outcome.failure is not None
    assert (
        "raised OSError in its script: the disk is gone."
        in done.outcome.failure.received
    )
    assert capsys.readouterr().err.count("Traceback of the disk is gone") == 1


def test_the_budget_comes_back_when_a_run_gets_further(tmp_path: Path) -> None:
    done = play(
        tmp_path,
        """
say(resumed=10 * attempt)
say(saved=10 * attempt + 10)
if attempt < 4:
    os.kill(os.getpid(), signal.SIGKILL)
"""
        + END,
        world=1,
        restarts=1,
    )
    assert done.outcome.how == "finished"
    assert done.outcome.restarts == 4


@pytest.mark.parametrize("code", [2, 3, 4, 5, 8])
def test_what_a_restart_cannot_mend_is_not_tried_again(
    code: int, tmp_path: Path
) -> None:
    done = play(
        tmp_path,
        f"""
say(failure={{"type": "SomeError", "received": "a", "rule": "b", "change": "c",
             "exit_code": {code}, "step": 4}})
sys.exit({code})
""",
        world=1,
        restarts=3,
    )
    failure = done.outcome.failure
    assert failure is not None
    assert (failure.received, failure.rule, failure.change) == ("a", "b", "c")
    assert (done.outcome.exit_code, done.outcome.restarts) == (code, 0)


def test_rolling_back_is_tried_once_for_each_step(tmp_path: Path) -> None:
    done = play(
        tmp_path,
        """
say(failure={"type": "NumericError", "received": "NaN", "rule": "b", "change": "c",
             "exit_code": 8, "step": 4 if attempt == 0 else 9})
sys.exit(8)
""",
        world=1,
        restarts=5,
        orders=Orders(run="", on_nan="rollback"),
    )
    assert (done.outcome.exit_code, done.outcome.restarts) == (8, 2)


def test_a_worker_that_was_asked_to_stop_takes_the_others_along(tmp_path: Path) -> None:
    # faults.md row 6: SIGTERM to one of them
    done = play(
        tmp_path,
        """
signal.signal(signal.SIGTERM, save_and_exit)
say(section="step")
say(step=7)
if rank == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep(100)
""",
    )
    assert (done.outcome.how, done.outcome.exit_code) == ("preempted", 75)
    assert (done.outcome.step, done.outcome.saved) == (7, 7)


def test_what_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    done = play(
        tmp_path,
        """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(child.pid, apart.pid, flush=True)
subprocess.run(["sh", "-c", "sleep 1000 & echo $!"])  # its parent is gone
say(section="step")
time.sleep(100)
""",
        world=1,
        limits=Limits(step=0.5),
    )
    pids = [int(pid) for pid in done.log(0, 0).split()]
    assert len(pids) == 3
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_slow_process_is_named_once(tmp_path: Path, capsys: Capture) -> None:
    done = play(
        tmp_path,
        """
for step in range(60):
    say(section="step")
    say(step=step, host=0.5 if rank == 1 else 0.05)
    time.sleep(0.002)
time.sleep(0.3)
"""
        + END,
    )
    (event,) = done.events("straggler")
    said = capsys.readouterr().err
    host = os.uname().nodename
    words = (
        f"rank 1 on {host} is slower than the others, which wait for it: 0.5 s of its "
    )
    assert words in said
    assert event["rank"] == 1


def test_a_run_whose_folder_was_deleted_says_so(tmp_path: Path) -> None:
    # faults.md row 36
    source = """
import shutil
shutil.rmtree(orders["run"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(RunError) as caught:
        play(tmp_path, source, world=1, restarts=1)
    assert str(caught.value).splitlines() == [
        f"The run folder {tmp_path}/run is gone.",
        "A run keeps its checkpoints there; without them it cannot go on, and what it "
        "has done is lost when its processes end.",
        "Leave the folder where it is until the run has ended, and start anew.",
    ]


def test_a_launcher_that_could_not_look_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # Ctrl-Z, or a job that a scheduler suspends
    monkeypatch.setattr(attempt, "_GAP_SECONDS", 0.2)
    shown = Console.show

    def show_and_sleep(console: Console, printed: Printed) -> None:
        shown(console, printed)
        time.sleep(1.2)

    monkeypatch.setattr(Console, "show", show_and_sleep)
    source = "say(section='step')\ntime.sleep(0.1)\nprint('now', flush=True)\n"
    source += "time.sleep(1.4)"
    done = play(tmp_path, source + END, world=1, limits=Limits(step=1))
    assert done.outcome.how == "finished"


def test_whoever_is_asked_to_stop_does_not_start_again(
    tmp_path: Path, capsys: Capture
) -> None:
    source = """
os.kill(os.getppid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = play(tmp_path, source, world=1, restarts=3)
    assert (done.outcome.how, done.outcome.exit_code) == ("preempted", 75)
    assert done.outcome.restarts == 0
    assert "restart" not in capsys.readouterr().err
