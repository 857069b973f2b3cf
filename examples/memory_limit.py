"""Growth and a limit together: a GPU takes what it needs, and never more than it may.

On a machine without a GPU a stand-in keeps the same limit. Takes about 5 seconds.
"""

import meshwright as mw

import jax
import jax.numpy as jnp
import keras
import numpy as np

if not mw.devices("GPU"):
    mw.configure(virtual="GPU:1")
mw.configure(memory_limit="4GiB", memory_growth=True)
print(mw.devices("GPU")[0].describe())

if jax.devices()[0].memory_stats():  # a stand-in has no allocator of its own
    ones = jnp.ones((256, 2**20), jnp.float32)  # one GiB
    stats = ones.device.memory_stats()
    shown = {k: stats.get(k) for k in ("bytes_in_use", "pool_bytes", "bytes_limit")}
    print(f"the allocator says {shown}")
    try:
        jnp.ones((5 * 256, 2**20), jnp.float32).block_until_ready()
    except RuntimeError as error:
        print(f"five GiB at once: {str(error).splitlines()[0][:100]}")
    del ones

model = keras.Sequential(
    [
        keras.Input((256,)),
        keras.layers.Dense(8192, activation="relu", name="wide"),
        keras.layers.Dense(1, name="head"),
    ]
)
model.compile(optimizer="adam", loss="mse")
x = np.ones((100_000, 256), np.float32)
y = np.ones((100_000, 1), np.float32)
for batch_size in (100_000, 1_000):
    try:
        model.fit(x, y, batch_size=batch_size, steps_per_epoch=1, verbose=0)
        print(f"batches of {batch_size} train")
    except mw.errors.MemoryLimitError as error:
        print(f"a batch of {batch_size} is refused:\n{error}")
