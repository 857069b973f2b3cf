"""Meshwright trains one Keras model on many devices.

    import meshwright as mw
    mw.devices()

Importing it starts no device; see `meshwright.devices.startup` for what it does.
"""

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
    "configure",
    "device",
    "devices",
    "distribute",
    "errors",
    "placement",
    "process_count",
    "process_index",
    "set_placement_log",
    "set_soft_placement",
    "verify",
]
