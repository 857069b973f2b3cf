"""The documents tell the truth: their code runs, links and trees lead somewhere."""

import ast
import os
import re
import runpy
import textwrap
from pathlib import Path

import meshwright as mw
from meshwright.strategies.strategy import Strategy

import pytest

from conftest import Run

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for glob in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(glob)
)
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


def blocks_of(page: Path, language: str) -> list[str]:
    """The blocks of a page in a language; those in lists are indented."""
    fence = rf"^( *)```{language}\n(.*?)^\1```$"
    found = re.findall(fence, page.read_text(), re.M | re.S)
    return [textwrap.dedent(block) for _, block in found]


def code_of(page: Path) -> str:
    return "\n".join(blocks_of(page, "python"))


@pytest.mark.parametrize(
    "page", [p for p in PAGES if code_of(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_code_on_a_page_runs_from_top_to_bottom(
    page: Path, run_script: Run
) -> None:
    run_script(code_of(page))


def test_code_of_other_frameworks_is_valid_python() -> None:
    """It stands beside ours, and is not run: the frameworks are not there."""
    blocks = [block for page in PAGES for block in blocks_of(page, "py")]
    assert len(blocks) >= 4
    for block in blocks:
        ast.parse(block)


def test_no_code_is_in_a_block_that_nobody_runs_or_reads() -> None:
    for page in PAGES:
        opened = re.findall(r"^ *```+(\S*)", page.read_text(), re.M)
        known = {"", "python", "py", "sh", "text", "{toctree}", "{eval-rst}"}
        assert set(opened) <= known, page


def test_pictures_are_what_their_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "docs/pictures/draw.py"))
    drawn = {f"{draw.__name__}.svg": draw() for draw in script["PICTURES"]}
    kept = {p.name: p.read_text() for p in (ROOT / "docs/pictures").glob("*.svg")}
    assert drawn == kept, "run docs/pictures/draw.py"


def test_every_strategy_has_a_page_with_a_picture_and_what_was_measured() -> None:
    shown = (ROOT / "docs/strategies.md").read_text()
    for page in ROOT.glob("docs/strategies/*.md"):
        text = page.read_text()
        assert f"(strategies/{page.name})" in shown, page
        assert re.search(r"^!\[.+\]\(\.\./pictures/\w+\.svg\)$", text, re.M), page
        assert "benchmarks/results/" in text, page


def test_messages_that_are_explained_are_those_that_are_shown() -> None:
    """Of each, a third at least stands in the source; the rest is names and values."""
    shown = {
        node.value.rstrip(".")
        for file in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = re.findall(r"^\| (.*?) \|", page, re.M)
    messages = [m for cell in cells for m in re.findall(r"`([^`]+ [^`]+)`", cell)]
    ours = [m for m in messages if not m.startswith(("ModuleNotFound", "exit code"))]
    assert len(ours) >= 15
    for message in ours:
        *_, end = message.split(": ")  # what stands in front says where
        if any(end in text for text in shown):
            continue
        words = [text for text in shown if len(text) > 5 and text in message]
        found = {
            place
            for text in words
            for match in re.finditer(re.escape(text), message)
            for place in range(*match.span())
        }
        assert len(found) >= len(message) / 3, message


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_examples_run_without_a_gpu(example: Path, run_script: Run) -> None:
    # Half of their time goes into making programs fast that run for milliseconds.
    run_script(example.read_text(), XLA_FLAGS=os.environ["XLA_FLAGS"])


def test_the_table_of_examples_names_each_of_them_and_every_strategy() -> None:
    table = (ROOT / "examples/README.md").read_text()
    listed = re.findall(r"^\| \[([\w.]+)\]", table, re.M)
    assert {example.name for example in EXAMPLES} <= {*listed}
    makers = [getattr(mw, name) for name in mw.__all__]
    strategies = [m for m in makers if isinstance(m, type) and issubclass(m, Strategy)]
    assert len(strategies) >= 11
    for strategy in strategies:
        assert f"`{strategy.__name__}`" in table, strategy


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
