"""A step that was traced once, to be looked at and put into programs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.models.work import all_operations, count_flops
from meshwright.train.pure_step import Step

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


@dataclass(frozen=True)
class TracedStep:
    """A step as operations; running it again asks nothing of Keras.

    Attributes:
        program: The operations.
        logs: The shapes of what it returns besides the state.
        is_repeatable: Whether its state goes in and out with the same shapes and types,
            so that it can be the body of a loop.
    """

    program: ClosedJaxpr
    logs: Any
    is_repeatable: bool

    @classmethod
    def of(cls, step: Step, state: Any, batch: Any) -> "TracedStep":
        """Traces a step.

        Arguments:
            step: Takes state and batch; returns logs and state.
            state: Lists of shapes and types.
            batch: A tree of them.
        """
        program, (logs, after) = jax.make_jaxpr(step, return_shape=True)(state, batch)
        before = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
        same = before == [(x.shape, x.dtype) for x in jax.tree.leaves(after)]
        return cls(program, logs, same)

    @cached_property
    def flops(self) -> int:
        """Its floating point operations."""
        return count_flops(self.program)

    @cached_property
    def has_grouped_convolutions(self) -> bool:
        """Whether it convolves channels in groups, or computes gradients of that."""
        groups = ("feature_group_count", "batch_group_count")
        return any(
            operation.params[name] > 1
            for operation in all_operations(self.program.jaxpr)
            if operation.primitive.name == "conv_general_dilated"
            for name in groups
        )

    @property
    def num_operations(self) -> int:
        """Its operations of any kind."""
        return len(self.program.jaxpr.eqns)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs the step; returns logs and state."""
        structure = jax.tree.structure(self.logs)
        values = jaxpr_as_fun(self.program)(*jax.tree.leaves((state, batch)))
        logs = jax.tree.unflatten(structure, values[: structure.num_leaves])
        after = iter(values[structure.num_leaves :])
        return logs, tuple([next(after) for _ in group] for group in state)
