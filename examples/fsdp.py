"""Weights and optimizer state, split over the devices: what each of them holds.

The same network under `Mirrored`, where every device has all of it, and under `FSDP`,
where each has a quarter and gathers weights when it uses them. Prints the bytes per
device and what travels instead, where each weight is split, and that the weights are
those of one device. Takes about 6 seconds on a two-core machine. With four or more GPUs
it uses them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

BATCH = 200
if len(mw.devices("GPU")) < 4:
    mw.configure(virtual="GPU:4")  # the CPU plays four GPUs
x, y, x_test, y_test = load_digits()


def make_model():
    """A classifier of digits whose first layer is large."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(512, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="scores"),
    ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers], name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)  # else the first step does it
    return model


def mebibytes_per_device(model):
    """What the first device holds of the weights and of Adam's two slots for each."""
    variables = [*model.variables, *model.optimizer.variables]
    parts = [variable.value.addressable_shards[0].data for variable in variables]
    return sum(part.nbytes for part in parts) / 2**20


for strategy in (mw.Mirrored(), mw.FSDP(4)):
    with strategy.scope():  # made split: no device ever holds the whole model
        model = make_model()
    held = f"{mebibytes_per_device(model):.2f} MiB on each device"
    travels = strategy.explain(model, x[:BATCH], y[:BATCH]).collectives
    print(f"{strategy}: {held}; in a step travel {travels}")

model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"{accuracy:.1%} of the test images are right\n")
assert accuracy > 0.7

print(f"{strategy.explain(model, x[:BATCH], y[:BATCH])}\n")
report = mw.verify(make_model(), x, y, strategy, batch_size=BATCH)
print(report)
assert report.ok
