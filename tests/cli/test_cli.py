"""The command line: its verbs and flags, its output, its errors and exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.cli.main import cli, main
from meshwright.errors import MeshwrightError

import click
import pytest

from conftest import Run

SNAPSHOT = Path(__file__).with_name("verbs.json")


def verbs_of(group: click.Group, before: str = "") -> Iterator[tuple[str, Any]]:
    """The verbs, those of a group with its name before them."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from verbs_of(command, f"{name} ")
        else:
            yield f"{before}{name}", command


def verbs_and_flags() -> dict[str, list[str]]:
    def flags(command: click.Command) -> list[str]:
        return sorted(option for p in command.params for option in p.opts)

    verbs = {name: flags(command) for name, command in verbs_of(cli)}
    return {"meshwright": flags(cli), **dict(sorted(verbs.items()))}


def test_verbs_and_flags_are_those_of_the_snapshot() -> None:
    # A new verb or flag is a promise: write it into verbs.json on purpose.
    assert verbs_and_flags() == json.loads(SNAPSHOT.read_text())


def test_a_verb_does_not_wait_for_what_others_need(run_script: Run) -> None:
    said = run_script(
        "import sys\n"
        "from meshwright.cli.main import main\n"
        "try:\n"
        "    main(['each', '--help'])\n"
        "finally:\n"
        "    print([m for m in ('keras', 'orbax', 'meshwright.cli.plan')\n"
        "           if m in sys.modules])\n"
    )
    assert "Usage: meshwright each" in said.stdout
    assert said.stdout.endswith("\n[]\n")


def test_every_verb_speaks_json_and_explains_itself() -> None:
    for name, command in verbs_of(cli):
        assert "--json" in verbs_and_flags()[name], name
        assert command.help, name
        assert all(p.help for p in command.params if isinstance(p, click.Option)), name


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    status = stopped.value.code
    assert isinstance(status, int)
    return status


FOREIGN = """
import keras

def make_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="模型é")
    model.compile("sgd", "mse")
    return model
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("encoding", "name"), [("latin-1", "??é"), ("ascii", "模型é"), ("utf-8", "模型é")]
)
def test_pipes_that_are_no_utf8_get_what_they_can_take(
    tmp_path: Path, encoding: str, name: str
) -> None:
    file = tmp_path / "model.py"
    file.write_text(FOREIGN, encoding="utf-8")
    asked = ["plan", f"{file}:make_model", "--devices", "2xH200", "--batch", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *asked],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    # An ASCII pipe is mostly a locale that nobody set: click writes UTF-8 there.
    said = done.stdout.decode("utf-8" if encoding == "ascii" else encoding)
    assert said.startswith(f"Plans for '{name}', a global batch of 8")


@pytest.mark.parametrize(
    "asked",
    [
        ("devices",),
        ("plan", "{toy}", "--devices", "8xH200", "--batch", "64"),
        ("bench", "scaling", "{toy}", "--machine", "8xH200"),
        ("bench", "cost", "{toy}", "--machine", "8xH200"),
        ("bench", "input", "{toy}", "--batch", "16"),
    ],
    ids=lambda asked: "-".join(asked[:2]).removesuffix("-{toy}"),
)
def test_sixty_columns_without_colour_are_enough(
    asked: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    toy = f"{SNAPSHOT.parents[1] / 'toys.py'}:make_model"
    assert call(*(word.format(toy=toy) for word in asked)) == 0
    out = capsys.readouterr().out
    # Titles stand whole, so that they can be searched for.
    long = [line for line in out.splitlines() if len(line) > 60]
    assert all(line.startswith("toy, ") for line in long), long
    assert "\x1b" not in out


def test_devices_lists_names_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[0].startswith("/device:CPU:0  ")
    assert lines[-1] == "8 devices; is all well? meshwright doctor"
    assert call("devices", "--kind", "gpu") == 0
    assert capsys.readouterr().out.startswith("0 devices")


def test_devices_names_the_catalog_s_entry_of_a_known_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fakes"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert call("devices", "--kind", "GPU") == 0
    sys.modules.pop("pynvml", None)
    assert ", catalog: H200\n" in capsys.readouterr().out


def test_devices_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [d["name"] for d in listed][:2] == ["/device:CPU:0", "/device:CPU:1"]


def test_the_catalog_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("devices", "--catalog") == 0
    lines = capsys.readouterr().out.splitlines()
    (h200,) = [line for line in lines if line.startswith("H200 ")]
    assert "990 TFLOP/s in 16 bits, 141.0 GiB, $" in h200
    (cpu,) = [line for line in lines if line.startswith("CPU ")]
    assert "peak unknown, memory unknown, price unknown" in cpu
    assert call("devices", "--catalog", "--json") == 0
    entries: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert {"name", "peak_flops", "memory", "price", "sources"} <= set(entries[0])


@pytest.mark.processes
def test_doctor_prints_its_block_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctor", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"].startswith("verdict: ready")


def test_doctor_fails_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from meshwright.cli import doctor as verb
    from meshwright.launch.doctor import FAIL, Check, Diagnosis

    bad = Diagnosis((Check(name="disk", status=FAIL, detail="full"),))
    monkeypatch.setattr(verb, "diagnose", lambda: bad)
    assert call("doctor") == 1
    assert "verdict: not ready: disk" in capsys.readouterr().out


def test_errors_are_three_lines_and_carry_their_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("devices", "--kind", "QPU") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: 'QPU' (a str) is not a kind of device.",
        "rule: The kinds are CPU, GPU, TPU, in either case.",
        "fix: Leave it out to list every device.",
    ]
    assert call("--debug", "devices", "--kind", "QPU") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_an_error_at_import_is_shown_as_every_other(debug: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *debug, "devices"],
        capture_output=True,
        text=True,
        env={**os.environ, "MESHWRIGHT_VIRTUAL": "bogus"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-3:] == [
        "error: MESHWRIGHT_VIRTUAL received 'bogus' (a str).",
        "rule: It takes a count from 1 to 1024, or a text with a kind: '8' and 'CPU:8' "
        "make eight devices of the CPU, 'GPU:4' makes four stand-in GPUs.",
        "fix: Write, for example, MESHWRIGHT_VIRTUAL='GPU:4'.",
    ]
    assert ("Traceback" in done.stderr) == bool(debug)


def test_the_installed_command_shows_an_error_at_import_too(tmp_path: Path) -> None:
    # What installers write for an entry point.
    command = tmp_path / "meshwright"
    command.write_text("from meshwright.cli.main import main\nmain()\n")
    done = subprocess.run(
        [sys.executable, str(command), "devices"],
        capture_output=True,
        text=True,
        env={**os.environ, "MESHWRIGHT_VIRTUAL": "bogus"},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: MESHWRIGHT_VIRTUAL received 'bogus'")


def test_usage_errors_and_internal_errors_and_interrupts_have_their_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("no-such-verb") == 2
    assert call("devices", "--no-such-flag") == 2
    capsys.readouterr()
    for error, status in ((ZeroDivisionError("x"), 1), (KeyboardInterrupt(), 130)):

        def fail(*_: object, _error: BaseException = error, **__: object) -> None:
            raise _error

        monkeypatch.setattr(cli, "main", fail)
        assert call("devices") == status
    err = capsys.readouterr().err
    assert "error: ZeroDivisionError: x\nrule: this is a fault of Meshwright" in err
    assert (
        "fix: run it again with --debug before the verb, and report the output" in err
    )
    assert err.endswith("interrupted\n")


def test_help_and_version_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    assert "demo" in capsys.readouterr().out
    assert call("--version") == 0
    assert capsys.readouterr().out.startswith("meshwright, version ")


def test_every_error_has_an_exit_code_of_the_table() -> None:
    table = {1, 2, 3, 4, 5, 6, 7, 8, 75, 130}
    assert {e.exit_code for e in MeshwrightError.__subclasses__()} <= table


@pytest.mark.processes
def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", "demo", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=inherited,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert facts["devices"] == [f"/device:GPU:{i}" for i in range(4)] + [
        "/device:CPU:0"
    ]
    assert "Executing op MatMul in device /device:GPU:3" in facts["operations"]
    assert facts["training"]["devices"] == ["/device:GPU:3"]
    assert facts["training"]["difference"] == 0.0
    assert facts["training"]["accuracy"] > 0.8
    assert facts["mesh"]["equal"]
    assert facts["mesh"]["accuracy"] == facts["training"]["accuracy"]
    assert facts["memory_limit"].startswith("train_step of ")
    assert facts["plan"]
    scaling, cost = facts["scaling"]
    assert [row["devices"] for row in scaling["rows"]] == [1, 2, 4]
    assert all(row["job_dollars"] > 0 for row in cost["rows"])
    report = (tmp_path / facts["report"]).read_text()
    assert "finished after step 500" in report
    assert "were considered" in report, "the plan was chosen, and is argued for"
    assert "KiB per device &gt; 400.0 KiB" in report
    assert "What each device did" in report
    assert facts["seconds"] < 120
