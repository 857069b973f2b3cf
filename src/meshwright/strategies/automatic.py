"""`meshwright.Auto`: the strategy that the planner chooses when training begins."""

from collections.abc import Mapping
from typing import Any

from meshwright.devices.step import batch_size as samples_of
from meshwright.errors import PlanError, ProfileError
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

    It is chosen when `fit`, or another method, first runs, because the batch is known
    then. Until then there is a replica on every device in its `plan`.

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
        self.because = "not chosen yet"
        self._memory = memory
        self._is_open = len(chosen) > 1 or memory is not None
        if not self._is_open:
            self.because = "there is one device"

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
        if not self._is_open:
            return
        self._is_open = False
        data, size = _batch_of(arguments)
        if data is not None and not model.built:
            model._symbolic_build(data_batch=data)
        self._choose(model, data, size)
        attach(model, self)
        place(model, self)

    def _choose(self, model: Any, data: Any, batch_size: int) -> None:
        machine = parse_machine(list(self.devices), memory=self._memory)
        try:
            self.report = plan(
                model, batch_size, machine, precision=self.plan.precision, data=data
            )
        except ProfileError as error:
            self.because = f"a replica on every device, because: {error.received}"
            return
        best = self.report.best
        if best is None:
            raise _nothing_fits(model, batch_size, self.report)
        self.plan = best.plan
        self.devices = self.devices[: best.num_devices]
        self.__dict__.pop("mesh", None)
        self.because = best.because


def _nothing_fits(model: Any, batch_size: int, report: PlanReport) -> PlanError:
    closest = report.least_bad
    near = "" if closest is None else f"{closest.plan.describe()}: {closest.because}"
    return PlanError(
        f"No plan for {model.name!r} with a batch of {batch_size} fits on "
        f"{report.machine}; the closest is {near}.",
        "What a step needs must fit the memory of each device.",
        "Use a smaller batch_size, more devices, or see mw.plan(model, batch_size).",
    )


def _batch_of(arguments: Mapping[str, Any]) -> tuple[Any, int]:
    """The first batch of arrays, and the samples of a batch; no batch of a stream."""
    x, y = arguments.get("x"), arguments.get("y")
    size = arguments.get("batch_size") or getattr(x, "batch_size", None) or USUAL_BATCH
    leaves = jax.tree.leaves((x, y))
    is_arrays = bool(leaves) and all(isinstance(each, np.ndarray) for each in leaves)
    if not is_arrays or y is None:
        return None, int(size)
    size = min(int(size), samples_of(x))
    return jax.tree.map(lambda array: array[:size], (x, y)), size
