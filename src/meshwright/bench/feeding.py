"""Whether data comes as fast as the devices train on it."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from meshwright.bench.table import Column, Table
from meshwright.data.loader import Batches
from meshwright.data.sources import are_arrays, refuse_empty
from meshwright.devices.containers import map_leaves
from meshwright.devices.step import batch_size as size_of
from meshwright.errors import DataError
from meshwright.models.training import batch_shapes
from meshwright.planner.figures import format_seconds, format_share, indent
from meshwright.strategies.dataset import DistributedDataset
from meshwright.strategies.planning import check_question
from meshwright.strategies.strategy import Strategy
from meshwright.strategies.timing import time_steps

import jax
import numpy as np

SECONDS = 2.0
"""For so long each part is looked at, if the data lasts."""

ARRAYS = "arrays"

ENOUGH = 0.9
"""Data that comes this much as fast as it is used is called fast enough."""


_COLUMNS = (
    Column("part", "part"),
    Column("samples_per_second", "samples/s", "{:,.0f}".format),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeding:
    """How many samples a second each part of a training can take; all measured.

    Attributes:
        model: Its name.
        strategy: How it is trained.
        kind: What the data is.
        batch_size: Samples of a batch.
        reading: Samples in a second that come out of the data.
        moving: And onto the devices, by the thread that works ahead of the steps.
        training: That are trained on, if they are there.
        is_made_up: Whether nobody named data, and arrays were made up.
    """

    model: str
    strategy: str
    kind: str
    batch_size: int
    reading: float
    moving: float
    training: float
    is_made_up: bool = False

    @property
    def data(self) -> str:
        """What the data is, in words."""
        made_up = f"made-up {self.kind}, since no data was named"
        return made_up if self.is_made_up else self.kind

    @property
    def starves(self) -> bool:
        """Whether the devices wait for data."""
        return self.moving < ENOUGH * self.training

    @property
    def waiting(self) -> float:
        """The share of time that devices wait for data, since both go on at once."""
        return max(0.0, 1 - self.moving / self.training)

    def advice(self) -> str:
        """What follows from the figures."""
        if not self.starves and self.is_made_up:
            return "Arrays would be fast enough. Name the data that you train on."
        if not self.starves:
            return "The data is fast enough: the devices do not wait for it."
        lost = f"The devices wait for data for {format_share(self.waiting)} of the time"
        if self.is_made_up:
            return (
                f"{lost} where arrays like these are moved onto them. Name the data "
                "that you train on to know how that does."
            )
        if self.kind == ARRAYS:
            return (
                f"{lost} if the arrays do not fit onto them. If they do, fit keeps "
                "them there and nothing is moved; strategy.pace says which."
            )
        if 1 / self.moving > 2 / self.reading:
            return (
                f"{lost}: moving batches onto them is what takes it. Pass smaller "
                "types (uint8 instead of float32), or arrays, which stay there."
            )
        return (
            f"{lost}: reading is what takes it. Read in several threads or processes "
            "(workers=), keep what was decoded, or pass arrays if they fit in memory."
        )

    def __str__(self) -> str:
        step = format_seconds(self.batch_size / self.training)
        lines = [
            f"{self.model}, {self.strategy}: {self.data}, batches of "
            f"{self.batch_size:,}; measured here",
            f"  reading   {self.reading:>12,.0f} samples/s",
            f"  moving    {self.moving:>12,.0f} samples/s, reading included",
            f"  training  {self.training:>12,.0f} samples/s, {step} a step",
        ]
        return "\n".join([*lines, *indent(self.advice())])

    def tables(self) -> tuple[Table, ...]:
        """The same as a table."""
        parts = {
            "reading": self.reading,
            "moving, reading included": self.moving,
            "training": self.training,
        }
        title = (
            f"{self.model}, {self.strategy}: {self.data}, batches of "
            f"{self.batch_size:,}; measured here"
        )
        rows = tuple({"part": p, "samples_per_second": r} for p, r in parts.items())
        return (Table(title, _COLUMNS, rows, (self.advice(),)),)

    def to_json(self) -> dict[str, Any]:
        """All figures, unrounded."""
        return {
            "model": self.model,
            "strategy": self.strategy,
            "kind": self.kind,
            "is_made_up": self.is_made_up,
            "batch_size": self.batch_size,
            "measured_reading": self.reading,
            "measured_moving": self.moving,
            "measured_training": self.training,
            "starves": self.starves,
            "waiting": self.waiting,
            "advice": self.advice(),
        }


def measure_feeding(
    model: Any, strategy: Strategy, data: Any, batch_size: int
) -> Feeding:
    """Times reading, moving and training apart from each other.

    Arguments:
        model: A built and compiled model with values; it is not changed.
        strategy: How it is trained.
        data: Arrays `(x, y)`; or batches that can be iterated again and again, or a
            function that returns them; made up as arrays if None.
        batch_size: Samples of a batch, if the data is arrays.
    """
    check_question("bench", model, batch_size)
    is_made_up = data is None
    if data is None:
        shapes = batch_shapes(model, None, 8 * batch_size)
        data = jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), shapes)
    kind, open_again = _opened(data, batch_size)
    first: Any = next(iter(open_again()), None)
    if first is None:
        refuse_empty(data, "bench")
    seconds = time_steps(model, strategy, size_of(first), tuple(first))
    # Without the thread that works ahead: what it has in store is not its speed.
    moved = DistributedDataset(_Again(open_again), strategy.mesh, depth=0)
    return Feeding(
        model=model.name,
        strategy=repr(strategy),
        kind=kind,
        is_made_up=is_made_up,
        batch_size=size_of(first),
        reading=_rate(open_again(), size_of),
        moving=_rate(moved, lambda batch: _wait_for(batch, size_of(first))),
        training=size_of(first) / seconds,
    )


@dataclass(frozen=True, slots=True)
class _Again:
    """Batches that are iterated anew."""

    open: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.open())


def _opened(data: Any, batch_size: int) -> tuple[str, Callable[[], Iterable[Any]]]:
    """What data is called, and how it is iterated anew, as long as it is wanted."""
    import keras

    given = data() if callable(data) else data
    if are_arrays(given):
        arrays = map_leaves(np.asarray, given)
        return ARRAYS, lambda: _forever(Batches(arrays, batch_size, drop_last=True))
    name = type(given).__name__
    if isinstance(given, keras.utils.PyDataset):
        return name, lambda: (given[i] for i in range(len(given)))
    if callable(data):
        return name, data
    if iter(given) is given:
        raise DataError(
            f"bench received a {name}, which gives its batches once.",
            "Data is gone through several times, to time its parts.",
            "Pass a function that makes it.",
        )
    return name, lambda: given


def _forever(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


def _rate(batches: Iterable[Any], arrive: Callable[[Any], int]) -> float:
    """Samples that arrive in a second, the first batch apart."""
    iterator = iter(batches)
    for batch in islice(iterator, 1):
        arrive(batch)
    number, began = 0, time.perf_counter()
    for batch in iterator:
        number += arrive(batch)
        if time.perf_counter() - began > SECONDS:
            break
    close = getattr(iterator, "close", None)
    if close is not None:
        close()
    return number / max(time.perf_counter() - began, 1e-9)


def _wait_for(batch: Any, size: int) -> int:
    jax.block_until_ready(batch)
    return size
