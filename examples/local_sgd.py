"""Local SGD and DiLoCo beside synchronous training: the loss, and what travels.

Four workers train on their own and agree in every 8th step. Takes about 20 seconds on a
two-core machine; an agreement every 8 steps sends about an eighth of the bytes.
"""

import meshwright as mw

import keras
import numpy as np

mw.configure(visible=[], virtual=4)  # four devices made of the CPU

rng = np.random.default_rng(0)
x = rng.normal(size=(2048, 16)).astype(np.float32)
y = np.sin(x @ rng.normal(size=(16, 4))).astype(np.float32)


def make_model():
    """The same model each time."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(keras.optimizers.Adam(0.003), "mse")
    return model


nesterov = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
strategies = {
    "synchronous": mw.Mirrored(),
    "local SGD": mw.LocalSGD(sync_every=8),
    "DiLoCo": mw.LocalSGD(sync_every=8, outer=nesterov),
}
for name, strategy in strategies.items():
    model = mw.distribute(make_model(), strategy)
    loss = model.fit(x, y, batch_size=64, epochs=8, verbose=0).history["loss"]
    print(f"{name:<12} loss {loss[0]:.3f} -> {loss[-1]:.3f}")

told = strategies["local SGD"].explain(make_model(), x[:64], y[:64])
print(str(told).split("\n")[-1])
