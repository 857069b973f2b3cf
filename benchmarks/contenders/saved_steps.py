"""Contender: training steps over a mesh of one device, with or without checkpoints.

With `--save-every`, a save begins at the first step and after every so many, and the
last one is waited for: what it costs is in the time of the steps. With `--alone` there
are no steps, and the seconds are those of the processor that a save takes, before it
returns and beside the training.
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
    """Runs the job's steps on one batch, again and again."""
    parser = arguments(__doc__)
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0 is never")
    parser.add_argument("--alone", action="store_true", help="saves, and no steps")
    options = parser.parse_args()
    job = job_of(options)
    x, y = load(job, options.data)
    batch = x[: job.batch_size], y[: job.batch_size]
    model: Any = keras_model(job)
    strategy = mw.Mirrored([mw.devices()[0]])
    mw.distribute(model, strategy)
    step: Any = jax.jit(model.train_step, donate_argnums=0)
    step = MeshStep(model, step, strategy.plan, strategy.mesh)
    placed: Any = step.put(batch)
    state = training_state(model, batch)
    store = CheckpointStore(Path(tempfile.mkdtemp()) / "checkpoints")
    done, blocked = 0, 0.0

    def save() -> None:
        nonlocal blocked
        arrays = {f"state/{i}": leaf for i, leaf in enumerate(jax.tree.leaves(state))}
        # The steps before are waited for here, which costs no time of theirs.
        jax.block_until_ready(state)
        began = time.perf_counter()
        store.save(Snapshot(done, arrays, {}, {"step": done}))
        blocked += time.perf_counter() - began

    def repeat() -> dict[str, Any]:
        nonlocal state, done, blocked
        blocked = 0.0
        for number in range(job.steps):
            if options.save_every and number % options.save_every == 0:
                save()
            logs, state = step(state, placed)
            done += 1
        jax.block_until_ready(state)
        store.wait()
        assert store.failure is None
        return {"loss": float(logs["loss"]), "blocked_seconds": blocked}

    def save_alone() -> dict[str, Any]:
        began = time.process_time()
        save()
        store.wait()
        assert store.failure is None
        return {"seconds": time.process_time() - began}

    if options.alone:
        serve(save_alone, steps=1, device=jax.devices()[0].device_kind)
        return
    serve(repeat, steps=job.steps, device=jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
