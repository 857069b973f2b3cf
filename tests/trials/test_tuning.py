"""`mw.tune` with real processes: what it finds, and what it survives."""

import functools
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.errors import RunError, StudyError, TrialError
from meshwright.launch.run_folder import open_run
from meshwright.trials import storage

import pytest

from conftest import Run

pytestmark = pytest.mark.processes

HERE = Path(__file__).with_name("objectives.py")
Tune = Callable[..., Any]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Searches in a folder of its own, one trial at a time if nothing is said."""
    monkeypatch.chdir(tmp_path)

    def run(objective: str, n_trials: int, **wishes: Any) -> Any:
        wishes = {"devices": ["CPU:0"], "seed": 0, **wishes}
        return mw.tune(f"{HERE}:{objective}", n_trials, **wishes)

    return run


def line_of(words: str) -> int:
    """Where something stands in the file of objectives."""
    lines = HERE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


def asked() -> list[float]:
    return [float(line) for line in Path("asked").read_text().split()]


def logs_of(found: Any) -> str:
    return "".join(p.read_text() for p in sorted((found.folder / "logs").iterdir()))


def test_every_trial_has_a_process_and_a_device_of_its_own(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "MESHWRIGHT_VIRTUAL,CUDA_VISIBLE_DEVICES,MESHWRIGHT_CHANNEL"
    monkeypatch.setenv("SHOW", f"{names},MESHWRIGHT_ORDERS")
    found = tune("square", 4, devices=["CPU:0", "CPU:3"], name="squares")
    assert [t.number for t in found.trials] == [0, 1, 2, 3]
    assert [t.state for t in found.trials] == ["complete"] * 4
    assert all(t.value == t.params["x"] ** 2 for t in found.trials)
    assert found.best_value == min(t.value for t in found.trials)
    assert found.best_params == found.best.params
    pids = {t.user_attrs["pid"] for t in found.trials}
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert {t.device for t in found.trials} == {"CPU:0", "CPU:3"}
    cores = {tuple(t.user_attrs["cores"]) for t in found.trials}
    here = sorted(os.sched_getaffinity(0))
    if len(here) >= 2:
        assert len(cores) == 2
        assert not set.intersection(*map(set, cores)), "each has its own cores"
    assert [t.user_attrs["sees"] for t in found.trials] == [
        {
            "MESHWRIGHT_VIRTUAL": "CPU:1",
            "CUDA_VISIBLE_DEVICES": "",
            "MESHWRIGHT_CHANNEL": None,
            "MESHWRIGHT_ORDERS": None,
        }
    ] * 4
    assert found.folder == Path("runs/squares").absolute()
    assert found.report.is_file()
    as_json = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert as_json["best_value"] == found.best_value
    assert len(as_json["trials"]) == 4
    assert "study squares (minimize): 4 complete" in str(found)


def test_a_trial_that_raises_has_failed_and_the_others_go_on(
    tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tune("crashing", 3)
    assert [t.state for t in found.trials] == ["complete", "failed", "complete"]
    failed = found.trials[1]
    line = line_of('"out of paper"')
    assert failed.because == f"RuntimeError: out of paper (objectives.py:{line})"
    assert failed.attempts == 1
    assert failed.params, "what it was is kept"
    assert "almost there" in logs_of(found)
    assert 'raise RuntimeError("out of paper")' in logs_of(found)
    assert "failed: RuntimeError: out of paper" in capsys.readouterr().out


def test_an_objective_that_always_raises_ends_the_search_and_is_tried_again_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "job.py"
    code = "def objective(trial):\n    x = trial.suggest_float('x', 0, 1)\n"
    script.write_text(f"{code}    raise RuntimeError('no luck')\n")
    call = functools.partial(mw.tune, f"{script}:objective", devices=["CPU:0"])
    with pytest.raises(TrialError) as failed:
        call(9)
    assert str(failed.value).splitlines() == [
        "job.py:objective failed in all 5 trials: RuntimeError: no luck (job.py:3).",
        "A search goes on past trials that fail, as long as some do not.",
        "Repair the objective and call again; the whole errors are in "
        f"{tmp_path}/runs/job-objective/logs.",
    ]
    assert failed.value.exit_code == 1
    script.write_text(f"{code}    return x\n")
    found = call(6)
    assert [t.state for t in found.trials] == ["complete"] * 6
    assert [t.number for t in found.trials] == [0, 1, 2, 3, 4, 10], "10 attempts"


def test_a_killed_trial_is_tried_again_with_the_same_parameters(
    tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tune("killed_once", 3)
    assert [t.state for t in found.trials] == ["complete"] * 3
    assert found.trials[0].attempts == 2
    first, second, *_ = asked()
    assert first == second == found.trials[0].value
    assert (
        "lost: its process was killed (SIGKILL); once more" in capsys.readouterr().out
    )


def test_a_trial_is_not_tried_more_often_than_was_said(tune: Tune) -> None:
    found = tune("leaves", 3, retries=1)
    assert [t.state for t in found.trials] == ["complete", "failed", "complete"]
    assert found.trials[1].attempts == 2
    assert found.trials[1].because == (
        "its process ended with status 3 and told nothing"
    )


def test_a_trial_that_hangs_is_ended_and_tried_again(tune: Tune) -> None:
    found = tune("hangs_once", 2, trial_timeout=3.0)
    assert [t.state for t in found.trials] == ["complete"] * 2
    first, second, *_ = asked()
    assert first == second
    assert found.trials[0].because == (
        'it took longer than 3 s; it was at File "objectives.py", line '
        f"{line_of('time.sleep(1000)')} in hangs_once"
    )


def test_values_of_numpy_and_tuples_come_and_go(tune: Tune) -> None:
    found = tune("any_values", 2)
    assert [t.because for t in found.trials] == ["", ""]
    for trial in found.trials:
        assert trial.reports == {3: pytest.approx(trial.value)}
        assert trial.user_attrs == {"half": 0.5}
    said = logs_of(found)
    assert "A trial in a process of its own has no 'study'; it has number, " in said
    assert " (a object) does not fit into JSON" in said
    assert json.dumps(found.to_json(), allow_nan=False)


def test_what_is_no_number_fails_and_the_rest_counts(tune: Tune) -> None:
    found = tune("not_numbers", 4)
    assert [t.because for t in found.trials] == [
        "it returned nan",
        "it returned 'good' (a str), not a number",
        "it returned None (a NoneType), not a number",
        "",
    ]
    assert found.best_value == 1.0
    assert json.dumps(found.to_json(), allow_nan=False)


def test_nothing_but_nan_is_an_error_of_numbers(tune: Tune) -> None:
    with pytest.raises(TrialError, match="failed in all 2 trials: it returned nan"):
        tune("always_nan", 2)
    with pytest.raises(TrialError) as again:
        tune("always_nan", 2)
    assert again.value.exit_code == 8


def test_an_objective_that_asks_for_nothing_is_refused(tune: Tune) -> None:
    with pytest.raises(TrialError) as refused:
        tune("nothing_to_search", 10)
    assert str(refused.value).splitlines() == [
        "Trial 0 of objectives.py:nothing_to_search asked for no parameter.",
        "A search varies at least one parameter; without any, all trials are one.",
        "Let the objective call trial.suggest_float, suggest_int or "
        "suggest_categorical.",
    ]


def test_an_empty_choice_is_told_with_its_line(tune: Tune) -> None:
    with pytest.raises(TrialError, match=r"ValueError: .*choices.*objectives\.py:\d+"):
        tune("empty_choice", 1)


def test_a_trial_that_is_not_worth_it_is_pruned(tune: Tune) -> None:
    found = tune("pruned", 6)
    assert [t.state for t in found.trials] == ["complete"] * 5 + ["pruned"]
    last = found.trials[-1]
    assert last.value > 100
    assert last.reports == {0: last.value}
    assert found.count("pruned") == 1


def test_the_same_call_goes_on_until_the_study_has_its_trials(
    tune: Tune, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tune("plain", 2)
    more = tune("plain", 4)
    assert [t.to_json() for t in more.trials[:2]] == [t.to_json() for t in first.trials]
    assert len({t.params["x"] for t in more.trials}) == 4
    assert "goes on after the 2 trials that have ended" in capsys.readouterr().out
    assert tune("plain", 4).trials == more.trials
    assert "there is nothing to do" in capsys.readouterr().out
    again = tune("plain", 2, name="again")
    assert [t.params for t in again.trials] == [t.params for t in first.trials]


def test_a_study_of_the_same_name_with_another_direction_or_objective_is_refused(
    tune: Tune,
) -> None:
    before = tune("plain", 1, name="one")
    with pytest.raises(StudyError) as direction:
        tune("plain", 1, name="one", direction="maximize")
    assert direction.value.received == (
        f"Study 'one' in sqlite:///{before.folder}/study.db is to minimize, not to "
        "maximize."
    )
    assert "direction='minimize', or another name" in direction.value.change
    with pytest.raises(StudyError, match=r"is of objectives.py:plain, not of .*:other"):
        tune("other", 1, name="one")
    assert tune("plain", 1, name="one").trials == before.trials, "nothing is lost"


def test_a_study_whose_objective_searches_another_space_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "job.py"

    def write(*asks: str) -> None:
        lines = [f"    trial.suggest_{ask}" for ask in asks]
        body = "\n".join(["def objective(trial):", *lines, "    return 1.0"])
        script.write_text(f"{body}\n")

    def call(n_trials: int) -> Any:
        return mw.tune(f"{script}:objective", n_trials, devices=["CPU:0"])

    both = ("float('lr', 0, 1)", "categorical('act', ['a', 'b'])")
    write(*both)
    call(1)
    refusals = [
        (
            ["float('lr', 0, 2)"],
            "asks for lr in 0.0 ... 2.0; in study 'job-objective' it is in 0.0 ... 1.0",
        ),
        (
            ["float('rate', 0, 1)"],
            "asks for 'rate'; the trials of study 'job-objective' have: act, lr",
        ),
        (
            [both[0], "categorical('act', ['a', 'c'])"],
            "asks for act in one of ['a', 'c']; in study 'job-objective' it is in one "
            "of ['a', 'b']",
        ),
        (
            [both[0]],
            "asked for lr and not for act, as all trials of study 'job-objective' did",
        ),
    ]
    for asks, text in refusals:
        write(*asks)
        with pytest.raises(StudyError) as refused:
            call(2)
        assert refused.value.received == f"The objective {text}."
    write(*both)
    found = call(2)
    assert [t.state for t in found.trials] == ["complete"] * 2


def test_an_objective_that_varies_its_bounds_goes_on_with_its_own_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "job.py"
    script.write_text(
        "def objective(trial):\n"
        "    return trial.suggest_int('n', 0, trial.number + 1)\n"
    )
    for n_trials in (1, 3):
        found = mw.tune(f"{script}:objective", n_trials, devices=["CPU:0"])
    assert found.count("complete") == 3


def test_a_database_that_is_locked_is_told_and_nothing_is_touched(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tune("plain", 1)
    monkeypatch.setattr(storage, "OPENING_SECONDS", 0.0)
    monkeypatch.setattr(storage, "_CONNECT_SECONDS", 0.1)
    holder = sqlite3.connect(found.folder / "study.db")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StudyError) as locked:
        tune("plain", 2)
    holder.close()
    error = locked.value
    assert (
        "cannot be used (0 s): OperationalError: database is locked" in error.received
    )
    assert error.rule == (
        "A study is kept in a database that answers. The study was not touched."
    )
    assert error.change == (
        "Close the program that holds it, or give another one with storage=."
    )
    assert tune("plain", 1).trials == found.trials


class Holder(threading.Thread):
    """Locks the database of `counted` while its first trial is about to end.

    Attributes:
        may_end: Lets go of the database.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self._folder = Path.cwd()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while not (self._folder / "at-0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        file = self._folder / "runs/objectives-counted/study.db"
        held = sqlite3.connect(file, timeout=30)
        held.execute("BEGIN EXCLUSIVE")
        (self._folder / "go").touch()
        self.may_end.wait(60)
        held.close()


def test_a_database_that_is_away_for_a_while_loses_nothing(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = Holder()
    monkeypatch.setattr(storage, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(storage, "_pause", holder.may_end.set)
    holder.start()
    found = tune("counted", 2)
    holder.join()
    assert found.count("complete") == 2
    assert len(asked()) == 2
    said = capsys.readouterr().out
    assert "the database does not answer: OperationalError: database is locked" in said
    assert "the database answers again" in said


def test_a_result_that_could_not_be_written_down_is_written_down_later(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holder = Holder()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_CONNECT_SECONDS", 0.1)
        patch.setattr(storage, "PATIENCE_SECONDS", 0.0)
        holder.start()
        with pytest.raises(StudyError, match="Nothing is lost: trials that ended are"):
            tune("counted", 1)
        holder.may_end.set()
        holder.join()
    found = tune("counted", 1)
    assert found.trials[0].value == asked()[0]
    assert len(asked()) == 1, "it did not run again"
    assert "trial 0 had ended, and is written down now" in capsys.readouterr().out


def test_a_database_that_cannot_be_reached_is_told_without_its_password(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "OPENING_SECONDS", 0.0)
    with pytest.raises(StudyError) as away:
        tune("plain", 1, storage="postgresql://me:hush@127.0.0.1:1/studies")
    assert "postgresql://***@127.0.0.1:1/studies cannot be used" in away.value.received
    assert "hush" not in str(away.value)
    assert away.value.change == (
        "Start it, or give the URL of one that can be reached."
    )
    with pytest.raises(StudyError, match="Install its driver"):
        tune("plain", 1, storage="nosuch://here")


def test_a_page_that_cannot_be_written_ends_no_search(
    tune: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/report.html").mkdir(parents=True)
    (tmp_path / "run/results.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "run/config.json").write_text("{}")
    found = tune("plain", 1, run=tmp_path / "run")
    assert found.count("complete") == 1
    said = capsys.readouterr().out
    assert "report.html was not written: " in said
    assert "results.jsonl was not written: " in said


def test_a_run_folder_that_is_in_use_is_refused(tune: Tune, tmp_path: Path) -> None:
    with open_run(tmp_path / "runs/busy"), pytest.raises(RunError, match="is in use"):
        tune("plain", 1, name="busy")


def test_what_cannot_be_meant_is_refused_before_anything_starts(
    tune: Tune, tmp_path: Path
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n_trials": 0}, "n_trials received 0.\nA study has one trial at least."),
        ({"direction": "up"}, "direction received 'up'.\nA value is to be made small"),
        ({"retries": -1}, "retries received -1.\nIt is how often a trial is tried"),
        ({"trial_timeout": 0.0}, "trial_timeout received 0.0.\nIt is a number of sec"),
        ({"heartbeat": -1.0}, "heartbeat received -1.0.\nIt is a number of seconds"),
        ({"name": "a/b"}, "name received 'a/b'.\nA study's name is also that of its"),
    ]
    for wish, text in wrong:
        with pytest.raises(StudyError) as refused:
            tune("plain", **{"n_trials": 1, **wish})
        assert str(refused.value).startswith(text)
        assert "\nWrite " in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_without_optuna_the_extra_is_named(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(StudyError) as missing:
        tune("plain", 1)
    assert missing.value.received.startswith("Optuna cannot be imported: ")
    assert missing.value.change == (
        "Install the extra: pip install 'meshwright[tune]'."
    )


def test_a_script_tunes_its_own_function_without_a_guard(run_script: Run) -> None:
    done = run_script(
        "import meshwright as mw\n"
        "print('begun')\n"
        "SHIFT = 10\n"
        "def objective(trial):\n"
        "    return trial.suggest_float('x', 0, 1) + SHIFT\n"
        "found = mw.tune(objective, 1, devices=1, name='one')\n"
        "assert found.best_value >= 10, found\n"
        "print('ended')\n"
    )
    assert done.stdout.count("begun") == 1, "trials print into their logs"
    assert done.stdout.count("ended") == 1


def test_objects_that_can_be_pickled_are_objectives_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE.parent)
    from objectives import Shifted

    found = mw.tune(Shifted(5.0), 1, devices=["CPU:0"], name="shifted")
    assert found.best_value >= 5.0
