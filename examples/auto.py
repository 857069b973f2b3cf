"""The planner chooses the strategy, and says why the others lost.

Prints the plan with which it trains on the devices that are here, and the one for eight
H200, which need not be. All of its times are predictions. Takes about 5 seconds on a
two-core machine. With several GPUs it plans for them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

BATCH = 500
if len(mw.devices("GPU")) < 2:
    mw.configure(virtual="GPU:4")  # the CPU plays four GPUs
x, y, *_ = load_digits()


def make_model():
    """A classifier of digits of 1.7 million weights."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(1024, activation="relu", name="hidden"),
        keras.layers.Dense(896, activation="relu", name="more"),
        keras.layers.Dense(10, name="scores"),
    ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *layers], name="digits")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


model = make_model()
strategy = mw.Auto()  # or only mw.distribute(model, "auto")
mw.distribute(model, strategy)
model.fit(x, y, batch_size=BATCH, verbose=0)  # now the batch is known, and it chooses
print(f"Here, with batches of {BATCH}: {strategy}")
print(*strategy.report.decision(), sep="\n")

report = mw.plan(make_model(), batch_size=16384, devices="8xH200")
print("\nOn eight H200, with batches of 16,384:")
print(*report.decision(), sep="\n")
print(
    "\nprint(report) shows all plans that were considered, with time, memory and money."
)
