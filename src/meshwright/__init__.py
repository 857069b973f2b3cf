"""Meshwright trains one Keras model on many devices.

    import meshwright as mw
    mw.devices()

Importing it starts no device; see `meshwright.devices.startup` for what it does.
"""

from typing import TYPE_CHECKING

from meshwright import errors
from meshwright.cluster.identity import process_count, process_index
from meshwright.devices.configuration import configure
from meshwright.devices.device import Device
from meshwright.devices.discovery import devices
from meshwright.devices.placement import (
    device,
    set_placement_log,
    set_soft_placement,
)
from meshwright.devices.startup import start_up
from meshwright.devices.table import placement
from meshwright.parallel.plan import Plan
from meshwright.strategies.distribute import distribute
from meshwright.strategies.names import (
    FSDP,
    Hybrid,
    Mirrored,
    Single,
    TensorParallel,
)
from meshwright.strategies.verification import verify
from meshwright.train.learning_rate import scaled_lr

if TYPE_CHECKING:
    from meshwright.train.warmup import Warmup

start_up()
del start_up

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDP",
    "Device",
    "Hybrid",
    "Mirrored",
    "Plan",
    "Single",
    "TensorParallel",
    "Warmup",
    "configure",
    "device",
    "devices",
    "distribute",
    "errors",
    "placement",
    "process_count",
    "process_index",
    "scaled_lr",
    "set_placement_log",
    "set_soft_placement",
    "verify",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> type:
        # A subclass of one of Keras' classes; Keras is imported when it is asked for.
        if name == "Warmup":
            from meshwright.train.warmup import Warmup

            return Warmup
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
