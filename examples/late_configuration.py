"""Devices that are set up after the runtime has started.

Works as long as nothing lives on them; otherwise the error names the line that started
the runtime. On a GPU the memory of the first start is really given back, which NVML
shows. Takes about 3 seconds on a two-core machine.
"""

import meshwright as mw

import jax
import jax.numpy as jnp


def used_memory() -> int:
    """MiB in use on the first real GPU, by whomever; 0 without one."""
    if not mw.devices("GPU") or mw.devices("GPU")[0].stand_in:
        return 0
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    return int(pynvml.nvmlDeviceGetMemoryInfo(card).used) // 2**20


at_rest = used_memory()


def show(when: str) -> None:
    """Prints the devices, the GPU memory taken since the start, and the limit."""
    taken = used_memory() - at_rest if used_memory() else 0
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 0) / 2**30
    names = " ".join(device.name for device in mw.devices())
    print(f"{when}: {names}; {taken} MiB taken, allocator's limit {limit:.2f} GiB")


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
