"""The file with what a run measured."""

import json
from pathlib import Path

from meshwright.train.metrics_log import MetricsLog


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_what_json_does_not_know_is_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsLog(file).add(3, 0, loss=float("nan"), best=float("-inf"), accuracy=0.5)
    assert lines(file) == [
        {"step": 3, "epoch": 0, "loss": None, "best": None, "accuracy": 0.5}
    ]


def test_steps_that_are_done_again_and_half_a_line_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    log = MetricsLog(file)
    for step in (1, 2, 3):
        log.add(step, 0)
    with file.open("a") as half:
        half.write('{"step": 1, "ep')
    log.cut(2)
    log.add(3, 0, again=True)
    assert [line["step"] for line in lines(file)] == [1, 2, 3]
    assert lines(file)[-1]["again"] is True


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    # faults.md row 48
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    log.add(1, 0, loss=1.0)
    log.cut(0)
    (tmp_path / "folder").mkdir()
    MetricsLog(tmp_path / "folder").add(1, 0, loss=1.0)
