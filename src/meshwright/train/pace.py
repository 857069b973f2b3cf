"""How many steps of a run are dispatched together, and why.

Dispatching a step takes the host a fraction of a millisecond, whatever the step. Steps
on arrays that are on the devices anyway can be dispatched many at a time, as one
program with a loop.
"""

import os
from typing import Any

from meshwright.cluster.store import say_to_all
from meshwright.data.resident import ArraysInMemory
from meshwright.data.streams import shapes_of
from meshwright.devices.device import Device
from meshwright.devices.runtime import name_of, usable_devices
from meshwright.devices.settings import current_settings
from meshwright.devices.sizes import format_bytes
from meshwright.models.work import MOST_STEPS, guess_seconds, steps_in_stretch
from meshwright.parallel.mesh import STAGES
from meshwright.train.listeners import Listeners
from meshwright.train.traced_step import TracedStep

from jax.sharding import Mesh

STACK_BYTES = 2**24
"""Batches from the host are dispatched together up to this size.

They wait for each other, and some times as many are on their way.
"""

MOST_OF_UNKNOWN = 32
"""Steps at a time where nobody knows how many there are.

Those that are left at the end are dispatched one by one.
"""

SHARE_OF_GPU = 4
SHARE_OF_HOST = 8
"""Arrays may take one part in so many of a device's memory."""

_FUNCTIONS = {"fit": "train_function", "evaluate": "test_function"}


class Pace:
    """How the steps of one `fit`, `evaluate` or `predict` are dispatched.

    Arguments:
        model: The model.
        verb: The name of the method that runs.
        mesh: The devices.
        resident: Whether arrays stay on the devices; None if they do when they fit.
        most_steps: How many steps may be dispatched together; None if that is free.
        offloads: Whether the optimizer's state comes from the host for each step.

    Attributes:
        because: Why arrays stay on the devices or not, and why so many steps are
            dispatched together, in words.
    """

    def __init__(
        self,
        model: Any,
        verb: str,
        mesh: Mesh,
        resident: bool | None,
        most_steps: int | None = None,
        offloads: bool = False,
    ) -> None:
        self.because: dict[str, str] = {}
        self._model = model
        self._verb = verb
        self._mesh = mesh
        self._resident = resident
        self._most_steps = min(most_steps or MOST_STEPS, MOST_STEPS)
        self._offloads = offloads
        self._lengths: dict[Any, int] = {}
        # All processes dispatch as many steps together, whatever machine they are on.
        cores = say_to_all("cores", str(os.cpu_count() or 1))
        self._cores = min(map(int, cores))
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

    @property
    def step(self) -> Any:
        """The step over the mesh; None as long as Keras has not made it."""
        function = getattr(self._model, _FUNCTIONS[self._verb])
        return function and function.guarded

    def stacks(self, depth: int) -> bool:
        """Whether batches from the host may be dispatched several at a time.

        Arguments:
            depth: For how many dispatches batches are put ahead of their use.
        """
        reason = self._why_no_stacks(depth)
        if reason is not None:
            self.because["steps"] = f"Steps are dispatched one by one: {reason}."
        return reason is None

    def _why_no_stacks(self, depth: int) -> str | None:
        if self._verb not in _FUNCTIONS:
            return "predict returns every batch"
        if self._has_stages:
            return "a pipeline takes a batch at a time"
        if self.listeners.of_state:
            return f"{self._state_listeners} wants to see each of them"
        if current_settings().memory_limit is not None:
            return "a memory limit is set"
        return "prefetch=0" if depth < 1 else None

    def _why_not(self, data: ArraysInMemory | None) -> str | None:
        if data is None:
            return "the data is not arrays in memory"
        if self._verb not in _FUNCTIONS:
            return "predict returns every batch"
        if self._has_stages:
            return "a pipeline takes a batch at a time"
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
    def _has_stages(self) -> bool:
        return STAGES in self._mesh.axis_names

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
        if self.step is None:
            return 1  # somebody looks at a batch before the step is made
        if size not in self._lengths:
            wanted, why = self._wanted(self.step.work(data, size), self._most_steps)
            length = even_length(num_left, wanted, limit=self._most_steps)
            self._lengths[size] = length
            if num_left > 1 or "steps" not in self.because:
                self._say(length, why)
        return self._lengths[size]

    def choose_stack(self, batch: Any, num_left: int | None) -> int:
        """How many batches of the host like this one are dispatched together.

        Arguments:
            batch: The first of them.
            num_left: How many of this size there are, if that is known.
        """
        shapes = shapes_of(batch)
        if shapes not in self._lengths:
            most = min(STACK_BYTES // max(shapes.num_bytes, 1), self._most_steps)
            wanted, why = self._wanted(self.step.work_on(batch), most)
            if num_left is None:
                length = min(wanted, MOST_OF_UNKNOWN)
            else:
                # With two or more of them, one is made while the other is computed.
                limit = self._most_steps
                length = even_length(num_left, wanted, num_stretches=2, limit=limit)
            self._lengths[shapes] = length
            self._say(length, why)
        return self._lengths[shapes]

    def _wanted(self, work: TracedStep, most: int) -> tuple[int, str]:
        """How many steps should be dispatched together, and why."""
        if self.listeners.of_state:
            return 1, f"{self._state_listeners} wants to see each of them"
        alone = getattr(self.step, "why_alone", None)
        if alone is not None:
            return 1, alone
        if not work.is_repeatable:
            return 1, "the step changes the shape or type of its state"
        if self._offloads:
            return 1, "the optimizer's state comes from the host for each of them"
        if self._is_on_cpu and work.has_grouped_convolutions:
            return 1, "loops have no fast code for convolutions in groups"
        if self._most_steps == 1:
            return 1, "a checkpoint is wanted after each of them"
        if most <= 1:
            return 1, f"two batches have more than {format_bytes(STACK_BYTES)}"
        cores = self._cores if self._is_on_cpu else None
        seconds = guess_seconds(work.flops, work.num_operations, cores)
        wanted = steps_in_stretch(seconds, on_cpu=self._is_on_cpu, most=most)
        return wanted, f"one takes about {1000 * seconds:.2g} ms"

    def _say(self, length: int, why: str) -> None:
        together = "one by one" if length == 1 else f"{length} at a time"
        self.because["steps"] = f"Steps are dispatched {together}: {why}."


def even_length(
    num_steps: int, wanted: int, num_stretches: int = 1, limit: int = MOST_STEPS
) -> int:
    """About the wanted length, such that all stretches are equal, if there is one.

    Stretches of another length are another program to be compiled.

    Arguments:
        num_steps: Steps of all stretches.
        wanted: The wanted length.
        num_stretches: How many stretches there are at the least.
        limit: The most steps of a stretch.

    >>> even_length(1875, 150), even_length(234, 150), even_length(1009, 150)
    (125, 234, 150)
    """
    most = max(num_steps // num_stretches, 1)
    if wanted == 1 or most <= wanted:
        return min(wanted, most)
    highest = min(2 * wanted, most, limit)
    if num_stretches == 1 and num_steps <= highest:
        return num_steps
    near = range(max(wanted // 2, 1), highest + 1)
    even = [length for length in near if num_steps % length == 0]
    return min(even, key=lambda length: abs(length - wanted), default=wanted)


def _is_on_host(device: Device) -> bool:
    return device.kind == "CPU" or device.stand_in


def _room_on(device: Device, num_on_host: int) -> int:
    memory = device.memory or 0
    if _is_on_host(device):
        return memory // SHARE_OF_HOST // num_on_host
    return memory // SHARE_OF_GPU
