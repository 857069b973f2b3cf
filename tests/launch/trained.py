"""An ordinary script, which trains a model on all devices of all processes."""

import os
import time

import meshwright as mw

import keras
import numpy as np

keras.utils.set_random_seed(1)
chance = np.random.default_rng(0)
x = chance.normal(size=(200, 8)).astype("float32")
y = chance.integers(0, 3, 200)
with mw.Mirrored().scope():
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)


def pause(epoch: int, logs: object) -> None:
    """Gives a wish to stop the time to get around."""
    if epoch == 1:
        time.sleep(float(os.environ.get("PAUSE_SECONDS", "0")))


pausing = keras.callbacks.LambdaCallback(on_epoch_end=pause)
history = model.fit(x, y, batch_size=10, epochs=3, callbacks=[pausing], verbose=0)
print("losses", history.history["loss"])
