"""Saves checkpoints in processes that are killed; started by test_checkpoint_kills.py.

`python checkpoint_saver.py CASES`: a JSON list of cases, each with

- `folder`: that of the checkpoints,
- `step`: which one is saved,
- `call`: before which of its calls to the system the process kills itself, or
- `delay`: after how many seconds it is killed; without both it is not.

Prints the exit status of each, and how many calls it had made. Everything is imported
once, and each case is a fork, which has a JAX of its own.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from meshwright.train.checkpoint_store import CheckpointStore, Snapshot

import numpy as np

CALLS = ("mkdir", "fsync", "rename", "unlink", "rmdir")
KEEP = 2


def arrays(step: int) -> dict[str, Any]:
    """Small ones and one that is large enough to be caught while it is written."""
    import jax.numpy as jnp

    return {
        "weights/kernel": jnp.full((40, 4), step),
        "weights/bias": jnp.full(4, step),
        "optimizer/large": jnp.full(3 << 18, step),
    }


def count_calls(last: int | None, to_parent: int) -> None:
    """Tells each call, and lets the process kill itself before one."""
    number = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal number
            if number == last:
                os.kill(os.getpid(), signal.SIGKILL)
            number += 1
            os.write(to_parent, b".")
            return function(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def save(case: dict[str, Any], to_parent: int) -> None:
    store = CheckpointStore(Path(case["folder"]), keep=KEEP)
    snapshot = Snapshot(
        case["step"], arrays(case["step"]), {"callback/best": np.arange(3)}, {}
    )
    os.write(to_parent, b"b")
    count_calls(case.get("call"), to_parent)
    store.save(snapshot, wait=True)
    assert store.failure is None, store.failure


def run(case: dict[str, Any]) -> tuple[int, int]:
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(from_child)
            save(case, to_parent)
            status = 0
        finally:
            os._exit(status)
    os.close(to_parent)
    os.read(from_child, 1)
    if "delay" in case:
        time.sleep(case["delay"])
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    number = 0
    while word := os.read(from_child, 4096):
        number += len(word)
    os.close(from_child)
    return status, number


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(run(case)), flush=True)
