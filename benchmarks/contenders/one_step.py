"""Contender: the same training step of Keras', under plain `jax.jit` or over a mesh.

Without `fit`: batches lie on the device, and steps are dispatched one after the other.
"""

from typing import Any

import meshwright as mw
from meshwright.train.mesh_step import MeshStep, training_state

import jax
from contender import serve
from jobs import arguments, job_of, keras_model, load


def main() -> None:
    """Runs the job's steps on one batch, again and again."""
    parser = arguments(__doc__)
    parser.add_argument("--mesh", action="store_true", help="a mesh of one device")
    options = parser.parse_args()
    job = job_of(options)
    x, y = load(job, options.data)
    batch = x[: job.batch_size], y[: job.batch_size]
    model: Any = keras_model(job)
    step: Any = jax.jit(model.train_step, donate_argnums=0)
    placed: Any = jax.device_put(batch)
    if options.mesh:
        strategy = mw.Mirrored([mw.devices()[0]])
        mw.distribute(model, strategy)
        step = MeshStep(model, step, strategy.plan, strategy.mesh)
        placed = step.put(batch)
    state = training_state(model, batch)

    def repeat() -> dict[str, Any]:
        nonlocal state
        for _ in range(job.steps):
            logs, state = step(state, placed)
        jax.block_until_ready(state)
        return {"loss": float(logs["loss"])}

    serve(repeat, steps=job.steps, device=jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
