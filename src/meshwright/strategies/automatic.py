"""`meshwright.Auto`: the strategy that the planner chooses when training begins."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

from meshwright.cluster.identity import process_count
from meshwright.devices.containers import map_leaves, named_leaves
from meshwright.devices.sizes import is_count, parse_bytes
from meshwright.devices.step import batch_size as samples_of
from meshwright.errors import PlanError, ProfileError
from meshwright.models.profile import shape_of
from meshwright.parallel.plan import Plan, Precision
from meshwright.planner.machines import parse_machine
from meshwright.planner.report import PlanReport
from meshwright.strategies.attach import attach, place
from meshwright.strategies.planning import plan
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices

import jax
import numpy as np

USUAL_BATCH = 32
"""Samples of a batch if `fit` is not told: Keras' own number."""


class Auto(Strategy):
    """The fastest plan for the model, the batch and the devices.

    Where layers have statistics or random numbers, as BatchNorm and Dropout have, a
    batch is computed in parts only if nothing else fits, because the result is not
    quite the same.

    It is chosen when `fit` or `evaluate` of a compiled model first runs, because the
    batch is known then, and kept from then on, also for other models. Until then, and
    in a run of several processes, there is a replica on every device in its `plan`.

    Arguments:
        devices: The devices to choose from; all of the best kind if left out.
        memory: What a step may use of each, as `'16GiB'`.
        precision: What layers compute in; as the model has it if left out.

    Attributes:
        report: The planner's argument; None on one device, and before the choice.
        because: Why this plan, in a line.

    >>> import meshwright as mw
    >>> mw.Auto(["CPU:0"]).because
    'there is one device'
    """

    def __init__(
        self,
        devices: DeviceNames = None,
        *,
        memory: int | str | None = None,
        precision: Precision | None = None,
    ) -> None:
        chosen = choose_devices(devices)
        super().__init__(Plan(data=len(chosen), precision=precision), chosen)
        self.report: PlanReport | None = None
        self._memory = None if memory is None else parse_bytes(memory, "memory")
        self._placed: WeakSet[Any] = WeakSet()
        fixed = self._why_fixed()
        self.because = fixed or "not chosen yet"
        self._is_fixed = fixed is not None
        self._is_open = not self._is_fixed

    def _why_fixed(self) -> str | None:
        """Why there is nothing to choose, if there is not."""
        if process_count() > 1:
            return f"a replica on every device, because of {process_count()} processes"
        if len(self.devices) == 1 and self._memory is None:
            return "there is one device"
        return None

    @property
    def is_open(self) -> bool:
        """Whether the plan is still to be chosen."""
        return self._is_open

    def prepare(self, model: Any, arguments: Mapping[str, Any]) -> None:
        """Chooses the plan for a model and the data of its first run.

        Arguments:
            model: The model.
            arguments: Those of `fit`, `evaluate` or `predict`, by name.
        """
        if self._is_fixed or model in self._placed:
            return
        if self._is_open:
            batch = _first_batch(arguments)
            # What is not compiled has no training step yet; `fit` refuses no samples.
            if not model.compiled or batch.size == 0:
                return
            self._choose(model, batch)
            self._is_open = False
        # It was attached with the plan of before.
        self._placed.add(model)
        attach(model, self)
        place(model, self)

    def _choose(self, model: Any, batch: "_Batch") -> None:
        machine = parse_machine(list(self.devices), memory=self._memory)
        if batch.data is not None and not model.built:
            _build(model, batch.data[0])
        try:
            self.report = plan(
                model,
                batch.size,
                machine,
                precision=self.plan.precision,
                data=batch.data,
            )
        except ProfileError as error:
            self.because = f"a replica on every device, because: {error.received}"
            return
        best = self.report.best
        if best is None:
            raise _nothing_fits(model, batch.size, self.report)
        self.because = best.because
        self.plan = best.plan
        self.devices = self.devices[: best.num_devices]
        self.__dict__.pop("mesh", None)
        if not batch.is_known:
            self.because += f"; for a batch of {batch.size}, as the data does not say"


def _nothing_fits(model: Any, batch_size: int, report: PlanReport) -> PlanError:
    closest = report.least_bad
    near = ""
    if closest is not None:
        near = f"; the closest is {closest.plan.describe()}: {closest.because}"
    return PlanError(
        f"No plan for {model.name!r} with a batch of {batch_size} fits on "
        f"{report.machine}{near}.",
        "What a step needs must fit the memory of each device.",
        "Use a smaller batch_size, more devices, or see mw.plan(model, batch_size).",
    )


class _Batch(NamedTuple):
    """What is known of a batch before `fit` starts."""

    data: Any
    """Inputs and targets, if they are arrays."""
    size: int
    is_known: bool
    """Whether the size was given, and not assumed."""


def _first_batch(arguments: Mapping[str, Any]) -> _Batch:
    x, y = arguments.get("x"), arguments.get("y")
    given: Any = arguments.get("batch_size") or getattr(x, "batch_size", None)
    size = int(given) if is_count(given) else USUAL_BATCH
    leaves = [leaf for _, leaf in named_leaves("", (x, y))]
    if not leaves or not all(map(_is_array, leaves)):
        return _Batch(None, size, is_known=is_count(given))
    size = min(size, samples_of(x))
    if y is None:
        return _Batch(None, size, is_known=True)
    return _Batch(map_leaves(lambda each: each[:size], (x, y)), size, is_known=True)


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array) and value.ndim > 0


def _build(model: Any, inputs: Any) -> None:
    """Makes the variables of a model, as `fit` would, and nothing else.

    Metrics are left to Keras: it draws the batch for them, so that batches are shuffled
    as they are without this.
    """
    import keras

    def symbol(array: Any) -> Any:
        shape = shape_of(array)
        return keras.KerasTensor(shape.shape, str(shape.dtype))

    model(map_leaves(symbol, inputs))
