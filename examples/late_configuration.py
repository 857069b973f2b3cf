"""Devices that are set up after the runtime has started.

Works as long as nothing lives on them; otherwise the error names the line that started
the runtime. On a GPU the memory of the first start is really given back. Takes about
3 seconds on a two-core machine.
"""

import meshwright as mw

import jax
import jax.numpy as jnp


def show(when: str) -> None:
    """Prints the devices and what the allocator of the first says."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 0) / 2**30
    pool = stats.get("pool_bytes", 0) / 2**30
    names = " ".join(device.name for device in mw.devices())
    print(f"{when}: {names}, {pool:.1f} GiB taken, allocator's limit {limit:.1f} GiB")


product = jnp.ones((1024, 1024)) @ jnp.ones((1024, 1024))
product.block_until_ready()
show("at first")
try:
    mw.configure(virtual=2)
except mw.errors.LateConfigurationError as error:
    print(error)

del product
mw.configure(memory_limit="6GiB", memory_growth=True)
jnp.ones((1024, 1024)).block_until_ready()
show("with growth and a limit")

mw.configure(visible=[])
show("accelerators hidden")
mw.configure(visible="GPU", virtual="GPU:4")
show("stand-ins")
