"""Contender: saves of the state of a training, with nothing beside them.

The seconds are those of the processor that a save takes, before it returns and in its
thread.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.train.checkpoint_store import CheckpointStore, Snapshot
from meshwright.train.mesh_step import MeshStep, training_state

import jax
from contender import serve
from jobs import arguments, job_of, keras_model, load


def main() -> None:
    """Saves again and again."""
    options = arguments(__doc__).parse_args()
    job = job_of(options)
    x, y = load(job, options.data)
    batch = x[: job.batch_size], y[: job.batch_size]
    model: Any = keras_model(job)
    strategy = mw.Mirrored([mw.devices()[0]])
    mw.distribute(model, strategy)
    step: Any = jax.jit(model.train_step, donate_argnums=0)
    step = MeshStep(model, step, strategy.plan, strategy.mesh)
    _, state = step(training_state(model, batch), step.put(batch))
    arrays = {f"state/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
    jax.block_until_ready(state)
    store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints")

    def save() -> dict[str, Any]:
        began = time.process_time()
        store.save(Snapshot(20, arrays, {}, {}), wait=True)
        assert store.failure is None
        return {"seconds": time.process_time() - began}

    serve(save, steps=1, device=jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
