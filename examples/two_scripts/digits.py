"""A small classifier of digits; see README.md beside it."""

import os

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

print("sees", *mw.devices(), "and cores", sorted(os.sched_getaffinity(0)))
digits = load_digits()
layers = [
    keras.Input((28, 28, 1)),
    keras.layers.Flatten(),
    keras.layers.Dense(32, activation="relu"),
    keras.layers.Dense(10),
]
model = keras.Sequential(layers)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(digits.x_train, digits.y_train, epochs=5, verbose=2)
_, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
print(f"accuracy on new digits: {accuracy:.3f}")
