"""The shape of the house: where things may live, and what an import may do."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import meshwright as mw

import pytest

from conftest import Run

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "meshwright"

# From the ground up; a room may import from itself and from those before it.
ROOMS = [
    "errors",
    "devices",
    "cluster",
    "data",
    "models",
    "parallel",
    "planner",
    "train",
    "strategies",
    "launch",
    "trials",
    "bench",
    "report",
    "tf",
    "__init__",
    "cli",
]


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}: imports are absolute"
            is_package = node.module == "meshwright"
            found |= (
                {f"meshwright.{alias.name}" for alias in node.names}
                if is_package
                else {node.module}
            )
    return {name for name in found if name.split(".")[0] == "meshwright"}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize(
    "file", source_files(), ids=lambda f: str(f.relative_to(SOURCE))
)
def test_imports_only_point_downwards(file: Path) -> None:
    module = ".".join(["meshwright", *file.relative_to(SOURCE).with_suffix("").parts])
    here = room_of(module)
    for imported in imports_of(file):
        there = room_of(imported)
        if there not in ROOMS:
            there = (
                "__init__"  # a public name, as in `from meshwright import __version__`
            )
        assert ROOMS.index(there) <= ROOMS.index(here), f"{module} imports {imported}"


def test_every_room_is_known() -> None:
    rooms = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert rooms - {"__pycache__", "py"} <= set(ROOMS)


def test_private_parts_of_jax_and_keras_are_imported_in_few_places() -> None:
    def importers(package: str) -> set[str]:
        files = [f for f in source_files() if package in f.read_text()]
        return {f.name for f in files}

    assert importers("jax._src") == {"start.py", "eager_trace.py", "store.py"}
    assert importers("keras.src") == {"keras_hooks.py"}


def test_no_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "helpers", "common", "manager", "misc"}
    assert not [f for f in source_files() if drawers & set(f.stem.split("_"))]


def test_public_names_are_complete() -> None:
    rooms = {p.stem for p in SOURCE.iterdir()}
    public = {n for n in dir(mw) if not n.startswith("_")} - (
        rooms - {"devices", "errors"}
    )
    assert public == set(mw.__all__)


def test_public_names_are_the_documented_names() -> None:
    rows = re.findall(r"^\| `mw\.(\w+)", (ROOT / "docs/api.md").read_text(), re.M)
    assert sorted(rows) == sorted(mw.__all__)


def test_every_public_name_is_in_the_reference_once() -> None:
    pages = [p.read_text() for p in (ROOT / "docs/reference").glob("*.md")]
    directives = re.findall(r"^\.\. auto(\w+):: (\S+)$", "\n".join(pages), re.M)
    public = {f"meshwright.{name}": getattr(mw, name) for name in mw.__all__}
    found = [(kind, name) for kind, name in directives if name in public]
    assert sorted(name for _, name in found) == sorted(public)
    for kind, name in found:
        is_class, is_function = kind == "class", kind == "function"
        assert inspect.isclass(public[name]) == is_class, name
        assert inspect.isfunction(public[name]) == is_function, name


def test_every_verb_and_variable_is_documented() -> None:
    from meshwright.cli.main import cli

    page = (ROOT / "docs/api.md").read_text()
    assert not [verb for verb in cli.commands if f"| `meshwright {verb}" not in page]
    read = {
        name
        for file in source_files()
        for name in re.findall(r'"(MESHWRIGHT_[A-Z_]+)"', file.read_text())
    }
    # What processes of Meshwright's tell each other, and faults on purpose.
    internal = {f"MESHWRIGHT_{name}" for name in ("CHANNEL", "ORDERS", "FAULT")}
    assert {name for name in read if f"`{name}`" not in page} == internal


def test_public_functions_have_types_and_examples() -> None:
    for name in mw.__all__:
        found = getattr(mw, name)
        if not inspect.isfunction(found):
            continue
        assert ">>>" in (found.__doc__ or ""), f"{name} has no example"
        signature = inspect.signature(found)
        assert signature.return_annotation is not inspect.Signature.empty, name
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, (
                name,
                parameter,
            )


def errors_and_warnings() -> list[type[BaseException]]:
    return [
        found
        for _, found in inspect.getmembers(mw.errors, inspect.isclass)
        if issubclass(found, mw.errors.MeshwrightError | Warning)
    ]


@pytest.mark.parametrize("error", errors_and_warnings(), ids=lambda e: e.__name__)
def test_every_error_is_drawn_in_the_tree_and_explained(
    error: type[BaseException],
) -> None:
    assert error.__name__ in (mw.errors.__doc__ or "")
    page = (ROOT / "docs/errors.md").read_text()
    assert re.search(rf"^##+ `{error.__name__}`", page, re.M)


def test_the_error_page_explains_nothing_that_does_not_exist() -> None:
    headings = re.findall(r"^##+ `(\w+)`", (ROOT / "docs/errors.md").read_text(), re.M)
    assert sorted(headings) == sorted(e.__name__ for e in errors_and_warnings())


def test_importing_starts_no_device_and_loads_nothing_heavy(run_script: Run) -> None:
    run_script(
        "import sys\n"
        "import meshwright as mw\n"
        "mw.devices(); mw.process_index(); mw.process_count()\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "heavy = {'tensorflow', 'torch', 'optuna', 'ray', 'keras', 'orbax'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )


def test_an_import_loads_jax_and_the_ground_floor_and_nothing_else(
    run_script: Run,
) -> None:
    run_script(
        "import sys\n"
        "import jax\n"
        "before = set(sys.modules)\n"
        "import meshwright\n"
        "new = set(sys.modules) - before\n"
        "others = {m for m in new if m.split('.')[0] != 'meshwright'}\n"
        "assert not others, others\n"
        "rooms = {m.split('.')[1] for m in new if '.' in m}\n"
        "assert rooms == {'errors', 'devices'}, rooms\n"
        "assert not [m for m in new if m.endswith('hooks')], new\n"
    )


def test_names_that_are_imported_on_first_use_are_those_that_type_checkers_see() -> (
    None
):
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (seen,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = {
        alias.name: node.module
        for node in seen
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"meshwright.{home}" for name, home in mw._HOMES.items()}
    assert homes == imports
    assert {*homes, "devices", "errors"} == set(mw.__all__)


def test_every_public_name_can_be_had_in_every_way(run_script: Run) -> None:
    done = run_script(
        "from meshwright import *\n"
        "from meshwright import FSDP, verify\n"
        "import meshwright as mw\n"
        "assert callable(mw.devices) and mw.FSDP is FSDP and mw.verify is verify\n"
        "assert all(name in globals() for name in mw.__all__)\n"
        "assert dir(mw) == sorted(mw.__all__)\n"
        "help(mw)\n"
        "mw.no_such_name\n",
        status=1,
    )
    assert "class Mirrored(" in done.stdout, "help shows what stands behind the names"
    assert done.stderr.endswith(
        "AttributeError: module 'meshwright' has no attribute 'no_such_name'\n"
    )


def test_dependencies_are_few_and_none_of_them_is_a_rival_framework() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[\[<>=]", d)[0] for d in project["dependencies"]}
    assert names == {
        *("keras", "jax", "orbax-checkpoint", "numpy", "rich", "psutil"),
        *("nvidia-ml-py", "click", "markupsafe"),
    }
    extras = project["optional-dependencies"]
    assert set(extras) == {
        *("cuda12", "cuda13", "tpu"),
        *("tune", "tensorboard", "data", "export", "docs", "dev"),
    }
    everything = str(extras) + str(project["dependencies"])
    assert not re.search(r"tensorflow|torch|\bray\b", everything)


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == mw.__version__


def test_a_second_make_installs_nothing() -> None:
    if not Path(sys.prefix, ".installed").exists():
        pytest.skip("these tests run outside make's environment")
    for target in ("demo", "test", "check", "docs", "bench"):
        done = subprocess.run(
            ["make", "-n", target, f"VENV={sys.prefix}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "pip" not in done.stdout, done.stdout


def test_make_explains_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 || exit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "test", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert (
        "error: Python 3.8.1 found; Meshwright needs Python 3.11 or newer"
        in done.stdout
    )
