"""What the memory levers save and cost: `python benchmarks/levers.py`, on a GPU.

Trains a decoder of 168 million parameters (12 blocks, 32 sequences of 512) with Adam
on one device, and prints the temporary memory of the compiled training step and its
time. The figures in docs/strategies.md are from one H200 with JAX 0.11.
"""

import gc
import time
from typing import Any

import meshwright as mw
from meshwright.train.mesh_step import MeshStep, training_state

import jax
import keras
import numpy as np

L = keras.layers
WIDTH, DEPTH, WORDS, LENGTH, BATCH, STEPS = 1024, 12, 8192, 512, 32, 10

LEVERS: list[dict[str, Any]] = [
    {},
    {"remat": True},
    {"accumulate": 4},
    {"accumulate": 4, "remat": True},
    {"precision": "bfloat16"},
    {"precision": "bfloat16", "remat": True},
    {"precision": "float16"},
]


def block(x: Any) -> Any:
    """One block of a decoder."""
    h = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(16, WIDTH // 16)(h, h, use_causal_mask=True)
    h = L.LayerNormalization()(x)
    return x + L.Dense(WIDTH)(L.Dense(4 * WIDTH, activation="gelu")(h))


def make_model() -> keras.Model:
    """The decoder, compiled."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = L.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(DEPTH):
        x = block(x)
    model = keras.Model(inputs, L.Dense(WORDS)(L.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    return model


def measure(levers: dict[str, Any]) -> str:
    """One line: temporary memory, milliseconds of a step, and the loss after it all."""
    words = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH)).astype("int32")
    batch = words, np.roll(words, -1, 1)
    strategy = mw.Single(**levers)
    model = mw.distribute(make_model(), strategy)
    step = MeshStep(model, jax.jit(model.train_step), strategy.plan, strategy.mesh)
    state = training_state(model, batch)
    memory = step.lower(state, batch).compile().memory_analysis()
    placed = step.put(batch)
    logs, state = step(state, placed)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(STEPS):
        logs, state = step(state, placed)
    jax.block_until_ready(state)
    milliseconds = (time.perf_counter() - began) / STEPS * 1000
    gibibytes = memory.temp_size_in_bytes / 2**30
    return f"{gibibytes:6.2f} GiB {milliseconds:7.1f} ms  loss {logs['loss']:.4f}"


if __name__ == "__main__":
    for levers in LEVERS:
        print(f"{levers!s:<45}", measure(levers), flush=True)
        gc.collect()
