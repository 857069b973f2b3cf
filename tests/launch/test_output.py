"""What workers print: it is kept whole, shown by line, and never in the way."""

import os
import sys
from pathlib import Path

from meshwright.launch.console import Console
from meshwright.launch.crew import Printed
from meshwright.launch.output import LONGEST_LINE, Lines, Output

import pytest

from staged_workers import END, play

Capture = pytest.CaptureFixture[str]


def test_lines_are_cut_at_line_feeds_and_carriage_returns_wherever_reads_end() -> None:
    text = "one\n 10%\r 20%\r\nzwölf\n"
    data = text.encode()
    for cut in range(len(data)):
        lines = Lines()
        found = lines.feed(data[:cut]) + lines.feed(data[cut:]) + lines.flush()
        assert found == ["one\n", " 10%\r", " 20%\n", "zwölf\n"], cut


def test_bytes_that_are_no_text_are_replaced_and_long_lines_are_parted() -> None:
    lines = Lines()
    assert lines.feed(b"\xff\xfe\n") == ["\ufffd\ufffd\n"]
    found = lines.feed(b"x" * (2 * LONGEST_LINE + 5)) + lines.feed(b"\n")
    assert [len(line) for line in found] == [LONGEST_LINE, LONGEST_LINE, 6]


def test_a_log_that_cannot_grow_does_not_keep_lines_from_being_shown(
    tmp_path: Path,
) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    log = os.open("/dev/full", os.O_WRONLY)
    output = Output(ours, log)
    os.write(theirs, b"one\ntwo\n")
    assert output.take() == ["one\n", "two\n"]
    trouble = output.take_trouble()
    assert trouble is not None
    assert trouble.strerror == "No space left on device"
    assert output.take_trouble() is None
    os.close(theirs)
    output.close()
    os.close(log)


@pytest.mark.processes
def test_every_byte_is_in_the_log_and_rank_0_is_shown_as_it_prints(
    tmp_path: Path, capsys: Capture
) -> None:
    done = play(
        tmp_path,
        """
os.write(1, b"rank %d \\xff\\n" % rank)
for percent in (10, 20):
    os.write(1, b"%d%%\\r" % percent)
os.write(1, b"no end")
os.write(2, b"to stderr\\n")
"""
        + END,
    )
    assert done.outcome.how == "finished"
    log = (done.folder / "logs/0-1.txt").read_bytes()
    assert b"rank 1 \xff\n10%\r20%\rno end" in log
    assert b"to stderr\n" in log
    out, err = capsys.readouterr()
    assert out.replace("to stderr\n", "") == "rank 0 \ufffd\n10%\r20%\rno end"
    assert err == "to stderr\n"


@pytest.mark.processes
def test_with_all_ranks_every_line_bears_its_number(
    tmp_path: Path, capsys: Capture
) -> None:
    source = "print('a\\nb', flush=True)\nprint('c', end='', flush=True)"
    play(tmp_path, source + END, all_ranks=True)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == [
        f"[rank {rank}] {line}" for rank in (0, 1) for line in "abc"
    ]


@pytest.mark.processes
def test_the_last_lines_of_a_failed_rank_are_shown_though_it_was_not(
    tmp_path: Path, capsys: Capture
) -> None:
    play(
        tmp_path,
        """
if rank == 1:
    print("last words", flush=True)
    os._exit(9)
time.sleep(100)
""",
    )
    assert "[rank 1] last words\n" in capsys.readouterr().err


def test_lines_of_the_launcher_begin_at_the_beginning(capsys: Capture) -> None:
    console = Console()
    console.show(Printed(0, "stdout", "step 3\r"))
    console.say("saved")
    assert capsys.readouterr().out == "step 3\r\nmeshwright: saved\n"


def test_a_reader_that_goes_away_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # meshwright train ... | head -1
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = Console()
        for _ in range(3):
            console.say("a line that nobody reads")
        monkeypatch.undo()


def test_characters_that_the_terminal_does_not_have_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        Console().say("zwölf")
        monkeypatch.undo()
    assert (tmp_path / "out").read_text() == "meshwright: zw?lf\n"
