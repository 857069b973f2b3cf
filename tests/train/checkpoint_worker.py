"""One of two processes that save and restore together; prints what came of each case.

`python checkpoint_worker.py ADDRESS INDEX FOLDER`; started by
test_checkpoint_processes.py.
"""

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw

mw.configure(virtual=2)

import jax  # noqa: E402

ADDRESS, INDEX, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(ADDRESS, 2, INDEX, coordinator_bind_address=ADDRESS)

from meshwright.errors import CheckpointError, CheckpointWarning  # noqa: E402
from meshwright.train import checkpoint_save  # noqa: E402
from meshwright.train.checkpoint_store import (  # noqa: E402
    CheckpointStore,
    Outcome,
    Snapshot,
)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding  # noqa: E402

DEVICES = np.array(jax.devices())
ALL = Mesh(DEVICES, ("axis",))
SECOND = Mesh(DEVICES[2:], ("axis",))
"""A stage of a pipeline, all of whose devices belong to one process."""

PLACES = {
    "rows": NamedSharding(ALL, PartitionSpec("axis")),
    "large": NamedSharding(ALL, PartitionSpec(None, "axis")),
    "copies": NamedSharding(ALL, PartitionSpec()),
    "stage": NamedSharding(SECOND, PartitionSpec("axis")),
    "scalar": NamedSharding(ALL, PartitionSpec()),
    "own": SingleDeviceSharding(jax.local_devices()[0]),
}
VALUES: dict[str, Any] = {
    "rows": np.arange(32, dtype=np.float32).reshape(8, 4),
    "large": np.arange(1 << 21, dtype=np.float32).reshape(512, 4096),
    "copies": np.arange(5, dtype=np.int32),
    "stage": np.arange(6, dtype=np.float32),
    "scalar": np.array(7, np.uint32),
    # As all weights are before the first step of a pipeline: each process has them.
    "own": np.arange(3, dtype=np.float32),
}


def arrays() -> dict[str, jax.Array]:
    return {
        name: jax.make_array_from_callback(
            value.shape,
            PLACES[name],
            lambda index, value=value: value[index],
            dtype=value.dtype,
        )
        for name, value in VALUES.items()
    }


def targets() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=PLACES[name])
        for name, value in VALUES.items()
    }


def snapshot(step: int) -> Snapshot:
    host = {"best": np.array([INDEX, step])}
    return Snapshot(step, arrays(), host, {"process": INDEX})


def check(restored: dict[str, jax.Array]) -> None:
    for name, array in restored.items():
        assert array.sharding == PLACES[name], name
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, VALUES[name][shard.index], name)


def what_one_process_saved_is_restored_by_two() -> None:
    store = CheckpointStore(FOLDER / "one")
    found = store.find_good()
    assert found is not None
    assert found.step == 3
    check(store.restore(found, targets()))


def two_processes_save_and_restore() -> None:
    told: list[Outcome] = []
    store = CheckpointStore(FOLDER / "two", keep=2, told=told.append)
    assert store.find_good() is None
    for step in (10, 20, 30):
        store.save(snapshot(step))
    found = store.find_good()
    assert found is not None
    assert (found.step, found.facts) == (30, {"process": 0})
    np.testing.assert_array_equal(found.host["best"], [0, 30])
    assert [(o.what, o.step) for o in told] == [("saved", s) for s in (10, 20, 30)]
    check(store.restore(found, targets()))


def failing_save(store: CheckpointStore, name: str, process: int) -> str:
    """Saves while something fails in one process; returns what was said."""

    def fail(*what: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if process == INDEX:
            patch.setattr(checkpoint_save, name, fail)
        with pytest.warns(CheckpointWarning):
            store.save(snapshot(99), wait=True)
    assert store.failure is not None
    return store.failure.received


def a_save_that_fails_in_one_process_fails_in_both() -> None:
    store = CheckpointStore(FOLDER / "two", keep=2)
    for name, process in (
        ("check_room", 0),
        ("write_leaves", 0),
        ("write_leaves", 1),
        ("seal_file", 1),
        ("give_name", 0),
    ):
        said = failing_save(store, name, process)
        others = f"Process {process}: " * (process != INDEX)
        assert said.startswith(f"{others}Step 99 was not saved in {FOLDER}/two: No "), (
            name,
            said,
        )
    store.save(snapshot(40), wait=True)
    assert store.failure is None


def both_find_the_same_if_one_sees_damage() -> None:
    store = CheckpointStore(FOLDER / "two", keep=2)
    # Each process looks at every other file: this is one of the second's.
    file = FOLDER / "two/40/arrays/0/array0/.zarray"
    if INDEX == 0:
        data = bytearray(file.read_bytes())
        data[7] ^= 1
        file.write_bytes(data)
    store.save(snapshot(35), wait=True)
    with pytest.warns(
        CheckpointWarning, match="40 in .* arrays/0/array0/.zarray does not have"
    ):
        found = store.find_good()
    assert found is not None
    assert found.step == 35


def another_model_is_refused_by_both() -> None:
    store = CheckpointStore(FOLDER / "one")
    found = store.find_good()
    assert found is not None
    wanted = {k: v for k, v in targets().items() if k != "rows"}
    with pytest.raises(CheckpointError, match="it has, and the model has not, rows"):
        store.restore(found, wanted)


CASES: list[Callable[[], None]] = [
    what_one_process_saved_is_restored_by_two,
    two_processes_save_and_restore,
    a_save_that_fails_in_one_process_fails_in_both,
    both_find_the_same_if_one_sees_damage,
    another_model_is_refused_by_both,
]


def outcome(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return "as it should be"


if __name__ == "__main__":
    for case in CASES:
        came = outcome(case)
        print(json.dumps([case.__name__, came]), flush=True)
        if came != "as it should be":
            os._exit(1)  # or the other one waits in vain
    jax.distributed.shutdown()
