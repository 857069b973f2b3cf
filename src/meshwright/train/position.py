"""Where in its script a run is."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where in its script a run is.

    >>> Position.read(Position(fit=1, epoch=2, step=30, taken=30, total=1030).to_json())
    Position(fit=1, epoch=2, step=30, taken=30, total=1030, has_ended=False)
    """

    fit: int
    """The number of the `fit` in the script, from 0."""
    epoch: int
    """The number of its epoch, from 0."""
    step: int
    """Steps of the epoch that are done."""
    taken: int
    """Batches that were taken from the current pass through the data.

    A pass is an epoch, unless `steps_per_epoch` is given.
    """
    total: int
    """Steps of the whole run that are done."""
    has_ended: bool = False
    """Whether the `fit` is over."""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> "Position":
        """What `to_json` gave."""
        return cls(**facts)
