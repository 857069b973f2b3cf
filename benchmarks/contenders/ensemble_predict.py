"""Contender: members of an ensemble answer, on one core each.

With `--members 1` one process on one core holds one member, with `--members 2` each of
two processes on a core of its own holds one.
"""

from typing import Any

from contender import Follower, follow, free_address, pin, serve
from jobs import arguments, describe_data, job_of, keras_model, load
from keras_fit import join, leave


def options_of() -> Any:
    """What the command line says."""
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--stock", action="store_true", help="Keras' own predict")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--address", default=None)
    return parser.parse_args()


def main() -> None:
    """Asks in this process, or in this one and another."""
    options = options_of()
    options.processes = options.members
    pin(options.rank)
    if options.members == 1:
        ask(options)
        return
    address = options.address or free_address()
    follower = None if options.rank else Follower(address)
    join(options, address)
    ask(options, follower)
    leave(follower)


def ask(options: Any, follower: Follower | None = None) -> None:
    """Builds the members, and serves."""
    import meshwright as mw

    job = job_of(options)
    x, _ = load(job, options.data)
    models = [keras_model(job) for _ in range(options.members)]
    if options.stock:
        (model,) = models
    else:
        ensemble = mw.Ensemble(models)

    def repeat() -> dict[str, Any]:
        if follower is not None:
            follower.send_on()
        for _ in range(job.epochs):
            if options.stock:
                model.predict(x, batch_size=job.batch_size, verbose=0)
            else:
                ensemble.predict(x, batch_size=job.batch_size)
        return {}

    if options.rank:
        follow(repeat)
        return
    serve(repeat, steps=job.steps, device="cpu", data=describe_data(options.data, job))


if __name__ == "__main__":
    main()
