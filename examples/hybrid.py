"""Three ways to split at once, along three axes of eight devices.

The batch is split along `data` and `fsdp`, every weight is split along `tensor` (inside
of its layer) and along `fsdp`. Prints the mesh, which part of one weight each device
holds, what travels in a step, and that the weights are those of one device. Takes about
7 seconds on a two-core machine. With eight GPUs it uses them.
"""

import meshwright as mw
from meshwright.data.mnist import load_digits

import keras

BATCH = 128
if len(mw.devices("GPU")) < 8:
    mw.configure(virtual="GPU:8")  # the CPU plays eight GPUs
x, y, *_ = load_digits()


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
    model.compile("adam", loss)
    return model


# The last axis has the closest neighbours, because along it something always travels.
strategy = mw.Hybrid(data=2, fsdp=2, tensor=2, devices=mw.devices("GPU")[:8])
with strategy.scope():
    model = make_model()
losses = model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0).history["loss"]
print("loss by epoch:", *(f"{loss:.3f}" for loss in losses))

kernel = model.get_layer("hidden").kernel
print(f"\n{strategy}: what each device holds of hidden/kernel {kernel.shape}")
parts = zip(strategy.devices, kernel.value.addressable_shards, strict=True)
for number, (device, part) in enumerate(parts):
    axes = f"data {number // 4}, fsdp {number // 2 % 2}, tensor {number % 2}"
    rows, columns = (
        range(*i.indices(n)) for i, n in zip(part.index, kernel.shape, strict=True)
    )
    print(f"  {device} ({axes}): rows {rows[0]} to {rows[-1]}", end=", ")
    print(f"columns {columns[0]} to {columns[-1]}")
print(f"a step has {strategy.explain(model, x[:BATCH], y[:BATCH]).collectives}\n")

report = mw.verify(make_model(), x, y, strategy, batch_size=BATCH)
print(report)
assert report.ok
