"""Two real processes save and restore together, and one what two have saved.

faults.md row 32, and 34 for several processes. They go through the cases of
checkpoint_worker.py.
"""

import json
import subprocess
import sys
from pathlib import Path

from meshwright.launch.loopback import free_port
from meshwright.train.checkpoint_store import CheckpointStore

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import damage_of, found, names_in, sharding, snapshot

WORKER = Path(__file__).with_name("checkpoint_worker.py")
NUM_CASES = 5

VALUES = {
    "rows": np.arange(32, dtype=np.float32).reshape(8, 4),
    "large": np.arange(1 << 21, dtype=np.float32).reshape(512, 4096),
    "copies": np.arange(5, dtype=np.int32),
    "stage": np.arange(6, dtype=np.float32),
    "scalar": np.array(7, np.uint32),
    "own": np.arange(3, dtype=np.float32),
}


@pytest.mark.processes
def test_two_processes_share_checkpoints_with_one(tmp_path: Path) -> None:
    arrays = {name: jnp.asarray(value) for name, value in VALUES.items()}
    arrays["rows"] = jax.device_put(VALUES["rows"], sharding(8, "axis"))
    CheckpointStore(tmp_path / "one").save(snapshot(3, arrays), wait=True)
    address = f"127.0.0.1:{free_port()}"
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(index), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        said = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    for worker, (out, err) in zip(workers, said, strict=True):
        lines = [line for line in out.splitlines() if line.startswith('["')]
        outcomes = dict(json.loads(line) for line in lines)
        wrong = {k: v for k, v in outcomes.items() if v != "as it should be"}
        assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())
        assert worker.returncode == 0, err
        assert len(outcomes) == NUM_CASES
    check_what_two_have_saved(tmp_path / "two")


def check_what_two_have_saved(folder: Path) -> None:
    assert names_in(folder) == ["35", "40"]
    assert not damage_of(folder / "35")
    (folder / "40").rename(folder.parent / "40")
    store = CheckpointStore(folder)
    good = found(store)
    assert good.step == 35
    written = {p.process for e in good.manifest.arrays.values() for p in e.pieces}
    assert written == {0, 1}
    places = {
        "rows": sharding(3),
        "large": sharding(8, "axis"),
        "copies": sharding(8),
        "stage": sharding(2, "axis"),
        "scalar": sharding(1),
        "own": sharding(8),
    }
    targets = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=places[name])
        for name, value in VALUES.items()
    }
    for name, array in store.restore(good, targets).items():
        assert array.sharding == places[name]
        np.testing.assert_array_equal(array, VALUES[name])
