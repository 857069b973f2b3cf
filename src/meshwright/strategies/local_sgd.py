"""`mw.LocalSGD`: every device trains a model of its own, and they agree now and then."""

from typing import Any, Unpack

from meshwright.devices.sizes import is_count
from meshwright.errors import PlanError, StrategyError
from meshwright.parallel.plan import Levers, Plan
from meshwright.strategies.attach import place
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices
from meshwright.train.local_step import LocalStep
from meshwright.train.run import current_run


class LocalSGD(Strategy):
    """Each device trains on its share of every batch; weights are averaged now and then.

    With an outer optimizer this is DiLoCo: the difference between the weights before
    and after a round, averaged over the workers, is the gradient of its step.

    Arguments:
        sync_every: Steps of a round, at the end of which the workers agree.
        outer: `None` or `'average'` for the average of the workers, or a Keras
            optimizer, for example `keras.optimizers.SGD(0.7, momentum=0.9,
            nesterov=True)`. Each model gets one of its own that is like it.
        devices: The devices to use, each a worker; all of the best kind if left out.

    >>> import meshwright as mw
    >>> mw.LocalSGD(sync_every=8)
    LocalSGD(data=8, sync_every=8)
    """

    def __init__(
        self,
        sync_every: int,
        outer: Any = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        if not is_count(sync_every):
            raise PlanError(
                f"LocalSGD received sync_every={sync_every!r}.",
                "It is a number of steps: a whole number from 1.",
                "Use, for example, sync_every=8; sync_every=1 averages after each step.",
            )
        chosen = choose_devices(devices)
        if len(chosen) < 2:
            raise PlanError(
                f"LocalSGD received one device, {chosen[0]}.",
                "Its workers are devices, and one has nobody to agree with.",
                "Pass two or more as devices=[...], or use mw.Single().",
            )
        self.sync_every = sync_every
        self.outer = _checked(outer)
        super().__init__(Plan(data=len(chosen), **levers), chosen)

    def __repr__(self) -> str:
        outer = f", outer={type(self.outer).__name__}" if self.outer else ""
        return f"LocalSGD({self.plan.describe()}, sync_every={self.sync_every}{outer})"

    def make_step(self, model: Any, step: Any) -> Any:
        """Training on workers of their own; the rest on what they agree on."""
        if step.__name__ != "train_step":
            return super().make_step(model, step)
        run = current_run()
        if run is not None and run.orders.on_nan == "skip":
            raise StrategyError(
                f"A run with --on-nan skip trains {model.name!r} by {self!r}.",
                "Each worker would leave out steps of its own, and nobody would know "
                "how many.",
                "Use --on-nan rollback or stop.",
            )
        place(model, self)
        return LocalStep(
            model, step, self.plan, self.mesh, self.sync_every, self.outer
        )


def _checked(outer: Any) -> Any:
    """The outer optimizer, or None for the average."""
    import keras

    if outer is None or outer == "average":
        return None
    if isinstance(outer, keras.optimizers.Optimizer):
        return outer
    raise PlanError(
        f"LocalSGD received outer={outer!r} (a {type(outer).__name__}).",
        "It takes None or 'average', or a Keras optimizer, which moves what the workers "
        "agree on.",
        "Use, for example, outer=keras.optimizers.SGD(0.7, momentum=0.9, "
        "nesterov=True).",
    )
