"""`meshwright.device`, and who runs models whose layers it put on several devices.

Layers are placed in a room far below the one in which steps are made; here they meet.
"""

from typing import Any

from meshwright.devices.placement import device
from meshwright.devices.strategy_hooks import set_maker_of_placed_steps

__all__ = ["device"]


def _make_step(model: Any, step: Any) -> Any:
    # Most scripts that place something never get here.
    from meshwright.train.placed_step import make_placed_step

    return make_placed_step(model, step)


set_maker_of_placed_steps(_make_step)
