"""One device keeps the variables and updates them; two others compute gradients.

Takes about 10 seconds on a two-core machine; the largest difference to one device is
below 1e-5.
"""

import meshwright as mw

import keras
import numpy as np

mw.configure(visible=[], virtual=3)  # three devices made of the CPU

rng = np.random.default_rng(0)
x = rng.normal(size=(203, 16)).astype(np.float32)  # the last batch has 11
y = np.sin(x[:, :4])


def make_model():
    """The same model each time."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32), keras.layers.BatchNormalization()]
    layers += [keras.layers.ReLU(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def train(model):
    """Three epochs, in the same order each time."""
    model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


alone = train(make_model())
strategy = mw.CentralStorage("CPU:0", devices=["CPU:1", "CPU:2"])
model = mw.distribute(make_model(), strategy)
central = train(model)

print(mw.placement(model))
pairs = zip(alone, central, strict=True)
print("largest difference to one device:", max(abs(a - b).max() for a, b in pairs))
print(str(strategy.explain(model, x[:32], y[:32])).split("\n")[-1])
