"""`meshwright bench`: its tables as text, Markdown and JSON, and what it refuses."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

from meshwright.cli.main import main

import pytest

TOYS = Path(__file__).parents[1] / "toys.py"
MODEL = f"{TOYS}:make_model"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["bench", *arguments])
        out, err = capsys.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return run


def test_scaling_is_predicted_for_machines_that_are_not_here(call: Call) -> None:
    status, out, _ = call("scaling", MODEL, "--machine", "8xH200", "--devices", "1,8")
    assert status == 0
    strong, weak = out.split("\n\n")
    assert strong.startswith("toy, strong scaling (a global batch of 256), predicted")
    assert weak.startswith("toy, weak scaling (the batch grows with the devices)")
    assert [line.split()[0] for line in weak.splitlines()[2:4]] == ["1", "8"]


def test_scaling_is_measured_here_and_said_as_json(call: Call) -> None:
    status, out, _ = call("scaling", MODEL, "--devices", "1", "--batch", "8", "--json")
    assert status == 0
    tables = json.loads(out)["tables"]
    assert len(tables) == 4
    assert tables[0]["rows"][0]["step_seconds"] > 0


def test_scaling_says_on_the_way_what_it_times_and_takes_a_strategy(call: Call) -> None:
    asked = ("--devices", "1,2", "--batch", "8", "--strategy", "Mirrored")
    status, out, err = call("scaling", MODEL, *asked)
    assert status == 0
    assert "The plans are those of Mirrored." in out
    assert err.splitlines()[:2] == [
        "meshwright: timing one device, a batch of 8",
        "meshwright: timing data=2, a batch of 8",
    ]
    status, _, err = call("scaling", MODEL, "--strategy", "Miracle")
    assert status == 2
    assert "'Miracle' is not one of 'Mirrored'" in err


def test_cost_takes_a_price_and_prints_markdown(call: Call) -> None:
    asked = ("--machine", "2xH100", "--price", "2", "--epochs", "3", "--markdown")
    status, out, _ = call("cost", MODEL, *asked)
    assert status == 0
    assert out.startswith("### toy, the cost of 3 epochs of 25,600 samples, predicted")
    assert "| devices | plan | time | $/epoch | $ |" in out
    assert "A device costs $2.00 an hour" in out


def test_strategies_are_compared(call: Call) -> None:
    status, out, _ = call("strategies", MODEL, "--devices", "1", "--batch", "8")
    assert status == 0
    assert out.splitlines()[2].split()[:3] == ["Single", "one", "device"]


def test_input_reads_what_a_function_makes(call: Call) -> None:
    data = f"{TOYS}:make_data"
    status, out, _ = call("input", MODEL, "--data", data, "--batch", "16", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["kind"] == "generator"
    assert found["measured_reading"] > 0


@pytest.mark.parametrize(
    ("asked", "chart"),
    [
        (("scaling", "--machine", "4xH200"), "Speed-up by devices"),
        (("cost", "--machine", "2xH100"), "Dollars for the whole training"),
        (("cost", "--devices", "1", "--batch", "8"), "Speed-up by devices"),
        (("strategies", "--devices", "1", "--batch", "8"), "A step of each strategy"),
        (("input", "--batch", "16"), "Samples a second"),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_every_bench_writes_a_page_with_a_chart(
    call: Call, tmp_path: Path, asked: tuple[str, ...], chart: str
) -> None:
    verb, *options = asked
    data = ("--data", f"{TOYS}:make_data") if verb == "input" else ()
    page = tmp_path / "page.html"
    status, out, _ = call(verb, MODEL, *options, *data, "--html", str(page))
    assert status == 0
    text = page.read_text()
    assert chart in text
    title = out.splitlines()[0]
    assert html.escape(title, quote=False) in text or verb == "input"
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert not re.search(r"(src|href)=", text)


def test_a_page_tells_how_to_do_it_again_without_secrets(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    asked = ["scaling", MODEL, "--machine", "2xH200", "--html", str(page)]
    again = ["meshwright", "bench", *asked, "--token", "hidden-1"]
    monkeypatch.setattr("sys.argv", again)
    monkeypatch.setenv("MESHWRIGHT_TOKEN", "hidden-2")
    monkeypatch.setenv("MESHWRIGHT_CALIBRATION", "here")
    monkeypatch.setenv("HOME", "hidden-3")
    assert call(*asked)[0] == 0
    text = page.read_text()
    assert "MESHWRIGHT_CALIBRATION=here" in text
    assert "meshwright bench scaling" in text
    assert "hidden-" not in text


def test_devices_that_share_cores_have_no_best_return(call: Call) -> None:
    status, out, _ = call("cost", MODEL, "--devices", "1,2", "--batch", "8")
    assert status == 0
    assert "best" not in out.lower()


def test_a_page_that_cannot_be_written_is_an_error_with_the_way_out(
    call: Call, tmp_path: Path
) -> None:
    target = tmp_path / "nowhere" / "page.html"
    asked = ("scaling", MODEL, "--machine", "2xH200", "--html", str(target))
    status, out, err = call(*asked)
    assert status == 2
    assert out == "", "it is said before anything is measured"
    assert err == (
        f"error: The benchmark was to be written to {str(target)!r}: No such file or "
        "directory.\n"
        "rule: It is one file in a folder that exists and can be written to.\n"
        "fix: Choose another place with --html FILE.html.\n"
    )


def test_input_is_a_table_for_a_page_of_text_too(call: Call) -> None:
    data = f"{TOYS}:make_data"
    status, out, _ = call("input", MODEL, "--data", data, "--batch", "16", "--markdown")
    assert status == 0
    assert out.startswith("### toy, ")
    assert "| part | samples/s |" in out


def test_lists_that_are_none_and_devices_that_are_missing_are_usage_errors(
    call: Call,
) -> None:
    status, _, err = call("scaling", MODEL, "--devices", "1,x")
    assert status == 2
    assert "'1,x' is no list of numbers as 1,2,4,8" in err
    status, _, err = call("scaling", MODEL, "--devices", "16")
    assert status == 2
    assert err.startswith("error: 16 devices were asked for")


def test_a_function_for_data_that_does_not_exist_is_named(call: Call) -> None:
    status, _, err = call("input", MODEL, "--data", f"{TOYS}:make_dat")
    assert status == 2
    assert "Did you mean make_data" in err
