"""Growth and a limit together: a GPU takes what it needs, and never more than it may.

On a machine without a GPU a stand-in keeps the same limit. Takes about 5 seconds.
"""

import meshwright as mw

import jax.numpy as jnp
import keras
import numpy as np

if not mw.devices("GPU"):
    mw.configure(virtual="GPU:1")
mw.configure(memory_limit="4GiB", memory_growth=True)
print(mw.devices("GPU")[0].describe())

ones = jnp.ones((256, 2**20), jnp.float32)  # one GiB
stats = ones.device.memory_stats()
if stats:
    shown = {k: stats.get(k) for k in ("bytes_in_use", "pool_bytes", "bytes_limit")}
    print(f"the allocator says {shown}")
    try:
        jnp.ones((5 * 256, 2**20), jnp.float32).block_until_ready()
    except RuntimeError as error:
        print(f"five GiB at once: {str(error).splitlines()[0][:100]}")
del ones

model = keras.Sequential(
    [keras.Input((1024,)), keras.layers.Dense(1024, name="square")]
)
model.compile(optimizer="adam", loss="mse")
few = np.ones((512, 1024), np.float32)
model.fit(few, few, batch_size=512, verbose=0)
print("a batch of 512 trains")

many = np.broadcast_to(few[:1], (300_000, 1024))
for batch_size in (300_000, 100_000):
    try:
        model.fit(many, many, batch_size=batch_size, verbose=0)
        print(f"a batch of {batch_size} trains")
    except mw.errors.MemoryLimitError as error:
        print(f"a batch of {batch_size} is refused:\n{error}")
