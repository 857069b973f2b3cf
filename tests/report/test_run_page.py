"""The page of a run: what is in it, and what is not."""

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from meshwright.cli.main import main
from meshwright.errors import RunError
from meshwright.parallel.plan import Plan
from meshwright.report.run_page import plan_from, run_page
from meshwright.report.run_record import RunRecord

import pytest

DEVICES = [f"/device:GPU:{i}" for i in range(4)]
Attributes = list[tuple[str, str | None]]
EVIL = "<script>alert(1)</script>"


def line(step: int, epoch: int, **facts: Any) -> dict[str, Any]:
    shares = {"devices_share": 0.5, "input_share": 0.5}
    shares |= {"host_share": 0.0, "compile_share": 0.0}
    known = {"step": step, "epoch": epoch, "time": 10.0 + step, "loss": 1 / step}
    paces = {"samples_per_second": 64.0, "step_seconds": 0.5, "timed_seconds": step}
    return {**known, "goodput": 0.75, **paces, **shares, **facts}


def entry(plan: Plan, **facts: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(["step_seconds", "memory_bytes", "dollars_per_hour"])
    return {"plan": plan.to_json(), **unknown, "because": "", **facts}


def variable(name: str, kind: str, num_bytes: int, **facts: Any) -> dict[str, Any]:
    known = {"shape": [8, 4], "shard": [4, 4], "dtype": "float32", "memory": "device"}
    held = {"kind": kind, "name": name, "bytes": num_bytes, "devices": DEVICES}
    return {**held, **known, **facts}


def write_run(folder: Path, **files: Any) -> RunRecord:
    """A run folder with these files; names stand for `.json` or `.jsonl`."""
    folder.mkdir(exist_ok=True)
    config = {"script": "train.py", "arguments": [], "versions": {"jax": "0.1"}}
    for name, content in {"config": config, **files}.items():
        if isinstance(content, list) and name != "placement":
            text = "".join(json.dumps(each) + "\n" for each in content)
            (folder / f"{name}.jsonl").write_text(text)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return RunRecord.read(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    best = entry(Plan(data=2, stages=2, microbatches=2), because="the fastest")
    slow = entry(Plan(fsdp=4), step_seconds=0.25, because="slower: 0.25 s")
    large = entry(Plan(data=4), memory_bytes=2**34, because="16 GiB > 8 GiB")
    rows = [
        {**entry(Plan(data=n)), "num_devices": n, "speed_up": n * 0.9}
        | {"efficiency": 0.9, "epoch_dollars": 1.5, "scaling": "strong"}
        for n in (1, 2, 4)
    ]
    return write_run(
        tmp_path / f"run{EVIL.replace('/', '')}",
        config={
            "script": "my train.py",
            "arguments": ["--name", EVIL, "--api-key", "***"],
            "versions": {"jax": "0.1"},
            "environment": {"XLA_FLAGS": EVIL},
        },
        plan={
            "best": best,
            "candidates": [best, slow],
            "rejected": [large],
            "scaling": rows,
            "strategy": "Auto(data=2 x stages=2)",
            "devices": DEVICES,
        },
        placement=[
            variable("dense/kernel", "parameters", 64),
            variable("adam/momentum", "optimizer state", 128, memory="pinned_host"),
        ],
        memory={
            device: {
                "kinds": {"parameters": 2**20, "metrics": 0, "temporaries": 2**21},
                "limit": 2**23,
                "peak": 5 * 2**20,
            }
            for device in DEVICES
        },
        devices={
            "seconds": 0.2,
            "devices": {
                device: {"computing": 0.4, "communicating": 0.35, "idle": 0.25}
                for device in DEVICES
            },
        },
        metrics=[line(1, 0, val_loss=2.0), line(3, 1, val_loss=1.5, loss=None)],
        events=[
            {"time": 1.0, "event": "attempt", "attempt": 0},
            {"time": 4.5, "event": "failed", "rank": 1, "because": EVIL},
            {"time": 5.0, "event": "saved", "step": 3},
        ],
        launches=[{"began": 1.0, "pid": 1}, {"began": 1.0, "ended": 61.0}],
        finished={"step": 3},
    )


class Reader(HTMLParser):
    """What a browser would see: tags, what they ask for, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        named = {"href", "src", "srcset", "action", "data"}
        self.asked += [value or "" for name, value in attributes if name in named]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_question_about_a_run_has_its_section(run: RunRecord) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", run_page(run))
    assert titles == [
        "In short",
        "Loss and metrics",
        "Throughput",
        "Where the time went",
        "What each device did",
        "Memory",
        "The devices and what lies where",
        "The pipeline",
        "The plan, and why the others lost",
        "More devices, and what they cost",
        "What happened",
        "Environment",
    ]


def test_what_is_known_stands_in_it(run: RunRecord) -> None:
    text = Reader(run_page(run)).text
    for words in (
        "finished after step 3",
        "Auto(data=2 x stages=2)",
        "slower: 0.25 s",
        "16 GiB > 8 GiB",
        "dense/kernel",
        "limit 8 MiB",
        "5.0 MiB",  # the peak
        "40.0 %",
        "from a sample of 200 ms",
        "stage 0  F0 F1",  # the timetable
        "3.60 x",
        "$1.50",
        "Dollars for an epoch, predicted",
        "60.0 s",
        "75 %",
    ):
        assert words in text, words


def test_the_command_can_be_pasted_into_a_shell(run: RunRecord) -> None:
    text = Reader(run_page(run)).text
    (command,) = re.findall(r"meshwright train --run .*", text)
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True
    ).stdout.splitlines()
    assert words[:4] == ["meshwright", "train", "--run", str(run.folder)]
    assert words[4:] == ["my train.py", "--", "--name", EVIL, "--api-key", "***"]


def test_nothing_in_a_run_becomes_a_part_of_the_page(run: RunRecord) -> None:
    page = Reader(run_page(run))
    assert "script" not in page.tags
    assert EVIL in page.text
    assert page.open == [], "every tag is closed"


def test_the_page_asks_for_nothing_outside_of_it(run: RunRecord) -> None:
    text = run_page(run)
    page = Reader(text)
    assert page.asked == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text


def test_every_chart_has_a_title_and_its_figures_beneath(run: RunRecord) -> None:
    text = run_page(run)
    figures = re.findall(r"<figure>(.*?)</figure>", text, re.DOTALL)
    assert len(figures) == 7
    for each in figures:
        assert re.search(r'<svg role="img".*?><title>[^<]+</title>', each)
        assert "<details><summary>The figures</summary>" in each
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_numbers_that_are_none_leave_a_gap(run: RunRecord) -> None:
    assert run.series("loss") == [(1.0, 1.0)]
    assert run.series("val_loss") == [(1.0, 2.0), (3.0, 1.5)]
    assert run.names == ["loss"]


def test_without_the_compiler_s_account_the_memory_of_variables_is_shown(
    run: RunRecord,
) -> None:
    (run.folder / "memory.json").unlink()
    page = Reader(run_page(RunRecord.read(run.folder)))
    assert "What variables take" in page.text
    assert "optimizer state, in the memory of the host" in page.text
    assert "By the account" not in page.text


def test_long_tables_open_at_a_click(run: RunRecord) -> None:
    assert "<summary>3 variables" not in run_page(run)
    variables = [variable(f"layer_{i}/kernel", "parameters", 64) for i in range(21)]
    (run.folder / "placement.json").write_text(json.dumps(variables))
    text = run_page(RunRecord.read(run.folder))
    assert "<details><summary>21 variables</summary>" in text
    assert "layer_20/kernel" in text


def test_shares_are_of_the_time_that_was_measured(tmp_path: Path) -> None:
    lines = [line(1, 0), line(3, 1, devices_share=1.0, input_share=0.0)]
    found = write_run(tmp_path / "run", metrics=lines).shares
    assert found["devices"] == pytest.approx((0.5 * 1 + 1.0 * 3) / 4)
    assert sum(found.values()) == pytest.approx(1)


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run")
    text = run_page(record)
    assert "no step was logged" in text
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["In short", "Environment"]


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path: Path) -> None:
    record = write_run(tmp_path / "run", metrics=[line(7, 2)])
    assert record.state == "not finished; the last step that was logged is 7"


def test_files_that_were_cut_off_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", metrics=[line(7, 2)])
    (tmp_path / "run/plan.json").write_text('{"best": {"pl')
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "epo')
    record = RunRecord.read(tmp_path / "run")
    assert record.metrics == [line(7, 2)]
    assert "Run run" in run_page(record)


def test_long_runs_are_drawn_whole_and_listed_in_part(tmp_path: Path) -> None:
    lines = [line(step, 0) for step in range(1, 5001)]
    text = run_page(write_run(tmp_path / "run", metrics=lines))
    assert len(text) < 400_000
    assert "<td>5000</td>" in text


def test_a_plan_comes_back_from_its_json() -> None:
    for plan in (
        Plan(data=2, tensor=2, rules=(("dense", (None, "tensor")),)),
        Plan(stages=2, microbatches=4, schedule="gpipe"),
        Plan(accumulate=2, remat=True, precision="bfloat16", offload=True),
    ):
        assert plan_from(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan_from({"data": "two"}) is None
    assert plan_from({"data": 2, "of_later": 1}) == Plan(data=2)


@pytest.mark.parametrize(
    ("make", "why"), [(False, "no such folder"), (True, "no config.json")]
)
def test_what_is_no_run_has_no_report(tmp_path: Path, make: bool, why: str) -> None:
    folder = tmp_path / "none"
    if make:
        folder.mkdir()
    with pytest.raises(RunError) as raised:
        RunRecord.read(folder)
    found = raised.value
    assert [found.received, found.rule, found.change] == [
        f"A report of {str(folder)!r} was asked for: {why}.",
        "A report is made of a run folder, which meshwright train writes.",
        "Name the folder that train names when it starts, such as runs/train.",
    ]


def test_the_verb_writes_the_page_beside_the_run_or_elsewhere(
    tmp_path: Path, run: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(run.folder)])
    assert (run.folder / "report.html").read_text() == run_page(run)
    assert f"the report lies in {run.folder / 'report.html'}" in capsys.readouterr().out
    elsewhere = tmp_path / "here.html"
    with pytest.raises(SystemExit, match="0"):
        main(["report", str(run.folder), "--out", str(elsewhere), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["report"] == str(elsewhere)
    assert elsewhere.exists()


def test_a_place_that_cannot_be_written_to_is_named(
    tmp_path: Path, run: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "none" / "here.html"
    with pytest.raises(SystemExit):
        main(["report", str(run.folder), "--out", str(target)])
    said = capsys.readouterr().err
    assert f"was to be written to {str(target)!r}: {os.strerror(2)}." in said
    assert "It is one file in a folder that exists and can be written to." in said
    assert "Choose another place with --out FILE.html." in said
