"""A training that is watched, and the page that is left of it.

Prints progress, speed and where the time goes while it trains, and makes
`runs/watched/report.html`, one file with curves, times and what lay where. Takes about
6 seconds on a two-core machine. With several GPUs it uses them.
"""

import subprocess
import sys
from pathlib import Path

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

if len(mw.devices("GPU")) < 2:
    mw.configure(virtual="GPU:4")  # the CPU plays four GPUs
x, y, x_test, y_test = load_digits()

keras.utils.set_random_seed(1)
strategy = mw.Mirrored()
with strategy.scope():
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="scores"),
    ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers], name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

monitor = mw.Monitor(run="runs/watched")
model.fit(
    x,
    y,
    batch_size=100,
    epochs=5,
    verbose=0,  # or Keras' own bar stands beside it
    validation_data=(x_test, y_test),
    callbacks=[monitor],
)
print("\nwhat the time of the steps of each epoch went into:")
for epoch, spent in enumerate(monitor.spent, start=1):
    parts = ("devices", "input", "host", "compile")
    shares = ", ".join(f"{part} {spent.share(part):.0%}" for part in parts)
    print(
        f"  epoch {epoch}, {spent.samples_per_second:,.0f} samples a second: {shares}"
    )

# The same as in a shell: meshwright report runs/watched
command = Path(sys.executable).with_name("meshwright")
subprocess.run([command, "report", "runs/watched"], check=True)
