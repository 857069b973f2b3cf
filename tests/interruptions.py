"""Runs in this process: what a launcher would ask for, without one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.cluster.orders import Orders
from meshwright.strategies import attach
from meshwright.train import run as run_module
from meshwright.train.run import Run

import keras
import numpy as np
import pytest

Bits = dict[str, bytes]


class Interrupted(Exception):
    """What stops a training here, in place of a kill."""


@contextmanager
def taking_part(folder: Path, **orders: Any) -> Iterator[Run]:
    """Runs what is inside as a process that a launcher has started."""
    folder.mkdir(exist_ok=True)
    run = Run(Orders(run=str(folder), launched_at=time.time(), **orders))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attach, "current_run", lambda: run)
        patch.setattr(run_module, "current_run", lambda: run)
        yield run
        run.store.wait()


def stop_before(run: Run, step: int) -> None:
    """Lets the run be interrupted before the dispatch that has this step."""

    def strike(first: int, last: int) -> bool:
        if step <= last:
            # What was saved before is complete: a kill that comes earlier only means
            # that more has to be done again.
            run.store.wait()
            raise Interrupted
        return False

    run.injector.strike = strike  # type: ignore[method-assign]


Train = Callable[[], Any]


def start_of_script(seed: int = 7) -> None:
    """Names and chance are as at the start of a process."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)


def bits_of(model: Any) -> Bits:
    """Every bit of the weights, the optimizer and the metrics."""
    variables = [*model.variables, *model.optimizer.variables]
    return {v.path: np.asarray(v).tobytes() for v in variables}


def in_one_go(train: Train, folder: Path, **orders: Any) -> Any:
    """What a script leads to that nothing interrupts."""
    start_of_script()
    with taking_part(folder, **orders):
        return train()


def interrupt(train: Train, folder: Path, step: int, **orders: Any) -> None:
    """Runs a script that is interrupted before this step."""
    start_of_script()
    with taking_part(folder, **orders) as run:
        stop_before(run, step)
        with pytest.raises(Interrupted):
            train()


def with_interruptions(train: Train, folder: Path, *steps: int, **orders: Any) -> Any:
    """What it leads to if it is interrupted before these steps, and started again."""
    for step in steps:
        interrupt(train, folder, step, **orders)
    return in_one_go(train, folder, **orders)
