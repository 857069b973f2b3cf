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
    print(
        f"allocator: {stats['bytes_in_use']} bytes in use, "
        f"{stats['pool_bytes']} taken from the GPU, limit {stats['bytes_limit']}"
    )
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

many = np.broadcast_to(few[:1], (400_000, 1024))
try:
    model.fit(many, many, batch_size=400_000, verbose=0)
except mw.errors.MemoryLimitError as error:
    print(f"a batch of 400,000 is refused:\n{error}")
