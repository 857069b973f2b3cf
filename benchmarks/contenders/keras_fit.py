"""Contender: Keras' `fit` with progress bar, CSVLogger and accuracy, as users call it.

`--strategy` says where the model lives: nowhere in particular (stock Keras), under one
of Meshwright's strategies, or under what TensorFlow and Keras bring along.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from contender import Follower, follow, free_address, pin, serve
from jobs import arguments, batches, describe_data, job_of, keras_model, load

Scope = AbstractContextManager[Any]


def meshwright_single(devices: int, levers: dict[str, Any]) -> Scope:
    """One device."""
    import meshwright as mw

    return mw.Single(**levers).scope()


def meshwright_mirrored(devices: int, levers: dict[str, Any]) -> Scope:
    """Every device of this process, virtual ones if asked for, or of all processes."""
    import meshwright as mw

    if devices > 1:
        mw.configure(virtual=devices)
    return mw.Mirrored(**levers).scope()


def meshwright_local(devices: int, levers: dict[str, Any]) -> Scope:
    """Workers that agree in every eighth step."""
    import meshwright as mw

    if devices > 1:
        mw.configure(virtual=devices)
    return mw.LocalSGD(8, **levers).scope()


def meshwright_central(devices: int, levers: dict[str, Any]) -> Scope:
    """Variables on the first device, gradients from all."""
    import meshwright as mw

    if devices > 1:
        mw.configure(virtual=devices)
    return mw.CentralStorage(**levers).scope()


def meshwright_pipeline(devices: int, levers: dict[str, Any]) -> Scope:
    """Two stages, one in each process."""
    import meshwright as mw

    levers["microbatches"] = levers.pop("accumulate")
    return mw.Pipeline(2, **levers).scope()


def meshwright_placed(devices: int, levers: dict[str, Any]) -> Scope:
    """A placement scope and no strategy."""
    import meshwright as mw

    return mw.device("CPU:0")


def meshwright_limited(devices: int, levers: dict[str, Any]) -> Scope:
    """A memory limit and no strategy."""
    import meshwright as mw

    mw.configure(memory_limit="4GiB")
    return nullcontext()


def keras_data_parallel(devices: int, levers: dict[str, Any]) -> Scope:
    """Keras' own distribution over virtual devices of JAX."""
    import jax
    import keras

    jax.config.update("jax_num_cpu_devices", devices)
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return nullcontext()


def tf_mirrored(devices: int, levers: dict[str, Any]) -> Scope:
    """TensorFlow's strategy over logical CPUs."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
    tf.config.set_logical_device_configuration(cpu, parts)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    return tf.distribute.MirroredStrategy(names).scope()


STRATEGIES: dict[str, Callable[[int, dict[str, Any]], Scope]] = {
    "stock": lambda devices, levers: nullcontext(),
    "single": meshwright_single,
    "mirrored": meshwright_mirrored,
    "local": meshwright_local,
    "central": meshwright_central,
    "pipeline": meshwright_pipeline,
    "placed": meshwright_placed,
    "limited": meshwright_limited,
    "keras-data-parallel": keras_data_parallel,
    "tf-mirrored": tf_mirrored,
}


def options_of() -> Any:
    """What the command line says."""
    parser = arguments(__doc__)
    parser.add_argument("--strategy", choices=STRATEGIES, default="stock")
    parser.add_argument("--devices", type=int, default=1, help="virtual ones")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--generator", action="store_true", help="streamed input")
    parser.add_argument("--silent", action="store_true", help="no bar, no callback")
    parser.add_argument(
        "--test", action="store_true", help="from the start each time, with accuracy"
    )
    parser.add_argument("--microbatches", type=int, help="that a batch is cut into")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--pinned", action="store_true", help="to one core each")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument(
        "--save-every", type=int, help="steps; as a process of meshwright train"
    )
    parser.add_argument("--address", default=None)
    return parser.parse_args()


def main() -> None:
    """Trains in this process, or in this one and another."""
    options = options_of()
    if options.save_every:
        take_part_in_run(options.save_every)
    pin(options.rank if options.pinned else None)
    if options.processes == 1:
        train(options)
        return
    address = options.address or free_address()
    follower = None if options.rank else Follower(address)
    join(options, address)
    train(options, follower)
    leave(follower)


def take_part_in_run(save_every: int) -> None:
    """Makes this the process of a run, as its launcher would."""
    from meshwright.cluster.orders import VARIABLE, Orders

    orders = Orders(run=tempfile.mkdtemp(), save_every=save_every)
    os.environ[VARIABLE] = orders.as_text()


def join(options: Any, address: str) -> None:
    """Makes one run of two processes."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, options.processes, options.rank, coordinator_bind_address=address
    )


def leave(follower: Follower | None) -> None:
    """Ends the run of two processes."""
    import jax

    if follower is not None:
        follower.let_go()
    jax.distributed.shutdown()
    if follower is not None:
        follower.wait()


def train(options: Any, follower: Follower | None = None) -> None:
    """Builds the job's model in its scope, and serves."""
    job = job_of(options)
    levers = {} if options.precision is None else {"precision": options.precision}
    levers |= {"accumulate": options.microbatches} if options.microbatches else {}
    levers |= {"remat": True} if options.remat else {}
    scope = STRATEGIES[options.strategy](options.devices, levers)
    import keras

    if options.strategy == "stock" and options.precision == "bfloat16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    with scope:
        model = keras_model(job)
    x, y = load(job, options.data)
    log = Path(tempfile.mkdtemp()) / f"{os.getpid()}.csv"

    def repeat() -> dict[str, Any]:
        if follower is not None:
            follower.send_on()
        callbacks = [] if options.silent else [keras.callbacks.CSVLogger(log)]
        settings = {
            "epochs": job.epochs,
            "verbose": 0 if options.silent else 1,
            "callbacks": callbacks,
        }
        if options.generator:
            settings["steps_per_epoch"] = job.steps // job.epochs
            history = model.fit(batches(job, x, y), **settings)
        else:
            history = model.fit(x, y, batch_size=job.batch_size, **settings)
        return {name: values[-1] for name, values in history.history.items()}

    def tested() -> dict[str, float]:
        _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
        return {"test_accuracy": accuracy}

    if options.rank:
        follow(repeat)
        return
    around: dict[str, Any] = {}
    if options.test:
        test = load(job, options.data, "test")
        around = {"before": reset_of(model), "after": tested}
    serve(
        repeat,
        **around,
        steps=job.steps,
        device=device_kind(keras.config.backend()),
        data=describe_data(options.data, job),
    )


def reset_of(model: Any) -> Callable[[], None]:
    """A function that gives a model the values that it has now."""
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    values = [np.array(variable) for variable in variables]

    def reset() -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    return reset


def device_kind(backend: str) -> str:
    """What computes, by its backend's name."""
    if backend != "jax":
        return "cpu"
    import jax

    return str(jax.devices()[0].device_kind)


if __name__ == "__main__":
    main()
