"""One trial in a process of its own. Run as a file, by `search`, with nothing loaded.

It imports neither Meshwright nor Optuna, so that a trial starts as fast as Python and
the script of its objective do. What the objective asks of its trial, the launcher
answers, one JSON object a line in either direction.
"""

import base64
import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_CHANNEL = "MESHWRIGHT_CHANNEL"
_ORDERS = "MESHWRIGHT_ORDERS"
_PR_SET_PDEATHSIG = 1
_MAIN = "__mp_main__"
_LONGEST = 2000


class Loaded(BaseException):
    """Raised by `mw.tune` when a script that defines an objective comes to it."""


class Line:
    """The line to the launcher."""

    def __init__(self, number: int) -> None:
        self._socket = socket.socket(fileno=number)
        self._answers = self._socket.makefile("r", encoding="utf-8")
        self._asking = threading.Lock()

    def say(self, **facts: Any) -> None:
        """Says something that needs no answer."""
        self._socket.sendall(f"{json.dumps(facts, default=_plain)}\n".encode())

    def ask(self, call: str, *arguments: Any, **named: Any) -> Any:
        """Asks the launcher, and raises what it raised."""
        with self._asking:
            self.say(call=call, arguments=arguments, named=named)
            words = self._answers.readline()
        if not words:
            os._exit(6)  # the launcher is gone
        answer = json.loads(words)
        if "error" in answer:
            kind = getattr(builtins, answer["type"], RuntimeError)
            raise kind(answer["error"])
        return answer["value"]


class Trial:
    """What an objective gets: suggests, reports and prunes as a trial of Optuna's."""

    def __init__(self, line: Line, told: dict[str, Any]) -> None:
        self._line = line
        self.number: int = told["number"]
        self.device: str = told["device"]

    def __repr__(self) -> str:
        return f"Trial(number={self.number}, params={self.params})"

    def suggest_float(
        self,
        name: str,
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
    ) -> float:
        """A number between two others."""
        return self._line.ask("suggest_float", name, low, high, step=step, log=log)

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """A whole number between two others."""
        return self._line.ask("suggest_int", name, low, high, step=step, log=log)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of some values, as it stands there; tuples come back as tuples."""
        told = json.loads(json.dumps(list(choices), default=_plain))
        chosen = self._line.ask("suggest_categorical", name, told)
        return next(
            choice
            for choice, words in zip(choices, told, strict=True)
            if words == chosen and type(words) is type(chosen)  # 1 is not True
        )

    def report(self, value: float, step: int) -> None:
        """Tells how good it is after a step."""
        self._line.ask("report", float(value), int(step))

    def should_prune(self) -> bool:
        """Whether it is not worth going on."""
        return self._line.ask("should_prune")

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keeps something with the trial that fits into JSON."""
        self._line.ask("set_user_attr", key, value)

    @property
    def params(self) -> dict[str, Any]:
        """What has been suggested."""
        return self._line.ask("params")

    @property
    def user_attrs(self) -> dict[str, Any]:
        """What has been kept."""
        return self._line.ask("user_attrs")

    def __getattr__(self, name: str) -> Any:
        here = [each for each in dir(type(self)) if not each.startswith("_")]
        raise AttributeError(
            f"A trial in a process of its own has no {name!r}; it has number, device, "
            f"{', '.join(here)}."
        )


def main() -> None:
    """Runs the objective once, and tells what came of it."""
    if sys.platform == "linux":  # nothing outlives the launcher
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    line = Line(int(os.environ.pop(_CHANNEL)))
    os.environ.pop(_ORDERS, None)  # what the objective starts is no worker
    told = line.ask("begin")
    _settle_in(told)
    try:
        objective = load(told)
    except BaseException as error:
        _end(line, failure={**describe(error, told["file"]), "loading": True})
    try:
        value = objective(Trial(line, told))
    except BaseException as error:
        if any(kind.__name__ == "TrialPruned" for kind in type(error).__mro__):
            _end(line, pruned=True)
        _end(line, failure=describe(error, told["file"]))
    _end(line, **_outcome(value))


def load(told: dict[str, Any]) -> Callable[[Trial], Any]:
    """The objective, from where it was said to be."""
    if told["module"]:
        try:
            return _named(importlib.import_module(told["module"]), told)
        except ModuleNotFoundError:
            if not told["file"]:
                raise
    module = types.ModuleType(_MAIN)
    if told["file"]:
        _run_script(module, told["file"])
    if told["pickled"]:
        return pickle.loads(base64.b64decode(told["pickled"]))  # noqa: S301 (ours)
    return _named(module, told)


def describe(error: BaseException, script: str | None) -> dict[str, Any]:
    """What the launcher is told of an error; all of it goes to the log."""
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == script]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place = f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else None
    return {"text": text.strip()[:_LONGEST], "place": place}


def _settle_in(told: dict[str, Any]) -> None:
    """Takes its cores, and what the launcher's Python knows of paths and arguments."""
    if told["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, told["cores"])
    faulthandler.enable()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    stacks = os.open(told["stacks"], flags, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[:] = told["path"]
    sys.argv[:] = told["argv"]


def _run_script(module: types.ModuleType, file: str) -> None:
    """Runs a script up to its call of `mw.tune`, not as `__main__`."""
    module.__file__ = file
    # As in multiprocessing: pickles find what the script defines.
    sys.modules[_MAIN] = sys.modules["__main__"] = module
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, os.path.dirname(file))
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec")
    module.__dict__["__meshwright_loading__"] = Loaded
    with contextlib.suppress(Loaded):
        exec(code, module.__dict__)  # noqa: S102
    del module.__dict__["__meshwright_loading__"]


def _named(module: types.ModuleType, told: dict[str, Any]) -> Callable[[Trial], Any]:
    found: Any = module
    for part in told["name"].split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    names = [name for name, value in vars(module).items() if callable(value)]
    near = ", ".join(get_close_matches(told["name"], names)) or "nothing like it"
    raise LookupError(
        f"there is no function {told['name']!r}, or it is defined after mw.tune is "
        f"called; there is {near}"
    )


def _outcome(value: Any) -> dict[str, Any]:
    """What a returned value means; a number, or a failure."""
    is_number = not isinstance(value, bool | str | bytes)
    with contextlib.suppress(TypeError, ValueError):
        if is_number:
            return {"value": float(value)}
    text = f"it returned {value!r:.200} (a {type(value).__name__}), not a number"
    return {"failure": {"text": text, "place": None}}


def _end(line: Line, **facts: Any) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    line.say(**facts)
    sys.exit(0)


def _plain(value: Any) -> Any:
    """NumPy's and JAX's numbers as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} (a {type(value).__name__}) does not fit into JSON")


if __name__ == "__main__":
    main()
