"""A model with two towers, each put on a GPU of its own by hand.

One tower sees the upper half of a digit, the other one the lower half, and a layer on
the first GPU joins them. Towers compute at the same time, because neither needs the
other. Prints where each operation runs, where the weights are, and the difference to
the same model on one device. Takes about 6 seconds on a two-core machine. With two or
more GPUs it uses them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras
import numpy as np

if len(mw.devices("GPU")) < 2:
    mw.configure(virtual="GPU:2")  # the CPU plays two GPUs
x, y, x_test, y_test = load_digits()


def make_model(*devices):
    """The two towers, on one device each, joined on that of the first one."""
    keras.utils.set_random_seed(1)
    upper, lower = keras.Input((14, 28, 1)), keras.Input((14, 28, 1))
    seen = []
    for name, half, device in zip(
        ("upper", "lower"), (upper, lower), devices, strict=True
    ):
        with mw.device(device):
            pixels = keras.layers.Flatten(name=f"{name}_pixels")(half)
            tower = keras.layers.Dense(64, activation="tanh", name=name)
            seen.append(tower(pixels))
    with mw.device(devices[0]):
        joined = keras.layers.Concatenate(name="joined")(seen)
        scores = keras.layers.Dense(10, name="scores")(joined)
        model = keras.Model([upper, lower], scores, name="towers")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss, metrics=["accuracy"])
    return model


def train(model):
    """The weights after three epochs, and how many test images are right."""
    halves, test_halves = ([a[:, :14], a[:, 14:]] for a in (x, x_test))
    model.fit(halves, y, batch_size=100, epochs=3, shuffle=False, verbose=0)
    _, accuracy = model.evaluate(test_halves, y_test, verbose=0)
    return model.get_weights(), accuracy


towers = make_model("GPU:0", "GPU:1")
mw.set_placement_log(True)
towers([x[:1, :14], x[:1, 14:]])
mw.set_placement_log(False)
weights, accuracy = train(towers)
print(mw.placement(towers))
alone, _ = train(make_model("GPU:0", "GPU:0"))
difference = max(np.abs(a - b).max() for a, b in zip(weights, alone, strict=True))
print(f"{accuracy:.1%} right; largest difference to one device: {difference:.1e}")
assert accuracy > 0.7
assert difference < 1e-3
