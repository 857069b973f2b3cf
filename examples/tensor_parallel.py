"""A small transformer whose weights are split inside of its layers.

Each device computes all samples, but only its heads of the attention and its part of
the features of the dense layers. Prints how each weight is split and why (columns, then
rows, so that only the sum at the end of a pair travels), what travels, and that the
weights are those of one device. Takes about 8 seconds on a two-core machine. With two
or more GPUs it uses them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

BATCH = 100
if len(mw.devices("GPU")) < 2:
    mw.configure(virtual="GPU:2")  # the CPU plays two GPUs
x, y, *_ = load_digits()
x = x[..., 0]


def make_model():
    """One block of a transformer, over the rows of a digit."""
    keras.utils.set_random_seed(1)
    rows = keras.Input((28, 28))  # an image is a sentence: its rows are the words
    attention = keras.layers.MultiHeadAttention(4, 8, use_bias=False, name="attention")
    words = rows + attention(rows, rows)
    wide = keras.layers.Dense(128, activation="relu", name="wide")(words)
    words = words + keras.layers.Dense(28, name="narrow")(wide)
    scores = keras.layers.Dense(10, name="scores")(keras.layers.Flatten()(words))
    model = keras.Model(rows, scores, name="transformer")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    return model


strategy = mw.TensorParallel(2)
with strategy.scope():
    model = make_model()
losses = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
print("loss by epoch:", *(f"{loss:.3f}" for loss in losses))
print(f"\n{strategy.explain(model, x[:BATCH], y[:BATCH])}\n")

report = mw.verify(make_model(), x, y, strategy, steps=1, batch_size=BATCH)
print(report)
assert report.ok
