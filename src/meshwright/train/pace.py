"""How many steps of a run are dispatched together, and why.

Dispatching a step takes the host a fraction of a millisecond, whatever the step. Steps
on arrays that are on the devices anyway can be dispatched many at a time, as one
program with a loop.
"""

import os
from typing import Any

from meshwright.cluster.store import say_to_all
from meshwright.data.resident import ArraysInMemory
from meshwright.devices.device import Device
from meshwright.devices.runtime import name_of, usable_devices
from meshwright.devices.settings import current_settings
from meshwright.devices.sizes import format_bytes
from meshwright.train.listeners import Listeners
from meshwright.train.traced_step import TracedStep

from jax.sharding import Mesh

STRETCH_SECONDS = 0.02
STRETCH_SECONDS_ON_CPU = 1.0
"""About how long steps that are dispatched together take.

Long enough to hide what a dispatch costs, short enough for a progress bar to move and
for Ctrl-C to be heard. On CPUs every program gets its memory anew from the operating
system, page by page, which took 30 of 160 ms of a step of the reference CNN.
"""

MOST_STEPS = 512
"""More of them gain nothing."""

SHARE_OF_GPU = 4
SHARE_OF_HOST = 8
"""Arrays may take one part in so many of a device's memory."""

CPU_FLOPS_PER_CORE = 2e10
ACCELERATOR_FLOPS = 5e13
SECONDS_PER_OPERATION = 1e-7
"""Rough speeds: a guess that is wrong by a factor of five still does its work."""

_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


class Pace:
    """How the steps of one `fit`, `evaluate` or `predict` are dispatched.

    Arguments:
        model: The model.
        verb: The name of the method that runs.
        mesh: The devices.
        resident: Whether arrays stay on the devices; None if they do when they fit.

    Attributes:
        because: Why arrays stay on the devices or not, and why so many steps are
            dispatched together, in words.
    """

    def __init__(self, model: Any, verb: str, mesh: Mesh, resident: bool | None):
        self.because: dict[str, str] = {}
        self._model = model
        self._verb = verb
        self._mesh = mesh
        self._resident = resident
        self._lengths: dict[int, int] = {}
        self.listeners = Listeners(None, verb)

    def __str__(self) -> str:
        return "\n".join(self.because.values())

    def listen(self, callbacks: Any) -> None:
        """Looks at what the callbacks want."""
        self.listeners = Listeners(callbacks, self._verb)

    def keeps(self, data: ArraysInMemory | None) -> bool:
        """Whether arrays stay on the devices for the whole run."""
        reason = self._why_not(data)
        if data is None or reason is not None:
            self.because["data"] = f"Batches come from the host: {reason}."
            return False
        size = format_bytes(data.num_bytes)
        self.because["data"] = f"The arrays stay on the devices, {size} on each."
        return True

    def _why_not(self, data: ArraysInMemory | None) -> str | None:
        if data is None:
            return "the data is not arrays in memory"
        if self._verb not in _FUNCTIONS:
            return "predict returns every batch"
        if self.listeners.of_state and self._model.steps_per_execution > 1:
            return f"{self._state_listeners} counts executions of several steps"
        if self._resident is not None:
            return None if self._resident else "resident=False"
        if current_settings().memory_limit is not None:
            return "a memory limit is set"
        room = self._room()
        if data.num_bytes > room:
            return (
                f"the arrays have {format_bytes(data.num_bytes)}, and there is room "
                f"for {format_bytes(room)} on each device"
            )
        return None

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._mesh.devices.flat[0].platform == "cpu")

    @property
    def _state_listeners(self) -> str:
        return ", ".join(self.listeners.of_state)

    def _room(self) -> int:
        """Bytes that arrays may take on each device."""
        mine = {name_of(d) for d in self._mesh.local_devices}
        devices = [d for d in usable_devices() if d.name in mine]
        on_host = sum(_is_on_host(d) for d in devices)
        room = min(_room_on(device, on_host) for device in devices)
        return min(map(int, say_to_all("room for arrays", str(room))))

    def prepare_validation(
        self, data: ArraysInMemory, num_steps: int | None, callbacks: Any
    ) -> None:
        """Begins to compile what `evaluate` will need inside of `fit`, in threads.

        Arguments:
            data: The arrays that will be evaluated.
            num_steps: On how many batches, if not on all.
            callbacks: Those of `fit`.
        """
        later = Pace(self._model, "evaluate", self._mesh, self._resident)
        later.listen(callbacks)
        if not later.keeps(data):
            return
        self._model.make_test_function()
        step, of_each = self._model.test_function.guarded, later.listeners.wants_each
        num_whole, size = data.num_whole_batches, data.batch_size
        num_steps = num_steps or num_whole + 1
        if num_whole:
            length = later.choose_length(data, size, min(num_steps, num_whole))
            step.prepare(data, size, num_whole, length, of_each)
        if data.rest and num_steps > num_whole:
            step.prepare(data, data.rest, 1, 1, of_each)

    def choose_length(self, data: ArraysInMemory, size: int, num_left: int) -> int:
        """How many of the steps that are left are dispatched together."""
        function = getattr(self._model, _FUNCTIONS[self._verb])
        if function is None:
            return 1  # somebody looks at a batch before the step is made
        if size not in self._lengths:
            work = function.guarded.work(data, size)
            self._lengths[size] = self._length(work, num_left)
        return self._lengths[size]

    def _length(self, work: TracedStep, num_steps: int) -> int:
        if self.listeners.of_state:
            length, why = 1, f"{self._state_listeners} wants to see each of them"
        elif not work.is_repeatable:
            length, why = 1, "the step changes the shape or type of its state"
        elif self._is_on_cpu and work.has_grouped_convolutions:
            length, why = 1, "loops have no fast code for convolutions in groups"
        else:
            seconds = seconds_of(work, self._is_on_cpu)
            most = STRETCH_SECONDS_ON_CPU if self._is_on_cpu else STRETCH_SECONDS
            wanted = min(max(round(most / seconds), 1), MOST_STEPS)
            length = even_length(num_steps, wanted)
            why = f"one takes about {1000 * seconds:.2g} ms"
        if num_steps > 1 or "steps" not in self.because:
            together = "one by one" if length == 1 else f"{length} at a time"
            self.because["steps"] = f"Steps are dispatched {together}: {why}."
        return length


def seconds_of(work: TracedStep, is_cpu: bool) -> float:
    """A guess of the time that a step takes."""
    cores = os.cpu_count() or 1
    speed = CPU_FLOPS_PER_CORE * cores if is_cpu else ACCELERATOR_FLOPS
    return work.flops / speed + work.num_operations * SECONDS_PER_OPERATION


def even_length(num_steps: int, wanted: int) -> int:
    """About the wanted length, such that all stretches are equal, if there is one.

    Stretches of another length are another program to be compiled.

    >>> even_length(1875, 150), even_length(234, 150), even_length(1009, 150)
    (125, 234, 150)
    """
    if wanted == 1:
        return 1
    if num_steps <= 2 * wanted:
        return num_steps
    near = range(max(wanted // 2, 1), 2 * wanted + 1)
    even = [length for length in near if num_steps % length == 0]
    return min(even, key=lambda length: abs(length - wanted), default=wanted)


def _is_on_host(device: Device) -> bool:
    return device.kind == "CPU" or device.stand_in


def _room_on(device: Device, num_on_host: int) -> int:
    memory = device.memory or 0
    if _is_on_host(device):
        return memory // SHARE_OF_HOST // num_on_host
    return memory // SHARE_OF_GPU
