"""The documents tell the truth: their code runs, links and trees lead somewhere."""

import re
from pathlib import Path

import pytest

from conftest import Run

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def code_of(page: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n".join(blocks)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if code_of(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_code_on_a_page_runs_from_top_to_bottom(
    page: Path, run_script: Run
) -> None:
    run_script(code_of(page))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_examples_run_without_a_gpu(example: Path, run_script: Run) -> None:
    run_script(example.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_s_tree_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("src/meshwright/\n") : readme.index("tests/  ")]
    room = ""
    for line in tree.splitlines()[1:]:
        name = line.split()[0]
        room = name if name.endswith("/") else room
        inside = line.startswith("    ")
        path = ROOT / "src/meshwright" / (room if inside else "") / name
        assert path.exists(), line


def test_the_table_of_faults_names_tests_that_exist() -> None:
    page, _ = (ROOT / "docs/faults.md").read_text().split("## A log")
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 49))
    with_tests = 0
    for _, cell in rows:
        named = re.findall(r"`([\w/.]+)::(\w+)`", cell)
        for file, function in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"def {function}(" in source, f"{file}::{function}"
        with_tests += bool(named)
    assert with_tests >= 36
