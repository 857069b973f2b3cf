"""What a strategy does to a model, in words and numbers."""

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from meshwright.devices.sizes import format_bytes
from meshwright.errors import StrategyError
from meshwright.models.precision import keeping_precision, layers_by_precision
from meshwright.parallel.collectives import count_collectives
from meshwright.parallel.layout import VariableLayout, unique_variables
from meshwright.parallel.microbatch import cut_batch
from meshwright.parallel.plan import Plan
from meshwright.strategies.attach import place
from meshwright.train.accumulation import first_of, why_not_a_mean
from meshwright.train.mesh_step import as_keras_takes_them, training_state
from meshwright.train.pipeline_step import PipelineStep
from meshwright.train.stage_cut import StageCut

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
    has_stages: bool = False
    """Whether the model is cut into stages."""
    kept_on: str | None = None
    """The device that keeps all variables, if one does."""
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
        where = "every device of their stage" if self.has_stages else "every device"
        where = self.kept_on or where
        ways = "sends values from stage to stage" if self.has_stages else ""
        lines.append(
            f"{len(self.whole)} of {len(self.layouts)} variables are whole on "
            f"{where} (about {format_bytes(kept)}); a training step "
            f"{ways or 'has ' + (travels or 'no collectives')}"
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
        state = training_state(model, batch)
        cut = StageCut(model.name, strategy.plan)
        step = strategy.make_step(model, train_step, cut)
        collectives, stages, travels = _what_travels(
            step, model, state, batch, strategy
        )
        layouts = _with_stages(layouts, step, model)
        if strategy.keeps_variables_on is not None:
            because = f"kept on {strategy.keeps_variables_on}"
            layouts = {p: replace(v, because=because) for p, v in layouts.items()}
        precisions = layers_by_precision(model)
        notes = _notes(strategy.plan, model, state, batch)
    return Explanation(
        strategy=repr(strategy),
        layouts=tuple(layouts.values()),
        collectives=collectives,
        precisions=precisions,
        has_stages=bool(stages),
        kept_on=strategy.keeps_variables_on,
        notes=(*stages, *notes, *travels),
    )


def _with_stages(
    layouts: dict[str, VariableLayout], step: Any, model: Any
) -> dict[str, VariableLayout]:
    if not isinstance(step, PipelineStep):
        return layouts
    found = {}
    for path, variable in unique_variables(model).items():
        layout = layouts[path]
        because = f"stage {step.stage_of(variable)}; {layout.because}"
        found[path] = replace(layout, because=because)
    return found


def _what_travels(
    step: Any, model: Any, state: Any, batch: Any, strategy: "Strategy"
) -> tuple[dict[str, int], list[str], tuple[str, ...]]:
    """Collectives by kind, and what is to be said of stages and of bytes."""
    if isinstance(step, PipelineStep):
        # Its stages are programs of their own, and pass values on beside them.
        return {}, step.describe(batch), ()
    program = step.lower(state, batch).compile().as_text()
    bytes_of = strategy.what_travels(model, program, batch)
    return count_collectives(program), [], bytes_of


def _notes(plan: Plan, model: Any, state: Any, batch: Any) -> tuple[str, ...]:
    notes = []
    number = plan.microbatches or plan.accumulate
    if number > 1:
        cut = cut_batch(batch, number)
        reason = why_not_a_mean(model, state, first_of(cut))
        how = (
            "each microbatch adds the gradients of its own loss, which is a mean over "
            "samples"
        )
        if reason is not None:
            how = (
                "every forward pass of a microbatch runs twice, first for the loss of "
                f"the whole batch, because {reason}"
            )
        lever = "accumulate" if plan.stages == 1 else "microbatches"
        notes.append(f"{lever}={number}: {how}")
    if plan.stages > 1:
        notes.append(plan.schedule_of().timeline())
    if plan.remat:
        notes.append(
            "remat: activations inside of blocks are computed again for the gradients, "
            "because only what passes between blocks is kept"
        )
    if plan.offload:
        notes.append(
            "offload: the optimizer's state is in the memory of the host, and comes to "
            "the devices for each update"
        )
    return tuple(notes)


def _spec(layout: VariableLayout) -> str:
    return str(layout.spec).replace("'", "") if layout.is_split else "whole"
