"""A model with its embedding on the CPU and its layers on a GPU.

Large tables in host memory, arithmetic on the accelerator: each layer computes and
trains where it was made. Without a GPU, a stand-in shows the same. Takes about 6
seconds on a two-core machine; the largest difference to the one-device model is below
1e-5.
"""

import meshwright as mw

import keras
import numpy as np

if not mw.devices("GPU"):
    mw.configure(virtual="GPU:1")

keras.utils.set_random_seed(0)
words = keras.Input((12,), dtype="int32")
with mw.device("CPU:0"):
    vectors = keras.layers.Embedding(10_000, 64, name="table")(words)
with mw.device("GPU:0"):
    pooled = keras.layers.GlobalAveragePooling1D(name="pool")(vectors)
    hidden = keras.layers.Dense(32, activation="relu", name="hidden")(pooled)
    scores = keras.layers.Dense(2, name="scores")(hidden)
model = keras.Model(words, scores, name="mixed")

sentences = np.random.default_rng(0).integers(0, 10_000, (8, 12))
mw.set_placement_log(True)
model(sentences)
mw.set_placement_log(False)

with mw.device("CPU:0"):
    twin = keras.models.clone_model(model)
twin.set_weights(model.get_weights())
for each in (model, twin):
    each.compile(optimizer="adam", loss="mse")
    losses = each.fit(sentences, np.ones((8, 2)), epochs=5, verbose=0).history["loss"]
    print(f"{each.name}: loss {losses[0]:.4f} ... {losses[-1]:.4f}")
pairs = zip(model.get_weights(), twin.get_weights(), strict=True)
difference = max(np.abs(ours - theirs).max() for ours, theirs in pairs)
print(f"largest difference to the same model on one device: {difference:.1e}")
print(mw.placement(model))
