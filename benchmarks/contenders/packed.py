"""Contender: the tiny network, packed; the seconds are those of one member."""

import time
from typing import Any

import meshwright as mw

import jax
from contender import serve
from jobs import arguments, describe_data, job_of, load
from packed_members import make_training


def main() -> None:
    """Trains the job's epochs of all members at every repetition."""
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument(
        "--shares", action="store_true", help="all in the same order of samples"
    )
    parser.add_argument("--devices", type=int, default=1, help="virtual ones")
    options = parser.parse_args()
    if options.devices > 1:
        mw.configure(virtual=options.devices)
    job = job_of(options)
    x, y = load(job, options.data)
    began = time.perf_counter()
    training = make_training(x, y, options.members, shares=options.shares)
    making = time.perf_counter() - began

    def repeat() -> dict[str, Any]:
        began = time.perf_counter()
        training.run(job.epochs)
        seconds = time.perf_counter() - began
        loss = training.histories[0]["loss"][-1]
        return {"seconds": seconds / options.members, "loss": loss}

    serve(
        repeat,
        steps=job.steps,
        members=options.members,
        making_seconds=making,
        device=str(jax.devices()[0].device_kind),
        data=describe_data(options.data, job),
    )


if __name__ == "__main__":
    main()
