"""Who works on which trial, when several launchers do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from meshwright.trials.ledger import Ledger, Outcome, _is_gone, _owner
from meshwright.trials.storage import Database

import pytest

optuna = pytest.importorskip("optuna")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database(f"sqlite:///{tmp_path}/study.db") as found:
        yield found


def ledger_of(database: Database, total: int, grace: float = 1000.0) -> Ledger:
    study = optuna.create_study(
        study_name="s", storage=database.storage, load_if_exists=True
    )
    return Ledger(
        study,
        database,
        total=total,
        retries=1,
        grace=grace,
        folder=Path(database.storage.url.removeprefix("sqlite:///")).parent,
        is_alone=False,
        say=lambda text: None,
    )


def test_of_two_launchers_that_want_the_last_trial_one_gets_it(
    database: Database,
) -> None:
    one, other = (ledger_of(database, 1) for _ in range(2))
    seen = other._points
    other._points = list  # type: ignore[method-assign]  # it has looked before
    first = one.claim("GPU:0")
    assert first is not None
    assert other.claim("GPU:0") is None
    other._points = seen  # type: ignore[method-assign]
    one.settle(first, Outcome("complete", 1.0))
    for ledger in (one, other):
        assert [r.number for r in ledger.records()] == [0], "no trial too many"
        assert ledger.is_done()
    grown = ledger_of(database, 2)
    assert not grown.is_done(), "the one that was too many does not count"


def test_a_result_that_comes_too_late_changes_nothing(database: Database) -> None:
    slow, quick = ledger_of(database, 1), ledger_of(database, 1, grace=-1.0)
    trial = slow.claim("GPU:0")
    assert trial is not None
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr("meshwright:owner", "elsewhere/pid/1/0.0")
    quick.take_over()  # looks for the first time
    quick.take_over()
    again = quick.claim("GPU:1")
    assert again is not None
    assert again.params == trial.params
    quick.settle(again, Outcome("complete", 2.0))
    slow.beat()
    slow.settle(trial, Outcome("complete", 1.0))
    (record,) = slow.records()
    assert (record.value, record.attempts, record.device) == (2.0, 2, "GPU:1")
    assert record.because == "elsewhere showed no sign of life for -1 s"


def test_a_launcher_of_this_host_that_has_ended_is_known_to_be_gone() -> None:
    host, space, pid, began = _owner().rsplit("/", 3)
    assert pid == str(os.getpid())
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not _is_gone(_owner())
    assert _is_gone("/".join([host, space, done.stdout.strip(), began]))
    assert _is_gone("/".join([host, space, pid, "1.0"])), "the number came again"
    assert not _is_gone("/".join([host, "another", done.stdout.strip(), began]))
    assert not _is_gone("/".join(["elsewhere", space, "1", began]))
