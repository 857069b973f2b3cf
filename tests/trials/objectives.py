"""Objectives that trials run; they need nothing, so that trials start at once."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def square(trial: Any) -> float:
    x = trial.suggest_float("x", -1.0, 1.0)
    trial.set_user_attr("pid", os.getpid())
    trial.set_user_attr("cores", sorted(os.sched_getaffinity(0)))
    trial.set_user_attr(
        "sees", {name: os.environ.get(name) for name in os.environ["SHOW"].split(",")}
    )
    return x * x


def plain(trial: Any) -> float:
    return trial.suggest_float("x", -1.0, 1.0) ** 2


def other(trial: Any) -> float:
    return trial.suggest_float("x", -1.0, 1.0) ** 2


def narrow(trial: Any) -> float:
    return trial.suggest_float("x", -0.5, 0.5) ** 2


def crashing(trial: Any) -> float:
    """Fails for the second of its trials, and prints before."""
    x = trial.suggest_float("x", -1.0, 1.0)
    if trial.number == 1:
        print("almost there")
        raise RuntimeError("out of paper")
    return x


def always_crashing(trial: Any) -> float:
    x = trial.suggest_float("x", -1.0, 1.0)
    raise RuntimeError(f"no luck with {x}")


def _is_first_time(number: int) -> bool:
    try:
        Path(f"seen-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _note(x: float) -> None:
    with Path("asked").open("a") as file:
        file.write(f"{x!r}\n")


def killed_once(trial: Any) -> float:
    x = trial.suggest_float("x", -1.0, 1.0)
    _note(x)
    if _is_first_time(0):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def leaves(trial: Any) -> float:
    """The second trial ends its process without a word, whenever it is tried."""
    x = trial.suggest_float("x", -1.0, 1.0)
    if _is_first_time(0):
        return x
    if _is_first_time(1):
        Path("unlucky").write_text(repr(x))
    if Path("unlucky").read_text() == repr(x):
        os._exit(3)
    return x


def hangs_once(trial: Any) -> float:
    x = trial.suggest_float("x", -1.0, 1.0)
    _note(x)
    if _is_first_time(0):
        time.sleep(1000)
    return x


def not_numbers(trial: Any) -> Any:
    trial.suggest_float("x", -1.0, 1.0)
    return [float("nan"), "good", None, 1.0][trial.number]


def always_nan(trial: Any) -> float:
    trial.suggest_float("x", -1.0, 1.0)
    return float("nan")


def nothing_to_search(trial: Any) -> float:
    return 1.0


def empty_choice(trial: Any) -> float:
    return trial.suggest_categorical("x", [])


def pruned(trial: Any) -> float:
    """The first trials are good, the others bad from the first step on."""
    x = trial.suggest_int("x", 1, 3) + (0 if trial.number < 5 else 100)
    for step in range(20):
        trial.report(x, step)
        if trial.should_prune():
            from optuna import TrialPruned

            raise TrialPruned
    return x


def counted(trial: Any) -> float:
    """Waits until the test lets it go."""
    x = trial.suggest_float("x", -1.0, 1.0)
    _note(x)
    Path(f"at-{trial.number}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    while not Path("go").exists():
        assert time.monotonic() < deadline, "the test is gone"
        time.sleep(0.01)
    return x


def reporting(trial: Any) -> float:
    x = counted(trial)
    trial.report(x, 0)
    return x


def shared(trial: Any) -> float:
    """Waits until two launchers take part."""
    x = trial.suggest_float("x", -1.0, 1.0)
    Path(f"by-{os.getppid()}").touch()
    deadline = time.monotonic() + 60
    while len([*Path().glob("by-*")]) < 2:
        assert time.monotonic() < deadline, "nobody else came"
        time.sleep(0.01)
    return x


def any_values(trial: Any) -> float:
    """Gives and takes what is not quite JSON."""
    import numpy as np

    x = trial.suggest_float("x", np.float32(0), np.float64(1))
    layers = trial.suggest_categorical("layers", [(64, 32), (16,)])
    assert isinstance(layers, tuple)
    assert trial.suggest_categorical("one", [True, 1]) in (True, 1)
    assert trial.suggest_categorical("none", [None]) is None
    trial.report(np.float32(x), np.int64(3))
    trial.set_user_attr("half", np.float32(0.5))
    assert trial.params["x"] == x
    assert trial.user_attrs["half"] == 0.5
    wrongs: list[Any] = [
        lambda: trial.study,
        lambda: trial.set_user_attr("x", object()),
    ]
    for wrong in wrongs:
        try:
            wrong()
        except (AttributeError, TypeError) as error:
            print(error)
    return np.float64(x)


class Shifted:
    """An objective with a state."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, trial: Any) -> float:
        return abs(trial.suggest_float("x", -1.0, 1.0)) + self.by
