"""Contender: a network with two workers, one of which takes four times as long.

Nobody can slow one virtual device down, so a delay is added: three times what a part of
a batch takes alone, which is measured before. Synchronously everybody waits for the
slow one, so every step takes so much longer; asynchronously its own batches do.
"""

import time
from typing import Any

from contender import serve
from jobs import arguments, describe_data, job_of, keras_model, load

SLOW = 4.0
STALENESS = 8


def main() -> None:
    """Builds the job's model under a strategy, and serves."""
    parser = arguments(__doc__)
    parser.add_argument("--strategy", choices=["mirrored", "async"], required=True)
    options = parser.parse_args()
    job = job_of(options)
    import meshwright as mw

    mw.configure(virtual=2)
    import keras

    x, y = load(job, options.data)
    part = seconds_of_a_part(job, x, y)
    is_synchronous = options.strategy == "mirrored"
    strategy: Any = mw.Mirrored() if is_synchronous else mw.AsyncServer(STALENESS)
    if not is_synchronous:
        strategy.delays = {1: (SLOW - 1) * part}
    model = mw.distribute(keras_model(job), strategy)

    class WaitForTheSlowOne(keras.callbacks.Callback):
        """What the other worker does in the meantime."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # the step is done
            time.sleep((SLOW - 1) * part)

    def repeat() -> dict[str, Any]:
        callbacks = [WaitForTheSlowOne()] if is_synchronous else []
        settings = {"epochs": job.epochs, "verbose": 0, "callbacks": callbacks}
        history = model.fit(x, y, batch_size=job.batch_size, **settings)
        return {name: values[-1] for name, values in history.history.items()}

    def after() -> dict[str, Any]:
        if is_synchronous:
            return {}
        return {"mean_staleness": strategy.staleness.mean}

    serve(
        repeat,
        after=after,
        steps=job.steps,
        part_seconds=part,
        data=describe_data(options.data, job),
    )


def seconds_of_a_part(job: Any, x: Any, y: Any) -> float:
    """What a worker alone takes for half of a batch: the median of some."""
    import meshwright as mw

    model = mw.distribute(keras_model(job), mw.Single())
    half = job.batch_size // 2
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        model.train_on_batch(x[:half], y[:half])
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]


if __name__ == "__main__":
    main()
