"""How `make docs` makes HTML of the pages: Sphinx, with MyST for Markdown.

The source folder is the repository itself, so a link from a page to a result in
`benchmarks/` or a script in `examples/` is the same in the HTML as on disk.
"""

import re
from dataclasses import is_dataclass
from typing import Any

from sphinx.ext.napoleon import Config, GoogleDocstring

project = "Meshwright"
html_title = "Meshwright"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/results/*.md",
    "examples/**.md",
    "*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests"]

# Anchors as GitHub makes them, down to the fourth level.
myst_heading_anchors = 4
# The tables of results begin at the third level, under the title.
suppress_warnings = ["myst.header"]

# Docstrings write code between single backticks.
default_role = "code"
autodoc_member_order = "bysource"
maximum_signature_line_length = 88

# Types of other packages have no page here.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(collections|datetime|jax|jaxlib|keras|numpy|os|pathlib|typing)\..*"
        r"|Base(Sampler|Pruner)",  # Optuna's
    )
]


def read_sections(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Reads the sections of a docstring, as `sphinx.ext.napoleon` does."""
    text = "\n".join(lines)
    if what == "module":  # what it draws is shown as it is
        text = re.sub(r"\n\n(?=    )", "\n\n::\n\n", text)
    if what in ("attribute", "property"):  # no type stands in front of a colon
        what = "method"
    config = Config(napoleon_use_rtype=False)
    lines[:] = GoogleDocstring(text, config, app, what, name, obj, options).lines()


def leave_out_fields(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Leaves out the arguments of answers, whose fields are explained below them."""
    is_answer = is_dataclass(obj) and name.count(".") > 1
    return ("", None) if is_answer else (signature, returned)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", read_sections)
    app.connect("autodoc-process-signature", leave_out_fields)
