"""A member at its device: an ordinary model that runs there while it is at work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

from meshwright.cluster.identity import process_count, process_index
from meshwright.devices.apart import Chance, apart
from meshwright.devices.runtime import jax_devices
from meshwright.devices.scope import enter
from meshwright.devices.strategy_hooks import INTAKE_MAKER, STEP_MAKER
from meshwright.strategies.attach import attach, place
from meshwright.strategies.names import Single

import jax
import jax.numpy as jnp
import numpy as np

_ATTRIBUTES = ("_meshwright_strategy", "_meshwright_cut", STEP_MAKER, INTAKE_MAKER)
_FUNCTIONS = ("train_function", "test_function", "predict_function")

LOOK_SECONDS = 0.5
"""How often the main thread looks whether it was interrupted."""

Result = TypeVar("Result")


class Seat:
    """A member and its device.

    The model runs on the device while it is `taken`. Before and after it is a Keras
    model like any other, whose variables live there. So nothing of a run of several
    processes depends on who has which member.

    Arguments:
        number: The number of the member.
        model: The member.
        device: The name of its device in the process that it is in.
        process: The number of that process.
    """

    def __init__(self, number: int, model: Any, device: str, process: int) -> None:
        self.number = number
        self.model = model
        self.device = device
        self.process = process
        self._kept: dict[str, Any] = {}
        if self.is_here:
            self._settle({})

    @property
    def is_here(self) -> bool:
        """Whether it is one of this process."""
        return self.process == process_index()

    @property
    def name(self) -> str:
        """The name of its device among those of all processes."""
        inside = f"/process:{self.process}" if process_count() > 1 else ""
        return f"{inside}{self.device}"

    @contextmanager
    def taken(self, chance: Chance) -> Iterator[Any]:
        """The model, which runs on its device inside, apart from all others.

        Arguments:
            chance: The random numbers that it draws from.
        """
        before = {id(v): v._value for v in self._variables()}
        placed: dict[int, Any] = {}
        with apart(chance):
            self._attach()
            try:
                place(self.model, self._kept[_ATTRIBUTES[0]])
                placed = {id(v): v._value for v in self._variables()}
                yield self.model
            finally:
                self._detach()
        unchanged = {
            id(v): before[id(v)]
            for v in self._variables()
            if id(v) in before and v._value is placed.get(id(v))
        }
        self._settle(unchanged)

    def values(self) -> list[Any]:
        """Those of all variables that a training changes, on the host."""
        return [np.asarray(variable._value) for variable in self._trained()]

    def take_values(self, values: Sequence[Any]) -> None:
        """Takes those of the same member in another process."""
        if len(values) > len(self._trained()):
            self.model.optimizer.build(self.model.trainable_variables)
        for variable, value in zip(self._trained(), values, strict=True):
            variable.assign(value)

    def _attach(self) -> None:
        functions = [getattr(self.model, name) for name in _FUNCTIONS]
        if not self._kept:
            attach(self.model, Single(self.device))
            self._kept = {name: getattr(self.model, name) for name in _ATTRIBUTES}
        for name in _ATTRIBUTES:
            object.__setattr__(self.model, name, self._kept[name])
        # `compile` has taken the mark away, and what was made before it is void.
        is_as_it_was = all(function is not None for function in functions)
        for name in _FUNCTIONS:
            setattr(self.model, name, self._kept.get(name) if is_as_it_was else None)

    def _detach(self) -> None:
        for name in _FUNCTIONS:
            self._kept[name] = getattr(self.model, name)
            setattr(self.model, name, _made_for_a_seat)
        for name in _ATTRIBUTES:
            object.__delattr__(self.model, name)

    def _settle(self, unchanged: dict[int, Any]) -> None:
        """Lets the variables live on the device, free to be used by eager work."""
        device = jax_devices()[self.device]
        with enter(self.device):
            for variable in self._variables():
                variable._layout = None
                value = unchanged.get(id(variable), variable._value)
                if value is not None and (
                    value.committed or _is_elsewhere(value, device)
                ):
                    value = jnp.asarray(np.asarray(value))
                variable._value = value

    def _trained(self) -> list[Any]:
        optimizer = getattr(self.model, "optimizer", None)
        slots = [] if optimizer is None else optimizer.variables
        return [*self.model.variables, *slots]

    def _variables(self) -> list[Any]:
        """All that steps change, each once."""
        found = [*self._trained(), *self.model.metrics_variables]
        return list({id(variable): variable for variable in found}.values())


def run_side_by_side(
    seats: Sequence[Seat], work: Callable[[Seat], Result]
) -> dict[int, Result | Exception]:
    """Does something at every seat, those of different devices at the same time.

    From one thread, CPU devices would compute one after the other, so each device is
    told by a thread of its own.

    Arguments:
        seats: Those of this process.
        work: What is done. An error at one of them does not stop the others.

    Returns:
        By the number of the member, what came of it.
    """
    from concurrent.futures import ThreadPoolExecutor, wait

    by_device: dict[str, list[Seat]] = {}
    for seat in seats:
        by_device.setdefault(seat.device, []).append(seat)
    if not by_device:
        return {}
    done: dict[int, Result | Exception] = {}
    stop = Event()

    def run_all(own: list[Seat]) -> None:
        for seat in own:
            if stop.is_set():
                return
            try:
                done[seat.number] = work(seat)
            except Exception as error:
                done[seat.number] = error

    with ThreadPoolExecutor(len(by_device), "meshwright-member") as pool:
        running = [pool.submit(run_all, own) for own in by_device.values()]
        try:
            # Signals that another thread got are seen when a wait ends.
            while wait(running, LOOK_SECONDS).not_done:
                pass
        except BaseException:  # Ctrl-C; a training ends with the step that it is at
            stop.set()
            for seat in seats:
                seat.model.stop_training = True
            raise
    for future in running:
        future.result()
    return done


def _is_elsewhere(value: Any, device: jax.Device) -> bool:
    return bool(value.devices() != {device})


def _made_for_a_seat() -> None:
    """Stands for a compiled function of a model while that is not at its device.

    Keras makes another one before it runs the model, and `compile` puts None here.
    """
