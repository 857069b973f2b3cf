"""Contender: the hand-written loop of `floors.py`.

A repetition begins with NumPy arrays, as a call of `fit` does.
"""

from typing import Any

import jax
from contender import serve
from floors import make_floor
from jobs import arguments, describe_data, job_of, load


def main() -> None:
    """Trains the job's epochs at every repetition, and prints each as a user would."""
    parser = arguments(__doc__)
    parser.add_argument("--precision", default="float32")
    parser.add_argument(
        "--test", action="store_true", help="from the start each time, with accuracy"
    )
    options = parser.parse_args()
    job = job_of(options)
    arrays = load(job, options.data)
    test = [jax.device_put(a) for a in load(job, options.data, "test")]
    state, epoch, hits = make_floor(job, options.precision)
    key = jax.random.key(0)

    def repeat() -> dict[str, Any]:
        nonlocal state, key
        data = [jax.device_put(array) for array in arrays]
        for number in range(job.epochs):
            key, now = jax.random.split(key)
            state, means = epoch(state, *data, now)
            loss, accuracy = means.tolist()
            print(f"epoch {number}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        return {"loss": loss, "accuracy": accuracy}

    first = jax.device_get(state)

    def reset() -> None:
        nonlocal state
        state = jax.device_put(first)

    def tested() -> dict[str, float]:
        return {"test_accuracy": int(hits(state, *test)) / len(test[1])}

    device = jax.devices()[0].device_kind
    facts = {"device": device, "data": describe_data(options.data)}
    around: dict[str, Any] = {}
    if options.test:
        around = {"before": reset, "after": tested}
    serve(repeat, **around, steps=job.steps, **facts)


if __name__ == "__main__":
    main()
