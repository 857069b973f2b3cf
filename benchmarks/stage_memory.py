"""What the stages of a pipeline hold in memory: `python benchmarks/stage_memory.py`.

A Transformer on one device, and cut into stages, by the compiler's own account; nothing
is run, so no device is timed. One minute on two cores.
"""

import argparse
from typing import Any

import meshwright as mw
from meshwright.strategies.attach import place, step_over_mesh
from meshwright.train.mesh_step import training_state
from meshwright.train.stage_cut import StageCut

import jax
import keras
import numpy as np

WIDTH, WORDS, LENGTH, BATCH = 64, 128, 64, 32


def transformer(num_blocks: int) -> keras.Model:
    """A decoder of equal blocks."""
    layers = keras.layers
    inputs = keras.Input((LENGTH,))
    x = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(num_blocks):
        h = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, WIDTH // 4)
        x = x + attention(h, h, use_causal_mask=True)
        h = layers.LayerNormalization()(x)
        h = layers.Dense(4 * WIDTH, activation="gelu")(h)
        x = x + layers.Dense(WIDTH)(h)
    model = keras.Model(inputs, layers.Dense(WORDS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    return model


def on_one_device(model: Any, batch: Any) -> int:
    """Bytes of a whole training step."""
    strategy = mw.Single("CPU:0")
    step = step_over_mesh(model, jax.jit(model.train_step), strategy)
    lowered = step.lower(training_state(model, batch), batch)
    found = lowered.compile().memory_analysis()
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + found.temp_size_in_bytes + new)


def on_stages(model: Any, batch: Any, strategy: Any) -> list[Any]:
    """What each stage holds at the most."""
    place(model, strategy)
    cut = StageCut(model.name, strategy.plan)
    step = step_over_mesh(model, jax.jit(model.train_step), strategy, cut)
    return step.memory(training_state(model, batch), batch)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args()
    mw.configure(virtual=options.stages)
    model = transformer(options.blocks)
    batch = (np.zeros((BATCH, LENGTH), np.int32), np.zeros((BATCH, LENGTH), np.int32))
    alone = on_one_device(model, batch)
    print(f"one device: {alone / 2**20:.1f} MiB")
    print("| schedule | stage | variables | gradients | kept | working | share |")
    print("|---|---|---|---|---|---|---|")
    stages, number = options.stages, options.microbatches
    for name, strategy in (
        ("1f1b", mw.Pipeline(stages, number)),
        ("gpipe", mw.Pipeline(stages, number, "gpipe")),
        ("1f1b, remat", mw.Pipeline(stages, number, remat=True)),
        ("layer-wise", mw.Layerwise(stages)),
    ):
        for stage, found in enumerate(on_stages(model, batch, strategy)):
            parts = (found.variables, found.gradients, found.kept, found.working)
            cells = " | ".join(f"{part / 2**20:.1f} MiB" for part in parts)
            print(f"| {name} | {stage} | {cells} | {found.total / alone:.2f} |")


if __name__ == "__main__":
    main()
