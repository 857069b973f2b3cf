"""Keras steps whose variables live on one device, while all devices compute."""

from typing import Any

from meshwright.devices.memory import MemoryInUse
from meshwright.parallel.central import at_home, bring_home, spread
from meshwright.parallel.mesh import replicated
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.parallel.transfers import has_part
from meshwright.train.gradient_programs import SLOTS, GradientPrograms
from meshwright.train.mesh_programs import Shardings
from meshwright.train.mesh_step import MeshStep

import jax
from jax.sharding import Mesh


class CentralStep(MeshStep):
    """A step of `evaluate` or `predict`: it computes with copies of the variables.

    Arguments:
        model: The model.
        step: Keras' step.
        plan: The plan.
        mesh: The devices that compute.
        home: A mesh of the device that the variables live on.
    """

    def __init__(
        self, model: Any, step: Any, plan: Plan, mesh: Mesh, home: Mesh
    ) -> None:
        super().__init__(model, step, plan, mesh, places={})
        self._home = home
        self._kept: Any = None
        """What stays at home while a step runs."""
        self._copies: Any = None
        self._returned: Any = None

    def _lay_out(self, state: Any) -> tuple[Any, Shardings]:
        if state is self._returned:
            return super()._lay_out(self._copies)
        weights, others, *rest = state
        self._kept = weights
        copies = spread([*weights, *others], self._home, self._mesh)
        number = len(weights)
        return super()._lay_out((copies[:number], copies[number:], *rest))

    def _dispatch(self, program: Any, cut: Microbatches, state: Any, *rest: Any) -> Any:
        outputs, self._copies = super()._dispatch(program, cut, state, *rest)
        _, others, *rest = self._copies
        self._returned = (self._kept, bring_home(others, self._home), *rest)
        return outputs, self._state.keep(self._returned)


class CentralTrainingStep(MeshStep):
    """A step of `fit`: gradients from all devices, one update where variables live.

    Arguments are those of `CentralStep`.
    """

    programs = GradientPrograms
    why_alone = "the device that keeps the variables updates them after each"

    def __init__(
        self, model: Any, step: Any, plan: Plan, mesh: Mesh, home: Mesh
    ) -> None:
        super().__init__(model, step, plan, mesh, places={})
        self._home = home
        self._kept: Any = None
        self._update = jax.jit(
            model.optimizer.stateless_apply,
            donate_argnums=(0, 2),
            out_shardings=replicated(home),
        )

    def _lay_out(self, state: Any) -> tuple[Any, Shardings]:
        *lists, metrics = state
        home = [at_home(group, self._home) for group in lists]
        self._kept = home
        groups = (*home[:SLOTS], [value for value in home[SLOTS] if not value.ndim])
        values = [value for group in groups for value in group]
        copies = iter(spread(values, self._home, self._mesh))
        copied = [[next(copies) for _ in group] for group in groups]
        return super()._lay_out((*copied, metrics))

    def memory_in_use(self) -> MemoryInUse:
        """Nothing: gradients and updates are two programs, on other devices."""
        return ()

    def _dispatch(self, program: Any, cut: Microbatches, state: Any, *rest: Any) -> Any:
        logs, after = super()._dispatch(program, cut, state, *rest)
        gradients, others, _, metrics = after
        weights, _, slots = self._kept
        self._kept = None
        arrived = bring_home([*gradients, *others], self._home)
        gradients, others = arrived[: len(weights)], arrived[len(weights) :]
        if has_part(self._home):
            weights, slots = self._update(slots, gradients, weights)
        # Elsewhere the old values stand for the new ones: they have no shards there.
        return logs, self._state.keep((weights, others, slots, metrics))
