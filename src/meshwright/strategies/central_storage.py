"""`mw.CentralStorage`: variables on one device, gradients from all."""

from functools import cached_property
from typing import Any, Unpack

from meshwright.devices.device import Device
from meshwright.devices.runtime import usable_devices
from meshwright.devices.sizes import format_bytes
from meshwright.errors import PlanError, StrategyError
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.plan import Levers, Plan
from meshwright.strategies.attach import place, refuse_placed_by_hand
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices
from meshwright.train.central_step import CentralStep, CentralTrainingStep
from meshwright.train.run import current_run
from meshwright.train.stage_cut import StageCut

from jax.sharding import Mesh


class CentralStorage(Strategy):
    """Variables and optimizer state live on one device; all devices compute gradients.

    Arguments:
        variables_device: The device that keeps them; the first of the host's CPUs if
            left out, or in a run on CPUs the first of `devices`.
        devices: The devices that compute; all of the best kind if left out.
        levers: `accumulate`, `remat` and `precision`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.CentralStorage("CPU:2", devices=["CPU:0", "CPU:1"])
    CentralStorage(data=2, variables on /device:CPU:2)
    """

    is_a_plan = False

    def __init__(
        self,
        variables_device: str | Device | None = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        chosen = choose_devices(devices)
        if len(chosen) < 2:
            raise PlanError(
                f"CentralStorage received one device, {chosen[0]}, to compute on.",
                "It adds up the gradients of several devices.",
                "Pass two or more as devices=[...], or use mw.Single().",
            )
        self.variables_device = _home_of(variables_device, chosen)
        super().__init__(Plan(data=len(chosen), **levers), chosen)

    def __repr__(self) -> str:
        plan = self.plan.describe()
        return f"CentralStorage({plan}, variables on {self.variables_device})"

    @property
    def keeps_variables_on(self) -> str:
        """The device that keeps all variables."""
        return self.variables_device

    @cached_property
    def home(self) -> Mesh:
        """The device that the variables live on, as a mesh."""
        return make_mesh(Plan(), (self.variables_device,))

    def what_travels(self, model: Any, program: str, batch: Any) -> tuple[str, ...]:
        """The copies of a step, which are no part of its program."""
        there = [*model.trainable_variables, *model.non_trainable_variables]
        size = format_bytes(sum(variable.value.nbytes for variable in there))
        return (
            f"each step copies {size} of variables from {self.variables_device} to "
            f"{len(self.devices)} devices, and as much of gradients and other "
            "variables back",
        )

    def make_step(self, model: Any, step: Any, cut: StageCut | None = None) -> Any:
        """Steps that take copies of the variables to all devices."""
        refuse_placed_by_hand(model, self)
        run = current_run()
        if run is not None and run.orders.on_nan == "skip":
            raise StrategyError(
                f"A run with --on-nan skip trains {model.name!r} by {self!r}.",
                "Gradients and update are programs of their own, and a step is left "
                "out by one that is whole.",
                "Use --on-nan rollback or stop.",
            )
        place(model, self)
        trains = step.__name__ == "train_step"
        kind = CentralTrainingStep if trains else CentralStep
        return kind(model, step, self.plan, self.mesh, self.home)


def _home_of(device: str | Device | None, chosen: tuple[str, ...]) -> str:
    if device is None:
        cpus = [each.name for each in usable_devices() if each.kind == "CPU"]
        is_on_cpus = "/device:CPU:" in chosen[0]
        if is_on_cpus or not cpus:
            return chosen[0]
        device = cpus[0]
    return choose_devices([device])[0]
