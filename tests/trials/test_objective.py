"""Where another process finds an objective, and what it cannot find."""

import functools
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from meshwright.errors import StudyError
from meshwright.trials.objective import find_objective

import pytest

RULE = (
    "Every trial runs in a process of its own, which finds the objective by its file "
    "or module and its name."
)


def objective(trial: Any) -> float:
    return 0.0


def refusal(wrong: Any) -> list[str]:
    with pytest.raises(StudyError) as refused:
        find_objective(wrong)
    return str(refused.value).splitlines()


def test_a_function_is_found_by_its_module_and_its_file() -> None:
    found = find_objective(objective)
    assert found.name == "objective"
    assert found.module == __name__
    assert found.file == Path(__file__)
    assert found.stem == f"{Path(__name__).stem}-objective".replace(".", "-")
    assert found.digest() is not None


def test_a_text_is_a_file_and_a_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert find_objective(f"{script}:best").label == "train.py:best"
    assert find_objective(str(script)).label == "train.py:objective"
    assert refusal(f"{tmp_path}/trian.py:best") == [
        f"The file {tmp_path}/trian.py is not there; near it: train.py.",
        "An objective is given as FILE.py:NAME, a function of a trial; without a NAME "
        "it is called objective.",
        "Give the path of a file that defines it.",
    ]
    assert refusal(f"{tmp_path}:best")[0] == f"The file {tmp_path} is a folder."


def test_what_no_other_process_finds_is_refused() -> None:
    def inner(trial: Any) -> float:
        return 0.0

    change = "Define it with def at the top level of a file."
    name = "test_what_no_other_process_finds_is_refused.<locals>"
    assert refusal(inner) == [
        f"The objective '{name}.inner' is defined inside of a function.",
        RULE,
        change,
    ]
    assert refusal(lambda trial: 0.0) == [
        f"The objective '{name}.<lambda>' is a lambda.",
        RULE,
        change,
    ]
    received, rule, fix = refusal(functools.partial(inner))
    assert received.startswith("The objective, a partial, cannot be pickled: ")
    assert (rule, fix) == (RULE, change)
    assert refusal(3) == [
        "The objective is 3 (a int).",
        "An objective is a function of a trial, or the text FILE.py:NAME.",
        "Write def objective(trial): ..., and give the function itself.",
    ]


def test_a_function_of_a_notebook_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))

    def made() -> Any:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec("def objective(trial): return 0.0", namespace)  # noqa: S102
        return namespace["objective"]

    assert refusal(made()) == [
        "The objective 'objective' was defined in a notebook or at a prompt.",
        RULE,
        "Write it into a file (in a notebook: %%writefile objective.py), and give "
        "'objective.py:objective'.",
    ]


def test_a_module_that_is_run_is_imported_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = shutil.__spec__
    monkeypatch.setitem(sys.modules, "__main__", main)

    def job(trial: Any) -> float:
        return 0.0

    job.__module__, job.__qualname__ = "__main__", "job"
    found = find_objective(job)
    assert (found.module, found.name) == ("shutil", "job")
