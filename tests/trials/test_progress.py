"""What people see of a search."""

import io
from types import SimpleNamespace
from typing import Any

from meshwright.launch.console import Console
from meshwright.trials.ledger import Outcome
from meshwright.trials.progress import Progress
from meshwright.trials.results import TrialRecord

import pytest
from rich.console import Console as RichConsole


def running(number: int, device: str) -> Any:
    return SimpleNamespace(
        trial=SimpleNamespace(number=number),
        slot=SimpleNamespace(device=device),
        seconds=12.0,
        reported=0.25,
    )


def ledger(*records: TrialRecord) -> Any:
    return SimpleNamespace(
        records=lambda: records, number_of=lambda trial: trial.number
    )


def test_a_terminal_has_a_table_of_what_runs_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    shown = RichConsole(file=screen, force_terminal=True, width=90)
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr("rich.get_console", lambda: shown)
    monkeypatch.setattr("rich.live.get_console", lambda: shown)
    clock = iter(range(0, 1000, 10))
    times = SimpleNamespace(monotonic=lambda: float(next(clock)))
    monkeypatch.setattr("meshwright.trials.progress.time", times)
    done = TrialRecord(number=0, state="complete", value=0.5, params={"[lr]": 0.1})
    with Progress(Console(), "sweep", 4, "minimize") as progress:
        progress.begin(ledger())
        progress.end(running(0, "GPU:0"), Outcome("complete", 0.5), ledger(done))
        progress.show([running(1, "GPU:0"), running(2, "GPU:1")])
    words = screen.getvalue()
    assert "trial 0 on GPU:0 (12.0 s): 0.5; 1 of 4, best 0.5 (trial 0)" in words
    assert "sweep: 1 of 4, best 0.5 (trial 0), about" in words
    assert "left" in words
    assert "best: 0.5 of trial 0 ([lr]=0.1)" in words
    assert "GPU:1" in words
    assert "0.25" in words


def test_without_a_terminal_there_is_a_line_for_each_trial(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost = TrialRecord(number=3, state="waiting", because="its process was killed")
    with Progress(Console(), "sweep", 4, "maximize") as progress:
        progress.begin(ledger(lost))
        outcome = Outcome("lost", because="its process was killed")
        progress.end(running(3, "core 1"), outcome, ledger(lost), again=True)
        progress.show([running(3, "core 1")])
        progress.end(running(1, "core 0"), Outcome("pruned"), ledger(lost))
    assert capsys.readouterr().out.splitlines() == [
        "meshwright: trial 3 on core 1 (12.0 s): lost: its process was killed; once "
        "more; 0 of 4",
        "meshwright: trial 1 on core 0 (12.0 s): pruned; 0 of 4",
    ]
