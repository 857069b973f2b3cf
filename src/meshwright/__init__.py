"""Meshwright trains one Keras model on many devices.

    import meshwright as mw
    mw.devices()

Importing it starts no device; see `meshwright.devices.startup` for what it does. What
stands behind a public name is imported when the name is first used.
"""

from typing import TYPE_CHECKING

from meshwright import errors

# The function has the name of a room, and takes its place.
from meshwright.devices.discovery import devices
from meshwright.devices.startup import start_up

if TYPE_CHECKING:
    from meshwright.cluster.identity import process_count, process_index
    from meshwright.devices.configuration import configure
    from meshwright.devices.device import Device
    from meshwright.devices.placement import set_placement_log, set_soft_placement
    from meshwright.devices.table import placement
    from meshwright.parallel.plan import Plan
    from meshwright.planner.report import PlanReport
    from meshwright.report.tuning import tune
    from meshwright.strategies.asynchronous import AsyncServer
    from meshwright.strategies.automatic import Auto
    from meshwright.strategies.by_hand import device
    from meshwright.strategies.central_storage import CentralStorage
    from meshwright.strategies.distribute import distribute
    from meshwright.strategies.local_sgd import LocalSGD
    from meshwright.strategies.names import (
        FSDP,
        Hybrid,
        Layerwise,
        Mirrored,
        Pipeline,
        Single,
        TensorParallel,
    )
    from meshwright.strategies.planning import plan
    from meshwright.strategies.preflighting import preflight
    from meshwright.strategies.verification import verify
    from meshwright.train.learning_rate import scaled_lr
    from meshwright.train.monitor import Monitor
    from meshwright.train.warmup import Warmup
    from meshwright.trials.ensemble import Ensemble
    from meshwright.trials.packed import packed_trials

start_up()
del start_up

__version__ = "0.1.0.dev0"

__all__ = [
    "FSDP",
    "AsyncServer",
    "Auto",
    "CentralStorage",
    "Device",
    "Ensemble",
    "Hybrid",
    "Layerwise",
    "LocalSGD",
    "Mirrored",
    "Monitor",
    "Pipeline",
    "Plan",
    "PlanReport",
    "Single",
    "TensorParallel",
    "Warmup",
    "configure",
    "device",
    "devices",
    "distribute",
    "errors",
    "packed_trials",
    "placement",
    "plan",
    "preflight",
    "process_count",
    "process_index",
    "scaled_lr",
    "set_placement_log",
    "set_soft_placement",
    "tune",
    "verify",
]

# Where the names live that are imported on first use; as above, for type checkers.
_HOMES = {
    "FSDP": "strategies.names",
    "AsyncServer": "strategies.asynchronous",
    "Auto": "strategies.automatic",
    "CentralStorage": "strategies.central_storage",
    "Device": "devices.device",
    "Ensemble": "trials.ensemble",
    "Hybrid": "strategies.names",
    "Layerwise": "strategies.names",
    "LocalSGD": "strategies.local_sgd",
    "Mirrored": "strategies.names",
    "Pipeline": "strategies.names",
    "Plan": "parallel.plan",
    "PlanReport": "planner.report",
    "Single": "strategies.names",
    "TensorParallel": "strategies.names",
    "Monitor": "train.monitor",
    "Warmup": "train.warmup",
    "configure": "devices.configuration",
    "device": "strategies.by_hand",
    "distribute": "strategies.distribute",
    "packed_trials": "trials.packed",
    "placement": "devices.table",
    "plan": "strategies.planning",
    "preflight": "strategies.preflighting",
    "process_count": "cluster.identity",
    "process_index": "cluster.identity",
    "scaled_lr": "train.learning_rate",
    "set_placement_log": "devices.placement",
    "set_soft_placement": "devices.placement",
    "tune": "report.tuning",
    "verify": "strategies.verification",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name == "tf":  # the room itself: TensorFlow's names for all of this
            return import_module("meshwright.tf")
        if name not in _HOMES:
            raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
        found = getattr(import_module(f"meshwright.{_HOMES[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return __all__
