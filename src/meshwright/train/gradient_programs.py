"""The programs of a Keras training step that ends with its gradients."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from meshwright.errors import StrategyError
from meshwright.parallel.microbatch import Microbatches
from meshwright.train.mesh_programs import TRAIN_STATES, MeshPrograms, Shardings

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

SLOTS = 2
"""The number of the list in a training step's state that is the optimizer's."""


class GradientPrograms(MeshPrograms):
    """As its base, but a training step returns gradients in the place of weights.

    Of the optimizer's variables these programs take the numbers alone, as the scale of
    a loss; the others stay where the weights are updated.
    """

    def shardings(self, num_lists: int) -> Shardings:
        """Where the state belongs."""
        places = list(super().shardings(num_lists))
        if num_lists == TRAIN_STATES:
            places[SLOTS] = self._numbers_of(places[SLOTS])
        return tuple(places)

    def state_shapes(self) -> Any:
        """The shapes and types of the state."""
        lists = list(super().state_shapes())
        lists[SLOTS] = self._numbers_of(lists[SLOTS])
        return tuple(lists)

    def _numbers_of(self, values: Any) -> Any:
        slots = zip(self._model.optimizer.variables, values, strict=True)
        return type(values)(value for slot, value in slots if not slot.shape)

    def _run(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        weights, others, numbers, metrics = state
        slots = super().state_shapes()[SLOTS]
        given = iter(numbers)
        known = [next(given) if not slot.shape else None for slot in slots]
        large = [slot for slot in slots if slot.shape]

        def run(large: Any, known: Any, state: Any, batch: Any) -> Any:
            weights, others, metrics = state
            rest = iter(large)
            slots = [next(rest) if value is None else value for value in known]
            return self._gradients(cut, (weights, others, slots, metrics), batch)

        args = (known, (weights, others, metrics), batch)
        program, shapes = jax.make_jaxpr(run, return_shape=True)(large, *args)
        self._refuse_use_of(program.jaxpr, len(large))
        zeros = [jnp.zeros(slot.shape, slot.dtype) for slot in large]
        values = jaxpr_as_fun(program)(*zeros, *jax.tree.leaves(args))
        logs, (gradients, others, metrics) = jax.tree.unflatten(
            jax.tree.structure(shapes), values
        )
        return logs, (gradients, others, list(numbers), metrics)

    def _gradients(self, cut: Microbatches, state: Any, batch: Any) -> Any:
        with _stopping_at_update(self._model.optimizer) as updates:
            logs, (gradients, others, slots, metrics) = self._run_any(cut, state, batch)
        is_last = len(updates) == 1 and _are(
            [*gradients, *slots], [*updates[0].gradients, *updates[0].slots]
        )
        if not is_last:
            raise StrategyError(
                f"train_step of {self._model.name!r} does not end with one "
                "stateless_apply of its optimizer.",
                "Central storage computes gradients on all devices and updates weights "
                "on another, so the update is the last that happens to them.",
                "Return what optimizer.stateless_apply returned, or use mw.Mirrored().",
            )
        return logs, (gradients, others, metrics)

    def _refuse_use_of(self, jaxpr: Any, number: int) -> None:
        read = {id(v) for operation in jaxpr.eqns for v in operation.invars} | {
            id(v) for v in jaxpr.outvars
        }
        slots = [slot for slot in self._model.optimizer.variables if slot.shape]
        used = zip(slots, jaxpr.invars[:number], strict=True)
        names = [slot.path for slot, v in used if id(v) in read]
        if names:
            raise StrategyError(
                f"train_step of {self._model.name!r} reads {', '.join(names)} before "
                "its optimizer does.",
                "With central storage optimizer state stays on one device; others see "
                "its numbers only.",
                "Leave it to the optimizer, or use mw.Mirrored().",
            )


def _are(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


class _Update(NamedTuple):
    """What an optimizer was given."""

    slots: list[Any]
    gradients: list[Any]


@contextmanager
def _stopping_at_update(optimizer: Any) -> Iterator[list[_Update]]:
    """Lets an optimizer give back gradients as if they were weights, while traced."""
    seen: list[_Update] = []

    def apply(slots: Any, gradients: Any, weights: Any) -> Any:
        seen.append(_Update(list(slots), list(gradients)))
        return list(gradients), list(slots)

    # Its own attribute hides the method, whatever class that is from.
    vars(optimizer)["stateless_apply"] = apply
    try:
        yield seen
    finally:
        del vars(optimizer)["stateless_apply"]
