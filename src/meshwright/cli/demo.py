"""`meshwright demo`: the whole story, on this machine, in under two minutes."""

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.bench.fleet import fleet_of
from meshwright.bench.scaling import measure_scaling
from meshwright.cli.output import json_option, print_json
from meshwright.data.mnist import Digits, load_digits
from meshwright.train.display import How

import click
import numpy as np

_SCRIPT = """\
# An ordinary script: run folder, checkpoints and resuming come from `meshwright train`.
import meshwright as mw
import keras
from meshwright.data.mnist import load_digits

keras.utils.set_random_seed(1)
digits = load_digits()
layers = [
    keras.Input((28, 28, 1)),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu", name="hidden"),
    keras.layers.Dense(10, name="digit"),
]
model = keras.Sequential(layers, name="digits")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
strategy = mw.Auto(memory="400KiB")  # as if devices were too small for the model
mw.distribute(model, strategy).fit(
    digits.x_train,
    digits.y_train,
    batch_size=40,
    epochs=10,
    validation_data=(digits.x_test, digits.y_test),
    verbose=0,
    callbacks=[mw.Monitor(look_after=0.1)],  # what does every device do?
)
"""


@click.command()
@click.option(
    "--run",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where the run of the last part is kept, with its report.",
)
@json_option
def demo(run: Path, as_json: bool) -> None:
    """Show devices, a plan and why, a training, its proof, scaling, and a report."""
    began = time.monotonic()
    say: Callable[[str], None] = (lambda text: None) if as_json else click.echo
    digits = load_digits()
    facts: dict[str, Any] = {"devices": _show_devices(say)}
    facts["operations"] = _show_operations(say)
    facts["plan"] = _show_plan(say)
    facts["training"] = _show_training(say, digits)
    facts["mesh"] = _show_mesh(say, digits, "none" if as_json else "lines")
    facts["scaling"] = _show_scaling(say)
    facts["memory_limit"] = _show_memory_limit(say, digits)
    facts["report"] = _show_run(say, run)
    facts["seconds"] = round(time.monotonic() - began, 1)
    if as_json:
        print_json(facts)
    say(f"\nDone in {facts['seconds']} s. Is this machine ready? {_command()} doctor")


def _command() -> str:
    """How the command is called here: `make` installs it where no shell looks."""
    return "meshwright" if shutil.which("meshwright") else ".venv/bin/meshwright"


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

    keep, logger = Keep(), logging.getLogger("meshwright.placement")
    logger.addHandler(keep)
    # Packages that log may have set up a root that prints the lines as well.
    logger.propagate = False
    mw.set_placement_log(True)
    with mw.device(mw.devices("GPU")[-1]):
        square = keras.ops.ones((2, 2))
        keras.ops.add(keras.ops.matmul(square, square), 1.0)
    mw.set_placement_log(False)
    logger.propagate = True
    logger.removeHandler(keep)
    for line in lines:
        say(f"   {line}")
    return lines


def _show_plan(say: Callable[[str], None]) -> str:
    say("\n3. Which split is best on eight H200, which nobody has here? A prediction.")
    report = mw.plan(_make_model(), batch_size=8192, devices="8xH200")
    say(_indented("\n".join(report.decision())))
    asked = "plan FILE.py:make_model --devices 8xH200 --batch 8192"
    say(f"   All of the argument: {_command()} {asked}")
    assert report.best is not None, "a model this small fits anywhere"
    return report.best.plan.describe()


def _show_training(say: Callable[[str], None], digits: Digits) -> dict[str, Any]:
    gpu, cpu = mw.devices("GPU")[-1].name, mw.devices("CPU")[0].name
    say(f"\n4. A model that was built on {gpu} trains there, and stays there.")
    model, accuracy = _train(digits, gpu)
    say(_indented(str(mw.placement(model))))
    say(f"   accuracy on 500 test digits: {accuracy:.1%}")
    twin, _ = _train(digits, cpu)
    pairs = zip(model.get_weights(), twin.get_weights(), strict=True)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    say(f"   largest difference to the same training on {cpu}: {difference:.2g}")
    places = sorted({name for row in mw.placement(model) for name in row.devices})
    return {"accuracy": accuracy, "devices": places, "difference": difference}


def _show_mesh(
    say: Callable[[str], None], digits: Digits, display: How
) -> dict[str, Any]:
    strategy = mw.Mirrored()
    say(f"\n5. The same training over all GPUs, watched: {strategy}.")
    with strategy.scope():
        model = _make_model()
    x, y = digits.x_train, digits.y_train
    monitor = mw.Monitor(display)
    model.fit(x, y, batch_size=100, epochs=5, verbose=0, callbacks=[monitor])
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    explained = strategy.explain(model, x[:100], y[:100])
    say(f"   a step has {explained.collectives or 'no collectives'}")
    say(f"   accuracy on 500 test digits: {accuracy:.1%}")
    checked = mw.verify(_make_model(), x, y, strategy, batch_size=100, steps=5)
    say("   Does it end as on one device? Each variable after five steps:")
    say(_indented(str(checked)))
    return {"accuracy": float(accuracy), "equal": checked.ok}


def _show_scaling(say: Callable[[str], None]) -> list[Any]:
    say("\n6. What would more devices bring? Steps of the same model, timed here.")
    found = measure_scaling(_make_model(), 1024, fleet_of([1, 2, 4]), weak=False)
    say(_indented("\n".join(map(str, found.tables()))))
    say("\n   Would it be worth the money? On GPUs that can be rented, by prediction:")
    rented = fleet_of(machine="8xH200")
    priced = measure_scaling(_make_model(), 8192, rented, epochs=100, weak=False)
    say(_indented("\n".join(map(str, priced.costs()))))
    return [table.to_json() for table in (*found.tables(), *priced.costs())]


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
        ],
        name="digits",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def _show_memory_limit(say: Callable[[str], None], digits: Digits) -> str:
    import keras

    say("\n7. A step that needs more than its memory limit is refused before it runs.")
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
        say(_indented(str(error)))
        return str(error)
    raise AssertionError("a step of over 64 MiB ran under a limit of 64 MiB")


def _show_run(say: Callable[[str], None], run: Path) -> str:
    """A script as a run, in a process of its own, and its report."""
    script = run.with_name(f"{run.name}.py")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCRIPT, encoding="utf-8")
    say(f"\n8. {script} as a run that is kept, watched from outside, and told of.")
    train = ["train", "--run", str(run), "--resume", "never", str(script)]
    for words in (train, ["report", str(run)]):
        said = _meshwright(*words)
        say(f"   $ {' '.join([_command(), *words])}")
        say(_indented(said.strip()))
    report = run / "report.html"
    say(f"   To look at it: {report.resolve().as_uri()}")
    return str(report)


def _meshwright(*words: str) -> str:
    """What a verb says."""
    done = subprocess.run(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        env={**os.environ, "MESHWRIGHT_VIRTUAL": "GPU:4"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(f"meshwright {words[0]} said: {done.stdout}")
    return done.stdout


def _indented(text: str) -> str:
    return "\n".join(f"   {line}".rstrip() for line in text.splitlines())
