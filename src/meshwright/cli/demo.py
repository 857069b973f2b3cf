"""`meshwright demo`: what works today, on this machine, in under two minutes."""

import logging
import time
from collections.abc import Callable
from typing import Any

import meshwright as mw
from meshwright.cli.output import json_option, print_json
from meshwright.data.mnist import Digits, load_digits

import click
import numpy as np


@click.command()
@json_option
def demo(as_json: bool) -> None:
    """Show devices, placement, training on one and on all devices, a memory limit."""
    began = time.monotonic()
    say: Callable[[str], None] = (lambda text: None) if as_json else click.echo
    facts: dict[str, Any] = {"devices": _show_devices(say)}
    facts["operations"] = _show_operations(say)
    facts["training"] = _show_training(say, load_digits())
    facts["mesh"] = _show_mesh(say, load_digits())
    facts["memory_limit"] = _show_memory_limit(say, load_digits())
    facts["seconds"] = round(time.monotonic() - began, 1)
    if as_json:
        print_json(facts)
    say(f"\nDone in {facts['seconds']} s. Is this machine ready? meshwright doctor")


def _show_devices(say: Callable[[str], None]) -> list[str]:
    say("1. The devices. Without a GPU, the CPU plays four of them.")
    if not mw.devices("GPU"):
        mw.configure(virtual="GPU:4")
    for device in mw.devices():
        say(f"   {device.describe()}")
    return [device.name for device in mw.devices()]


def _show_operations(say: Callable[[str], None]) -> list[str]:
    import keras

    say("\n2. Eager work goes where it is put, and the placement log shows it.")
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep = Keep()
    logging.getLogger("meshwright.placement").addHandler(keep)
    mw.set_placement_log(True)
    with mw.device(mw.devices("GPU")[-1]):
        square = keras.ops.ones((2, 2))
        keras.ops.add(keras.ops.matmul(square, square), 1.0)
    mw.set_placement_log(False)
    logging.getLogger("meshwright.placement").removeHandler(keep)
    for line in lines:
        say(f"   {line}")
    return lines


def _show_training(say: Callable[[str], None], digits: Digits) -> dict[str, Any]:
    gpu, cpu = mw.devices("GPU")[-1].name, mw.devices("CPU")[0].name
    say(f"\n3. A model that was built on {gpu} trains there, and stays there.")
    model, accuracy = _train(digits, gpu)
    say("   " + str(mw.placement(model)).replace("\n", "\n   "))
    say(f"   accuracy on 500 test digits: {accuracy:.1%}")
    twin, _ = _train(digits, cpu)
    pairs = zip(model.get_weights(), twin.get_weights(), strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    say(f"   largest difference to the same training on {cpu}: {difference:.2g}")
    places = sorted({name for row in mw.placement(model) for name in row.devices})
    return {"accuracy": accuracy, "devices": places, "difference": difference}


def _show_mesh(say: Callable[[str], None], digits: Digits) -> dict[str, Any]:
    strategy = mw.Mirrored()
    say(f"\n4. The same training over all GPUs: {strategy}.")
    with strategy.scope():
        model = _make_model()
    x, y = digits.x_train, digits.y_train
    model.fit(x, y, batch_size=100, epochs=5, verbose=0)
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    explained = strategy.explain(model, x[:100], y[:100])
    say(f"   a step has {explained.collectives or 'no collectives'}")
    say(f"   accuracy on 500 test digits: {accuracy:.1%}")
    checked = mw.verify(_make_model(), x, y, strategy, batch_size=100, steps=5)
    say("   " + str(checked).replace("\n", "\n   "))
    return {"accuracy": float(accuracy), "equal": checked.ok}


def _train(digits: Digits, name: str) -> tuple[Any, float]:
    with mw.device(name):
        model = _make_model()
    model.fit(digits.x_train, digits.y_train, batch_size=100, epochs=5, verbose=0)
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    return model, float(accuracy)


def _make_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="digit"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def _show_memory_limit(say: Callable[[str], None], digits: Digits) -> str:
    import keras

    say("\n5. A step that needs more than its memory limit is refused before it runs.")
    mw.configure(memory_limit="64MiB")
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(4096, activation="relu", name="wide"),
            keras.layers.Dense(10, name="digit"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    try:
        model.fit(digits.x_train, digits.y_train, batch_size=2000, verbose=0)
    except mw.errors.MemoryLimitError as error:
        say("   " + str(error).replace("\n", "\n   "))
        return str(error)
    raise AssertionError("a step of over 64 MiB ran under a limit of 64 MiB")
