"""The workers of an asynchronous training, and what they and the server exchange."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.data.resident import Shapes

import jax
import numpy as np
from jax.sharding import NamedSharding


@dataclass(eq=False)
class Task:
    """A worker's batch: one update.

    Attributes:
        number: Its place in the order of the data.
        batch: Arrays on the host.
        size: Its samples.
        shapes: The shapes and types of its arrays.
        drawn: States of random numbers, seeds and counters that it starts from; None
            until it is first taken.
    """

    number: int
    batch: Any
    size: int
    shapes: Shapes
    drawn: list[Any] | None = None


class Pulled(NamedTuple):
    """What a worker computes with, as the server had it."""

    weights: list[Any]
    others: list[Any]
    metrics: list[Any]
    version: int


class Computed(NamedTuple):
    """What a worker pushes, all of it arrays on its device."""

    gradients: list[Any]
    others: list[Any]
    metrics: list[Any]
    loss: Any
    outputs: Any
    """Those of the model, if metrics want them; else None."""
    finite: Any
    """Whether loss and gradients are."""


@dataclass
class WorkerFigures:
    """What a worker has done in a `fit`."""

    name: str
    updates: int = 0
    samples: int = 0
    busy: float = 0.0
    """Seconds in which it pulled, computed and pushed."""
    waited: float = 0.0
    """Seconds in which it waited for others, because of the bound or at the end."""
    restarts: int = 0
    """How many times it died and came back."""

    @property
    def throughput(self) -> float:
        """Samples per second of the time that it was there."""
        return self.samples / ((self.busy + self.waited) or 1.0)


class WorkerTable(list[WorkerFigures]):
    """What all workers have done; it prints as a table.

    >>> print(WorkerTable([WorkerFigures("/device:CPU:0", 30, 480, 1.5, 0.5)]))
    worker  device         updates  samples  samples/s  busy  restarts
         0  /device:CPU:0       30      480        240  75 %         0
    """

    def __str__(self) -> str:
        width = max((len(each.name) for each in self), default=6)
        lines = [
            f"worker  {'device':<{width}}  updates  samples  samples/s  busy  restarts"
        ]
        for number, each in enumerate(self):
            share = 100 * each.busy / ((each.busy + each.waited) or 1.0)
            lines.append(
                f"{number:6}  {each.name:<{width}}  {each.updates:7}  "
                f"{each.samples:7}  {each.throughput:9.4g}  {share:2.0f} %  "
                f"{each.restarts:8}"
            )
        return "\n".join(lines)


@dataclass(eq=False)
class DeviceWorker:
    """Computes gradients on a device of this process, in a thread of its own.

    Attributes:
        number: Its number, from 0.
        name: That of its device.
        place: Its device.
        slowness: It takes so many times as long as it does; for tests and benchmarks.
        programs: What gives gradients, by the shapes of a batch.
        figures: What it has done.
    """

    number: int
    name: str
    place: NamedSharding
    slowness: float = 1.0
    programs: dict[Shapes, Callable[[Any, Any], Computed]] = field(default_factory=dict)
    figures: WorkerFigures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = WorkerFigures(self.name)

    def __str__(self) -> str:
        return f"worker {self.number} ({self.name})"

    def start_anew(self, slowness: float) -> None:
        """Sets its figures back."""
        self.slowness = slowness
        self.figures = WorkerFigures(self.name)

    def compute(self, task: Task, pulled: Pulled) -> Computed:
        """Gradients of a batch; waits until they are there."""
        begin = time.perf_counter()
        state = jax.device_put(tuple(pulled[:3]), self.place)
        computed = self.programs[task.shapes](state, task.batch)
        np.asarray(computed.finite)
        if self.slowness > 1:
            time.sleep((self.slowness - 1) * (time.perf_counter() - begin))
        return computed
