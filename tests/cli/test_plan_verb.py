"""`meshwright plan`: what it asks for, prints and returns, and what it refuses."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.cli.main import main
from meshwright.models.training import trace_training
from meshwright.parallel.plan import Plan
from meshwright.planner.machines import parse_machine
from meshwright.planner.money import Wishes
from meshwright.planner.report import PlanReport

import jax
import pytest

from planned import candidate, huge_model, large_model, report, small_model

ROOT = Path(__file__).parents[2]

MODEL = """
import meshwright as mw
import keras

def make_model():
    layers = [keras.Input((8,)), keras.layers.Dense(10**6, name="wide")]
    model = keras.Sequential(layers, name="net")
    model.compile("adam", "mse")
    return model
"""


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = before[0]
    for name in set(sys.modules) - before[1]:
        if name.startswith("model_file_"):
            del sys.modules[name]


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


class Planner:
    """Takes the place of `mw.plan`, and remembers what it was asked."""

    def __init__(self, make: Callable[[Any], list[Any]]) -> None:
        self.make = make
        self.model: Any = None
        self.asked: dict[str, Any] = {}

    def __call__(
        self, model: Any, batch_size: int, devices: Any = None, **options: Any
    ) -> PlanReport:
        self.model = model
        self.asked = {"batch_size": batch_size, "devices": devices, **options}
        machine = parse_machine(devices, memory=options["memory"])
        named = ("objective", "finish_by", "at_most", "samples", "epochs")
        wishes = Wishes(**{name: options[name] for name in named})
        return report(self.make(machine), machine, wishes)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    made = Planner(large_model)
    monkeypatch.setattr(mw, "plan", made, raising=False)
    return made


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *map(str, arguments)])
    status = stopped.value.code
    assert isinstance(status, int)
    return status


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """The three lines of an error of usage."""
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_the_report_is_printed_and_ends_with_the_code(
    model_file: Path, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--devices", "8xH200", "--batch", 1024, "--memory", "80GiB")
    assert call(f"{model_file}:make_model", *given) == 0
    out = capsys.readouterr().out
    machine = parse_machine("8xH200", memory="80GiB")
    assert out == f"{report(large_model(machine), machine)}\n"
    assert out.splitlines()[-1] == (
        "Use it: mw.distribute(model, mw.Hybrid(data=4, fsdp=2))"
    )


def test_the_model_is_built_without_values(model_file: Path, planner: Planner) -> None:
    assert call(f"{model_file}:make_model", "--devices", "8xH200", "--batch", 32) == 0
    assert planner.model.name == "net"
    (kernel, bias) = planner.model.trainable_variables
    assert isinstance(kernel._value, jax.ShapeDtypeStruct)
    assert kernel.shape == (8, 10**6)
    assert isinstance(planner.model.optimizer.variables[-1]._value, type(bias._value))


def test_every_option_arrives(
    model_file: Path, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{model_file}:make_model"
    usual = {
        "batch_size": 32,
        "devices": None,
        "memory": None,
        "objective": "fastest",
        "precision": None,
        "samples": None,
        "epochs": None,
        "finish_by": None,
        "at_most": None,
    }
    assert call(target, "--batch", 32) in (0, 3)
    assert planner.asked == usual
    call(
        *(target, "--batch", 32, "--devices", "4x8xH100", "--memory", "70GiB"),
        *("--precision", "bfloat16", "--samples", 50_000, "--epochs", 90),
        *("--finish-by", 12.5, "--at-most", 10_000),
    )
    assert planner.asked == {
        "batch_size": 32,
        "devices": "4x8xH100",
        "memory": "70GiB",
        "objective": "cheapest",
        "precision": "bfloat16",
        "samples": 50_000,
        "epochs": 90,
        "finish_by": 12.5,
        "at_most": 10_000.0,
    }
    call(target, "--batch", 32, "--devices", "8xH200", "--objective", "smallest")
    assert planner.asked["objective"] == "smallest"
    assert "wanted: the smallest" in capsys.readouterr().out


def test_json_is_the_report_and_nothing_else(
    model_file: Path, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--devices", "8xH200", "--batch", 1024, "--memory", "80GiB", "--json")
    assert call(f"{model_file}:make_model", *given) == 0
    facts = json.loads(capsys.readouterr().out)
    machine = parse_machine("8xH200", memory="80GiB")
    expected = report(large_model(machine), machine).to_json()
    assert facts == json.loads(json.dumps(expected))


def test_nothing_fits_has_its_exit_code_and_shows_the_least_bad_plan(
    model_file: Path, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    planner.make = huge_model
    target = f"{model_file}:make_model"
    assert call(target, "--devices", "8xH200", "--batch", 64) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "No plan fits. The least bad one, predicted:" in lines
    assert lines[-1] == (
        f"Try more: meshwright plan {target} --devices 2x8xH200 --batch 64"
    )
    for devices, more in {"2xH200": "4xH200", "2x8xH200": "4x8xH200"}.items():
        assert call(target, "--devices", devices, "--batch", 64) == 3
        assert f"--devices {more} " in capsys.readouterr().out
    assert call(target, "--batch", 64) == 3
    assert "--devices 8xH200 " in capsys.readouterr().out, "the CPU has no more"
    assert call(target, "--devices", "8xH200", "--batch", 64, "--json") == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["best"] is None
    assert facts["least_bad"]["plan"]["tensor"] == 8


def test_the_timetable_stands_before_the_last_line(
    model_file: Path, planner: Planner, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = Plan(stages=8, microbatches=8)
    planner.make = lambda machine: [candidate(machine, stages, 1.0, 1)]
    given = (f"{model_file}:make_model", "--devices", "8xH200", "--batch", 64)
    assert call(*given, "--timeline") == 0
    out = capsys.readouterr().out
    drawn = stages.schedule_of().timeline()
    assert f"\n\n{drawn}\n\nUse it: " in out
    assert call(*given, "--timeline", "--json") == 0
    assert json.loads(capsys.readouterr().out)["timeline"] == drawn
    planner.make = small_model
    assert call(*given, "--timeline") == 0
    out = capsys.readouterr().out
    assert "\nThe plan has no stages, so there is no timetable.\n" in out


FORM = "rule: A model or its data is given as FILE.py:FUNCTION, without arguments."
EXAMPLE = "fix: Write, for example, examples/resnet50.py:make_model."
RESULT = "rule: The function returns a compiled and built Keras model."


@pytest.mark.parametrize("target", ["model.py", "make_model", ":make_model", "m.py:"])
def test_a_target_has_a_file_and_a_function(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, target, "--batch", 8) == [
        f"error: The model received {target!r}.",
        FORM,
        EXAMPLE,
    ]


def test_the_file_must_be_there(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_file.parent
    assert refused(capsys, f"{folder}/modle.py:make_model", "--batch", 8) == [
        f"error: The file {folder}/modle.py does not exist.",
        FORM,
        "fix: Did you mean model.py?",
    ]
    assert refused(capsys, f"{folder}/x.py:make_model", "--batch", 8)[2] == EXAMPLE
    assert refused(capsys, f"{folder}:make_model", "--batch", 8) == [
        f"error: The file {folder} is a folder.",
        FORM,
        EXAMPLE,
    ]
    text = folder / "model.txt"
    text.write_text(MODEL)
    assert refused(capsys, f"{text}:make_model", "--batch", 8) == [
        f"error: The file {text} is not Python.",
        FORM,
        EXAMPLE,
    ]


def test_the_function_must_be_in_the_file(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, f"{model_file}:make_modl", "--batch", 8) == [
        f"error: {model_file} has no function 'make_modl'.",
        FORM,
        "fix: Did you mean make_model?",
    ]
    assert refused(capsys, f"{model_file}:zzz", "--batch", 8)[2] == (
        "fix: It has these functions: make_model."
    )
    model_file.write_text("make_model = 7\n")
    assert refused(capsys, f"{model_file}:make_model", "--batch", 8) == [
        f"error: {model_file} has a int 'make_model'.",
        FORM,
        "fix: It has these functions: none.",
    ]


def test_an_error_in_the_file_is_shown_with_its_line(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fix = "fix: Write --debug before the verb to see the whole error."
    model_file.write_text("import os\n1 / 0\n")
    assert refused(capsys, f"{model_file}:make_model", "--batch", 8) == [
        f"error: {model_file} failed in line 2: ZeroDivisionError: division by zero",
        "rule: The file is imported.",
        fix,
    ]
    model_file.write_text("\n\ndef make_model(:\n")
    lines = refused(capsys, f"{model_file}:make_model", "--batch", 8)
    assert lines[0].startswith(f"error: {model_file} failed in line 3: SyntaxError: ")
    model_file.write_text("def make_model():\n    raise KeyError\n")
    assert refused(capsys, f"{model_file}:make_model", "--batch", 8) == [
        f"error: {model_file}:make_model failed in line 2: KeyError",
        RESULT,
        fix,
    ]
    model_file.write_text("def make_model(size):\n    pass\n")
    assert refused(capsys, f"{model_file}:make_model", "--batch", 8)[0] == (
        f"error: {model_file}:make_model failed: TypeError: make_model() missing 1 "
        "required positional argument: 'size'"
    )


def test_an_error_of_meshwright_s_own_is_shown_as_it_is(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (
        "import meshwright as mw\nmw.devices('QPU')\n",
        "import meshwright as mw\ndef make_model():\n    mw.devices('QPU')\n",
    ):
        model_file.write_text(source)
        assert refused(capsys, f"{model_file}:make_model", "--batch", 8)[0] == (
            "error: 'QPU' (a str) is not a kind of device."
        )


@pytest.mark.parametrize(
    ("body", "received", "change"),
    [
        ("pass", "None (a NoneType)", "End the function with `return model`."),
        ("return 'x' * 99", f"'{56 * 'x'}... (a str)", "End the function with"),
        (
            "return keras.Sequential([keras.layers.Dense(1)], name='net')",
            "'net', which is not built",
            "Give it a keras.Input, or call build(input_shape) in the function.",
        ),
        (
            "x = keras.Input((1,)); return keras.Model(x, x, name='net')",
            "'net', which is not compiled",
            "Call compile(optimizer=..., loss=...) in the function.",
        ),
    ],
)
def test_the_function_returns_a_built_and_compiled_model(
    model_file: Path,
    capsys: pytest.CaptureFixture[str],
    body: str,
    received: str,
    change: str,
) -> None:
    model_file.write_text(f"import keras\ndef make_model():\n    {body}\n")
    error, rule, fix = refused(capsys, f"{model_file}:make_model", "--batch", 8)
    assert error == f"error: {model_file}:make_model returned {received}."
    assert rule == RESULT
    assert fix.startswith(f"fix: {change}")


def test_a_function_that_looks_at_values_is_told_that_there_are_none(
    model_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looking = "    float(model.layers[0].kernel[0, 0])\n    return model"
    model_file.write_text(MODEL.replace("    return model", looking))
    error, *rest = refused(capsys, f"{model_file}:make_model", "--batch", 8)
    assert error.startswith(
        f"error: {model_file}:make_model looked at a value in line 9: "
    )
    assert rest == [
        "rule: A model is planned from shapes alone, and its weights have no values.",
        "fix: Load weights, compute from values and train outside of the function.",
    ]


def test_what_is_wrong_with_devices_or_wishes_is_said_before_the_model_is_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, start in {
        ("--devices", "8xH20O"): "error: 'H20O' is not an accelerator",
        ("--devices", "0xH200"): "error: '0xH200' (a str) does not describe",
        ("--memory", "lots"): "error: memory received 'lots'",
        ("--objective", "fasted"): "error: 'fasted' is not an objective",
        ("--finish-by", "3"): "error: A plan was asked for with finish_by and without",
        ("--at-most", "0"): "error: A plan was asked for with at_most=0.0",
    }.items():
        lines = refused(capsys, "none.py:make_model", "--batch", 8, *given)
        assert lines[0].startswith(start)
        assert len(lines) == 3


def test_a_batch_is_required_and_a_precision_is_one_of_three() -> None:
    assert call("none.py:make_model") == 2
    assert call("none.py:make_model", "--batch", "8", "--precision", "int8") == 2


def test_what_lies_beside_the_file_can_be_imported(
    model_file: Path, planner: Planner
) -> None:
    (model_file.parent / "beside_it.py").write_text(MODEL)
    model_file.write_text("from beside_it import make_model\n")
    assert call(f"{model_file}:make_model", "--devices", "8xH200", "--batch", 8) == 0
    del sys.modules["beside_it"]


@pytest.mark.parametrize(
    ("example", "parameters"), [("resnet50", 25_636_712), ("decoder", 6_746_804_224)]
)
def test_the_examples_can_be_planned_for(
    example: str, parameters: int, planner: Planner
) -> None:
    target = f"{ROOT}/examples/{example}.py:make_model"
    assert call(target, "--devices", "8xH200", "--batch", 1024) == 0
    assert planner.model.count_params() == parameters
    assert trace_training(planner.model).program.jaxpr.eqns
