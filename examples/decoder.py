"""A decoder of 6.7 billion parameters, for the planner; a small one that trains.

    meshwright plan examples/decoder.py:make_model --devices 8xH200 --batch 64

plans for the large one without allocating it. This script trains a small one with the
same layers, its state split over four devices made of the CPU, in ten seconds on two
cores.
"""

import meshwright as mw

import keras
import numpy as np
from keras import layers, ops


def make_model(
    num_layers: int = 32,
    width: int = 4096,
    num_heads: int = 32,
    hidden: int = 11008,
    sequence: int = 2048,
    vocabulary: int = 32000,
) -> keras.Model:
    """A decoder with gated layers, compiled, that predicts the next token."""
    tokens = keras.Input((sequence,), dtype="int32", name="tokens")
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(vocabulary, width, name="words")(tokens)
    x = x + layers.Embedding(sequence, width, name="places")(positions)
    for i in range(num_layers):
        x = x + attend(layers.RMSNormalization()(x), num_heads, f"attention_{i}")
        x = x + compute(layers.RMSNormalization()(x), hidden, f"mlp_{i}")
    x = layers.RMSNormalization()(x)
    scores = layers.Dense(vocabulary, use_bias=False, name="scores")(x)
    model = keras.Model(tokens, scores, name="decoder")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(3e-4), loss)
    return model


def attend(x: keras.KerasTensor, num_heads: int, name: str) -> keras.KerasTensor:
    """What each token learns from those before it."""
    layer = layers.MultiHeadAttention(
        num_heads, x.shape[-1] // num_heads, use_bias=False, name=name
    )
    return layer(x, x, use_causal_mask=True)


def compute(x: keras.KerasTensor, hidden: int, name: str) -> keras.KerasTensor:
    """What each token makes of it."""
    gate = layers.Dense(hidden, "silu", use_bias=False, name=f"{name}_gate")(x)
    up = layers.Dense(hidden, use_bias=False, name=f"{name}_up")(x)
    down = layers.Dense(x.shape[-1], use_bias=False, name=f"{name}_down")
    return down(gate * up)


def main() -> None:
    """Trains a small one to count."""
    mw.configure(visible=[], virtual=4)
    keras.utils.set_random_seed(0)
    with mw.FSDP().scope():
        model = make_model(2, 64, 4, 128, sequence=16, vocabulary=32)
    starts = np.random.default_rng(0).integers(0, 32, (512, 1))
    counting = (starts + np.arange(17)) % 32
    x, y = counting[:, :-1].astype("int32"), counting[:, 1:].astype("int32")
    history = model.fit(x, y, batch_size=64, epochs=5, verbose=0).history["loss"]
    print(f"{model.count_params():,} parameters, loss by epoch:")
    print(*(f"{loss:.3f}" for loss in history))


if __name__ == "__main__":
    main()
