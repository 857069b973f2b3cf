"""The function that is to be tuned, as another process can find it."""

import base64
import hashlib
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from meshwright.errors import StudyError

_RULE = (
    "Every trial runs in a process of its own, which finds the objective by its file "
    "or module and its name."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Where another process finds a function of a trial."""

    label: str
    """`FILE.py:NAME`, for people."""
    file: Path | None = None
    """The script that is run, up to its call of `mw.tune`, to define it."""
    module: str | None = None
    """The module that is imported for it; `file` is where that lies."""
    name: str | None = None
    """What it is called there."""
    pickled: bytes | None = None
    """What is unpickled if it is no function of a module, a `partial` for example."""

    @property
    def stem(self) -> str:
        """What a study of it is called if nothing is said."""
        file, _, name = self.label.rpartition(":")
        return f"{Path(file).stem.replace('.', '-')}-{name.replace('.', '-')}"

    def digest(self) -> str | None:
        """What stands for the code of its file; None if there is none."""
        if self.file is None or not self.file.is_file():
            return None
        return hashlib.sha256(self.file.read_bytes()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What a process is told."""
        pickled = self.pickled
        return {
            "label": self.label,
            "file": None if self.file is None else str(self.file),
            "module": self.module,
            "name": self.name,
            "pickled": pickled and base64.b64encode(pickled).decode(),
        }


def find_objective(objective: Callable[..., Any] | str) -> Objective:
    """Says where a function, or `'FILE.py:NAME'`, is found.

    >>> import shutil
    >>> find_objective(shutil.copy).label
    'shutil:copy'

    Raises:
        StudyError: It cannot be found by another process, or is no function.
    """
    if isinstance(objective, str):
        return _of_text(objective)
    if not callable(objective):
        raise StudyError(
            f"The objective is {objective!r} (a {type(objective).__name__}).",
            "An objective is a function of a trial, or the text FILE.py:NAME.",
            "Write def objective(trial): ..., and give the function itself.",
        )
    name = getattr(objective, "__qualname__", None)
    module = getattr(objective, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return _of_instance(objective)
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside of a function"
        raise StudyError(
            f"The objective {name!r} is {kind}.",
            _RULE,
            "Define it with def at the top level of a file.",
        )
    if module == "__main__":
        return _of_main(name)
    home = getattr(sys.modules.get(module), "__file__", None)
    file = Path(home) if home and home.endswith(".py") else None
    return Objective(label=f"{module}:{name}", file=file, module=module, name=name)


def _of_text(text: str) -> Objective:
    file, _, name = text.rpartition(":")
    if not (file and name) or file.endswith(":"):
        file, name = text, "objective"
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        scripts = [entry.name for entry in path.parent.glob("*.py")]
        near = ", ".join(get_close_matches(path.name, scripts))
        raise StudyError(
            f"The file {file} {what}{f'; near it: {near}' if near else ''}.",
            "An objective is given as FILE.py:NAME, a function of a trial; without a "
            "NAME it is called objective.",
            "Give the path of a file that defines it.",
        )
    return Objective(label=f"{path.name}:{name}", file=path, name=name)


def _of_main(name: str) -> Objective:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    file = _main_file()
    if spec is not None and spec.name != "__main__":  # python -m package.module
        label = f"{spec.name}:{name}"
        return Objective(label=label, file=file, module=spec.name, name=name)
    if file is None:
        raise StudyError(
            f"The objective {name!r} was defined in a notebook or at a prompt.",
            _RULE,
            "Write it into a file (in a notebook: %%writefile objective.py), and give "
            f"'objective.py:{name}'.",
        )
    return Objective(label=f"{file.name}:{name}", file=file, name=name)


def _of_instance(objective: Callable[..., Any]) -> Objective:
    """A `functools.partial`, or an instance with `__call__`."""
    kind = type(objective).__name__
    try:
        pickled = pickle.dumps(objective)
    except Exception as error:  # pickle raises what it likes
        raise StudyError(
            f"The objective, a {kind}, cannot be pickled: {error}.",
            _RULE,
            "Define it with def at the top level of a file.",
        ) from error
    file = _main_file()
    where = file.name if file else "__main__"
    return Objective(label=f"{where}:{kind}", file=file, pickled=pickled)


def _main_file() -> Path | None:
    """The script that Python runs; None at a prompt."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return Path(file).absolute()
