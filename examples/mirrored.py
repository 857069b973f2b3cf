"""The plain strategy: every device has the whole model, and a part of each batch.

Prints what each device holds, what travels in a step, how often the trained network is
right, and that its weights are those of one device. Takes about 5 seconds on a two-core
machine. With several GPUs it uses them all.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

BATCH = 128
if len(mw.devices("GPU")) < 2:
    mw.configure(virtual="GPU:4")  # the CPU plays four GPUs
x, y, x_test, y_test = load_digits()


def make_model():
    """An ordinary classifier of digits."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="scores"),
    ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers], name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


strategy = mw.Mirrored()  # or with devices=["GPU:0", "GPU:2"]
with strategy.scope():
    model = make_model()
print(mw.placement(model))

# The batch is that of all devices together: each computes its part of the 128 samples.
model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
travels = strategy.explain(model, x[:BATCH], y[:BATCH]).collectives
print(f"\n{strategy}: {accuracy:.1%} of the test images are right")
print(f"{BATCH // strategy.num_replicas} samples of each batch are computed per device")
print(f"what travels in a step, which is the sum of the gradients: {travels}\n")
assert accuracy > 0.7

report = mw.verify(make_model(), x, y, strategy, batch_size=BATCH)
print(report)
assert report.ok
