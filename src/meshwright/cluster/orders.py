"""What a launcher wants of the process that it has started."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

OnNan = Literal["stop", "skip", "rollback"]

VARIABLE = "MESHWRIGHT_ORDERS"
"""The environment variable that holds them, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """What a launcher wants of one process.

    >>> Orders.read({VARIABLE: Orders(run="runs/a", rank=1, world=2).as_text()}).rank
    1
    """

    run: str
    """The run folder; the same files for all processes."""
    rank: int = 0
    """The number of the process, from 0."""
    world: int = 1
    """How many processes train together."""
    coordinator: str | None = None
    """`host:port` where JAX's coordinator listens; None for a process alone."""
    attempt: int = 0
    """How many times the run has been restarted by this launcher."""
    save_every: int | None = None
    """A checkpoint after so many steps."""
    save_minutes: float | None = None
    """A checkpoint after so many minutes."""
    keep: int = 3
    """So many of the newest good checkpoints are kept."""
    resume: bool = True
    """Whether to go on from the newest good checkpoint."""
    on_nan: OnNan = "stop"
    """What to do when the loss is not a finite number."""
    fault: str = ""
    """Faults to inject, as `MESHWRIGHT_FAULT` spells them."""
    launched_at: float = 0.0
    """When this launcher began, in seconds since the epoch."""
    wall_before: float = 0.0
    """Seconds that launchers of this run had lived before it."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.run)

    def as_text(self) -> str:
        """The value of the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Orders | None":
        """Those in an environment, if it has any."""
        text = environment.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


@cache
def current_orders() -> Orders | None:
    """Those of this process; None if no launcher has started it."""
    return Orders.read(os.environ)
