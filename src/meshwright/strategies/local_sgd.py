"""`mw.LocalSGD`: each device trains a model of its own, and they agree now and then."""

from typing import Any, Unpack

from meshwright.devices.sizes import format_bytes, is_count
from meshwright.errors import PlanError, StrategyError
from meshwright.parallel.collectives import traffic
from meshwright.parallel.plan import Levers, Plan
from meshwright.strategies.attach import (
    place,
    refuse_placed_by_hand,
    step_over_mesh,
)
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices
from meshwright.train.local_step import LocalStep, LookingStep
from meshwright.train.mesh_step import training_state
from meshwright.train.run import current_run
from meshwright.train.stage_cut import StageCut

import jax


class LocalSGD(Strategy):
    """Each device trains on its share of batches; weights are averaged now and then.

    With an outer optimizer this is DiLoCo: the difference between the weights before
    and after a round, averaged over the workers, is the gradient of its step.

    Arguments:
        sync_every: Steps of a round, at the end of which the workers agree.
        outer: `None` or `'average'` for the average of the workers, or a Keras
            optimizer, for example `keras.optimizers.SGD(0.7, momentum=0.9,
            nesterov=True)`. Each model gets one of its own that is like it.
        devices: The devices to use, each a worker; all of the best kind if left out.
        levers: `accumulate`, `remat` and `precision`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.LocalSGD(sync_every=8)
    LocalSGD(data=8, sync_every=8)
    """

    is_a_plan = False

    def __init__(
        self,
        sync_every: int,
        outer: Any = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        if not is_count(sync_every) or sync_every < 1:
            raise PlanError(
                f"LocalSGD received sync_every={sync_every!r}.",
                "It is a number of steps: a whole number from 1.",
                "Use, for example, sync_every=8; 1 averages after each step.",
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

    def refuse_verify(self) -> None:
        """Raises an error: by its nature it leads to other weights."""
        raise StrategyError(
            f"verify received {self!r}.",
            "It compares with one device, and this strategy leads to other weights by "
            "its nature.",
            "docs/strategies/ says which run it does equal; verify mw.Mirrored() "
            "instead.",
        )

    def make_step(self, model: Any, step: Any, cut: StageCut | None = None) -> Any:
        """Training on workers of their own; the rest on what they agree on."""
        refuse_placed_by_hand(model, self)
        place(model, self)
        if step.__name__ != "train_step":
            return LookingStep(model, step, self.plan, self.mesh)
        run = current_run()
        if run is not None and run.orders.on_nan == "skip":
            raise StrategyError(
                f"A run with --on-nan skip trains {model.name!r} by {self!r}.",
                "Each worker would leave out steps of its own, and nobody would know "
                "how many.",
                "Use --on-nan rollback or stop.",
            )
        own = (self.sync_every, self.outer)
        return LocalStep(model, step, self.plan, self.mesh, *own)

    def what_travels(self, model: Any, program: str, batch: Any) -> tuple[str, ...]:
        """The bytes of a step, beside those of `Mirrored` on the same devices."""
        ours = traffic(program)
        step: Any = step_over_mesh(model, jax.jit(model.train_step), self)
        state = training_state(model, batch)
        theirs = traffic(step.lower(state, batch).compile().as_text())
        mean, mirrored = ours.per_run(self.sync_every), theirs.per_run(1)
        return (
            f"each step sends {format_bytes(ours.always)}, each {self.sync_every}th "
            f"{format_bytes(ours.sometimes)} more: {format_bytes(round(mean))} a step, "
            f"{mean / mirrored:.1%} of the {format_bytes(round(mirrored))} of Mirrored",
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
        "It takes None or 'average', or a Keras optimizer, which moves what the "
        "workers agree on.",
        "Use, for example, outer=keras.optimizers.SGD(0.7, momentum=0.9, "
        "nesterov=True).",
    )
