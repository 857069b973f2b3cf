"""The workers of an asynchronous training, and what they and the server exchange."""

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.data.resident import Shapes
from meshwright.devices.sizes import format_bytes
from meshwright.parallel.mesh import placed_shape

import jax
import numpy as np
from jax.sharding import NamedSharding

PATIENCE_SECONDS = 600.0
"""A worker that can be lost is waited for so long, if nobody says otherwise."""


@dataclass(eq=False)
class Task:
    """A worker's batch: one update.

    Attributes:
        number: Its place in the order of the data.
        batch: Arrays on the host.
        size: Its samples.
        key: What is to be run on it.
        drawn: States of random numbers, seeds and counters that it starts from; None
            until it is first taken.
    """

    number: int
    batch: Any
    size: int
    key: "ProgramKey"
    drawn: list[Any] | None = None


class ProgramKey(NamedTuple):
    """Tells the programs of workers apart, which may work for several models."""

    step: int
    """The number of the training step."""
    shapes: Shapes
    """The shapes and types of the batches."""


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
    """How many times it died."""
    bytes_moved: int = 0
    """Bytes of weights, batches and gradients that went to it and came back."""

    @property
    def throughput(self) -> float:
        """Samples per second of the time that it was there."""
        return self.samples / ((self.busy + self.waited) or 1.0)


class WorkerTable(list[WorkerFigures]):
    """What all workers have done; it prints as a table.

    >>> figures = WorkerFigures("/device:CPU:0", 30, 480, 1.5, 0.5, 0, 30 * 2048)
    >>> print(WorkerTable([figures]))
    worker  device         updates  samples  samples/s  busy  moved/update  deaths
         0  /device:CPU:0       30      480        240  75 %       2.0 KiB       0
    """

    def __str__(self) -> str:
        width = max((len(each.name) for each in self), default=6)
        lines = [
            f"worker  {'device':<{width}}  updates  samples  samples/s  busy  "
            "moved/update  deaths"
        ]
        for number, each in enumerate(self):
            share = 100 * each.busy / ((each.busy + each.waited) or 1.0)
            moved = format_bytes(each.bytes_moved // (each.updates or 1))
            lines.append(
                f"{number:6}  {each.name:<{width}}  {each.updates:7}  "
                f"{each.samples:7}  {each.throughput:9.4g}  {share:2.0f} %  "
                f"{moved:>12}  {each.restarts:6}"
            )
        return "\n".join(lines)


class WorkerLostError(Exception):
    """A worker is gone; what it computed is to be computed by another one."""


class Worker(abc.ABC):
    """Computes gradients; a thread of the server waits for it.

    Attributes:
        number: Its number, from 0.
        name: What it computes on.
        delay: Seconds that each of its batches takes longer; for tests and benchmarks.
        patience: If it can be lost, after so many seconds without a word.
        figures: What it has done.
        is_given_up: Whether it has died too often.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.start_anew(0.0, PATIENCE_SECONDS)

    def __str__(self) -> str:
        return f"worker {self.number} ({self.name})"

    def start_anew(self, delay: float, patience: float) -> None:
        """Sets its figures back; one that was given up gets another chance."""
        self.delay = delay
        self.patience = patience
        self.is_given_up = False
        self.figures = WorkerFigures(self.name)

    def compute(self, task: Task, pulled: Pulled) -> Computed:
        """Gradients of a batch; waits until they are there."""
        computed = self.find(task, pulled)
        time.sleep(self.delay)
        return computed

    @abc.abstractmethod
    def prepare(self, key: ProgramKey, program: Any, state: Any) -> Callable[[], None]:
        """Gets ready for batches of some shapes.

        Arguments:
            key: By which tasks will call for the program.
            program: What gives gradients, a function under `jax.jit`.
            state: Shapes and types of what it takes besides a batch.

        Returns:
            The rest of it, which a thread may do.
        """

    @abc.abstractmethod
    def forget(self, step: int) -> None:
        """Lets go of the programs of a training step that is no more."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Ends what it computes, if that can be done; nobody waits for it any more."""

    @abc.abstractmethod
    def find(self, task: Task, pulled: Pulled) -> Computed:
        """Gradients of a batch; `WorkerLostError` if the worker is gone."""


class DeviceWorker(Worker):
    """Computes gradients on a device of this process.

    Arguments:
        number: Its number, from 0.
        name: That of its device.
        place: Its device.
    """

    def __init__(self, number: int, name: str, place: NamedSharding) -> None:
        super().__init__(number, name)
        self._place = place
        self._programs: dict[ProgramKey, Callable[[Any, Any], Computed]] = {}

    def prepare(self, key: ProgramKey, program: Any, state: Any) -> Callable[[], None]:
        """Lowers a program; what is returned compiles it."""
        placed = placed_shapes((state, key.shapes.tree), self._place)
        lowered = program.lower(*placed)

        def compile_it() -> None:
            self._programs[key] = lowered.compile()

        return compile_it

    def forget(self, step: int) -> None:
        """Lets go of executables."""
        # At a moment of the garbage collector's; the list is made at once.
        for key in [key for key in list(self._programs) if key.step == step]:
            del self._programs[key]

    def interrupt(self) -> None:
        """Nothing: a batch that was begun on a device cannot be stopped."""

    def find(self, task: Task, pulled: Pulled) -> Computed:
        """Computes on the device."""
        state = jax.device_put(tuple(pulled[:3]), self._place)
        computed = self._programs[task.key](state, task.batch)
        np.asarray(computed.finite)  # waits for it
        self.figures.bytes_moved += bytes_of((pulled[:3], task.batch, computed))
        return computed


def bytes_of(arrays: Any) -> int:
    """The bytes of a tree of arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def placed_shapes(shapes: Any, place: NamedSharding) -> Any:
    """Shapes and types of arrays in a place."""
    return jax.tree.map(lambda each: placed_shape(each, place), shapes)
