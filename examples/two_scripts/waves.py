"""A small regression; see README.md beside it."""

import os

import meshwright as mw

import keras
import numpy as np

print("sees", *mw.devices(), "and cores", sorted(os.sched_getaffinity(0)))
x = np.linspace(0, 6, 2000, dtype="float32")[:, None]
layers = [
    keras.Input((1,)),
    keras.layers.Dense(64, activation="tanh"),
    keras.layers.Dense(1),
]
model = keras.Sequential(layers)
model.compile(keras.optimizers.Adam(0.01), "mse")
model.fit(x, np.sin(x), epochs=5, batch_size=64, verbose=2)
error = model.evaluate(x, np.sin(x), verbose=0)
print(f"mean squared error: {error:.4f}")
