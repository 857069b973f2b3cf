"""How many batches workers are given before they meet, and why."""

import os
from typing import Any

from meshwright.data.resident import ArraysInMemory
from meshwright.data.streams import shapes_of
from meshwright.devices.sizes import format_bytes
from meshwright.train.pace import Pace

DISPATCH_BYTES = 2**26
"""Batches that wait on the host have no more bytes than that, if it is several."""

DISPATCH_SECONDS = 2.0
"""About how long workers go on without meeting; callbacks are called in between."""

LEAST_STEPS = 16
"""Fewer would make fast workers wait for slow ones too often."""


class AsyncPace(Pace):
    """How the steps of a `fit` are dispatched whose workers do not wait for each other.

    A dispatch ends when its last update is applied. Its length is no part of any
    program, so that it need not be the same in all of them.
    """

    def keeps(self, data: ArraysInMemory | None) -> bool:
        """Never: workers take batches from the host when they are ready for them."""
        self.because["data"] = (
            "Batches come from the host: workers take them when they are ready."
        )
        return False

    def choose_stack(self, batch: Any, num_left: int | None) -> int:
        """How many batches like this one are dispatched together."""
        shapes = shapes_of(batch)
        if shapes not in self._lengths:
            most = min(DISPATCH_BYTES // max(shapes.num_bytes, 1), self._most_steps)
            length, why = self._wanted_at(batch, most)
            if num_left is not None and num_left < length:
                length = max(num_left, 1)
            self._lengths[shapes] = length
            self._say(length, why)
        return self._lengths[shapes]

    def _wanted_at(self, batch: Any, most: int) -> tuple[int, str]:
        if self._most_steps == 1:
            return 1, "a checkpoint is wanted after each of them"
        if most <= 1:
            return 1, f"two batches have more than {format_bytes(DISPATCH_BYTES)}"
        cores = os.cpu_count() if self._is_on_cpu else None
        seconds = self.step.guess_seconds(batch, cores)
        wanted = max(round(DISPATCH_SECONDS / max(seconds, 1e-9)), LEAST_STEPS)
        return min(wanted, most), f"one takes about {1000 * seconds:.2g} ms"
