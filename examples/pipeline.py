"""A model in four stages, each on a device: as a pipeline, and one after the other.

Prints which layers are in which stage, the timetable of `Pipeline`, where microbatches
keep the stages busy, and that of `Layerwise`, where one stage computes while the others
wait; where the weights lie after training; and that they are those of one device. Takes
about 8 seconds on a two-core machine. With four or more GPUs it uses them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras
import numpy as np

BATCH = 200
if len(mw.devices("GPU")) < 4:
    mw.configure(virtual="GPU:4")  # the CPU plays four GPUs
x, y, *_ = load_digits()


def make_model():
    """A classifier of digits with six hidden layers."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten()]
    layers += [keras.layers.Dense(256, "tanh", name=f"dense_{i}") for i in range(6)]
    layers.append(keras.layers.Dense(10, name="scores"))
    model = keras.Sequential(layers, name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.2), loss)
    return model


pipeline = mw.Pipeline(4, microbatches=8)
for strategy in (mw.Layerwise(4), pipeline):
    print(strategy)
    print(*strategy.explain(make_model(), x[:BATCH], y[:BATCH]).notes, sep="\n")
    print()

# The step is cut where its stages take equally long; or name the layers that begin one,
# as in mw.Pipeline(["dense_1", "dense_3", "dense_5"], microbatches=8).
model = mw.distribute(make_model(), pipeline)
alone = make_model()
for each in (model, alone):
    fit = each.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    print("loss by epoch:", *(f"{loss:.4f}" for loss in fit.history["loss"]))
print(mw.placement(model))

pairs = zip(model.get_weights(), alone.get_weights(), strict=True)
difference = max(np.abs(ours - theirs).max() for ours, theirs in pairs)
print(f"largest difference to one device: {difference:.1e}")
assert difference < 1e-3
