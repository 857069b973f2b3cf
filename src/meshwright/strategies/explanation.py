"""What a strategy does to a model, in words and numbers."""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from meshwright.devices.sizes import format_bytes
from meshwright.errors import StrategyError
from meshwright.models.precision import keeping_precision, layers_by_precision
from meshwright.parallel.collectives import count_collectives
from meshwright.parallel.layout import VariableLayout
from meshwright.parallel.microbatch import cut_batch
from meshwright.parallel.plan import Plan
from meshwright.strategies.attach import place
from meshwright.train.accumulation import why_not_a_mean
from meshwright.train.mesh_step import (
    MeshStep,
    as_keras_takes_them,
    training_state,
)

import jax

if TYPE_CHECKING:
    from meshwright.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Where every variable goes and why, and what travels in a training step."""

    strategy: str
    layouts: tuple[VariableLayout, ...]
    collectives: dict[str, int]
    """Collectives of one compiled training step by kind."""
    precisions: dict[str, tuple[str, ...]]
    """The layers by what they compute in."""
    notes: tuple[str, ...] = ()
    """What else the plan does to a training step, and why."""

    @property
    def whole(self) -> tuple[VariableLayout, ...]:
        """The variables that every device holds whole."""
        return tuple(layout for layout in self.layouts if not layout.is_split)

    def __str__(self) -> str:
        width = max((len(layout.path) for layout in self.layouts), default=0)
        lines = [self.strategy]
        lines += [
            f"  {v.path:<{width}}  {v.shape!s:<14} {_spec(v):<24} {v.because}"
            for v in self.layouts
        ]
        if self.precisions.keys() - {"float32"}:
            lines += [
                f"{len(layers)} layers compute in {precision}: {', '.join(layers)}"
                for precision, layers in self.precisions.items()
            ]
        kept = sum(4 * prod(v.shape) for v in self.whole)
        travels = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items())
        lines.append(
            f"{len(self.whole)} of {len(self.layouts)} variables are whole on every "
            f"device (about {format_bytes(kept)}); a training step has "
            f"{travels or 'no collectives'}"
        )
        return "\n".join([*lines, *self.notes])


def explain(strategy: "Strategy", model: Any, x: Any, y: Any) -> Explanation:
    """See `Strategy.explain`."""
    if not (model.built and model.compiled):
        raise StrategyError(
            f"explain received {model.name!r}, which is not built or not compiled.",
            "What travels is read from the compiled training step.",
            "Build the model (give it an Input) and call compile first.",
        )
    batch = as_keras_takes_them(x), as_keras_takes_them(y)
    with keeping_precision(model):
        layouts = place(model, strategy)
        train_step = jax.jit(model.train_step)
        step = MeshStep(model, train_step, strategy.plan, strategy.mesh)
        state = training_state(model, batch)
        compiled = step.lower(state, batch).compile()
        precisions = layers_by_precision(model)
        notes = _notes(strategy.plan, model, state, batch)
    return Explanation(
        strategy=repr(strategy),
        layouts=tuple(layouts.values()),
        collectives=count_collectives(compiled.as_text()),
        precisions=precisions,
        notes=notes,
    )


def _notes(plan: Plan, model: Any, state: Any, batch: Any) -> tuple[str, ...]:
    notes = []
    if plan.accumulate > 1:
        cut = cut_batch(batch, plan.accumulate)
        reason = why_not_a_mean(model, state, cut)
        how = "each adds the gradients of its own loss, which is a mean over samples"
        if reason is not None:
            how = (
                "every forward pass runs twice, first for the loss of the whole "
                f"batch, because {reason}"
            )
        notes.append(f"accumulate={plan.accumulate}: microbatches, and {how}")
    if plan.remat:
        notes.append(
            "remat: activations inside of blocks are computed again for the gradients, "
            "because only what passes between blocks is kept"
        )
    return tuple(notes)


def _spec(layout: VariableLayout) -> str:
    return str(layout.spec).replace("'", "") if layout.is_split else "whole"
