"""Ties a model to a strategy, so that its steps run over the strategy's mesh."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meshwright.data.course import Course
from meshwright.data.intake import Intake
from meshwright.data.tally import Tally
from meshwright.devices.apart import is_apart
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.runtime import belongs_to_some, to_host
from meshwright.devices.scope import homes_of
from meshwright.devices.strategy_hooks import INTAKE_MAKER, STEP_MAKER
from meshwright.errors import StrategyError
from meshwright.models.precision import set_precision
from meshwright.parallel.layout import VariableLayout, lay_out_model
from meshwright.train.listeners import callbacks_in
from meshwright.train.mesh_step import MeshStep
from meshwright.train.pipeline_step import PipelineStep
from meshwright.train.placements import place_variables
from meshwright.train.run import Run, current_run
from meshwright.train.run_course import RunCourse
from meshwright.train.stage_cut import StageCut
from meshwright.train.stopwatch import Listener, Stopwatch
from meshwright.train.tracing_errors import explaining_tracing

import jax
import numpy as np
from jax.sharding import NamedSharding

if TYPE_CHECKING:
    from meshwright.strategies.strategy import Strategy

_STRATEGY = "_meshwright_strategy"
_CUT = "_meshwright_cut"
_PLACE = "_meshwright_place"


def attach(model: Any, strategy: "Strategy") -> None:
    """Makes a strategy the one that runs a model's steps."""
    install_keras_hooks()

    @contextmanager
    def make_intake(
        model: Any, verb: str, arguments: Mapping[str, Any]
    ) -> Iterator[Intake]:
        strategy.prepare(model, arguments)
        pace = strategy.make_pace(model, verb, _most_steps(verb))
        strategy.pace[verb] = pace
        with explaining_tracing(model), _course(model, verb, strategy) as course:
            tally = Tally()
            intake = Intake(
                model,
                verb,
                pace,
                course,
                tally=tally,
                watch=_watch(verb, tally, course, arguments, strategy),
                check_nan=strategy.check_nan,
                depth=strategy.prefetch,
            )
            with intake:
                yield intake

    object.__setattr__(model, _STRATEGY, strategy)
    object.__setattr__(model, _CUT, StageCut(model.name, strategy.plan))
    object.__setattr__(model, STEP_MAKER, strategy.make_step)
    object.__setattr__(model, INTAKE_MAKER, make_intake)
    # Programs that were made for other devices are void.
    model.train_function = model.test_function = model.predict_function = None


def _most_steps(verb: str) -> int | None:
    """How many steps may be dispatched together, so that checkpoints are in time."""
    run = _run()
    return run.orders.save_every if run is not None and verb == "fit" else None


@contextmanager
def _course(model: Any, verb: str, strategy: "Strategy") -> Iterator[Course]:
    """What a run sees of a call of `fit`, if there is a run."""
    run = _run() if verb == "fit" else None
    if run is None:
        yield Course()
        return
    with run.fitting() as number:
        if number is None:
            yield Course()
        else:
            yield RunCourse(run, number, model, _plan_in_json(strategy))


def _watch(
    verb: str,
    tally: Tally,
    course: Course,
    arguments: Mapping[str, Any],
    strategy: "Strategy",
) -> Stopwatch | None:
    """What follows the steps of a fit, if anybody wants to know when they are done."""
    if verb != "fit":
        return None
    from meshwright.train.monitor import Monitor

    given = callbacks_in(arguments.get("callbacks"))
    monitors = [callback for callback in given if isinstance(callback, Monitor)]
    listeners: list[Listener] = [*monitors]
    if isinstance(course, RunCourse) and course.listens:
        listeners.append(course)
    if not listeners:
        return None
    stopwatch = Stopwatch(tally, listeners)
    for monitor in monitors:
        monitor.follow(stopwatch, _plan_in_json(strategy))
    return stopwatch


def _run() -> Run | None:
    """The run whose steps these are; trainings apart from others are in none."""
    return None if is_apart() else current_run()


def _plan_in_json(strategy: "Strategy") -> dict[str, Any]:
    """What a strategy runs by: the planner's report, or the plan that was named."""
    used = {"strategy": repr(strategy), "devices": list(strategy.devices)}
    report = getattr(strategy, "report", None)
    if report is not None:
        return {**report.to_json(), **used}
    unknown = ("step_seconds", "memory_bytes", "bubble", "dollars_per_hour", "fits")
    named = f"{type(strategy).__name__} was named"
    entry = {"plan": strategy.plan.to_json(), **dict.fromkeys(unknown)}
    best = {**entry, "because": named}
    return {"best": best, "candidates": [], "rejected": [], **used}


def step_over_mesh(
    model: Any, step: Any, strategy: "Strategy", cut: StageCut | None = None
) -> MeshStep | PipelineStep:
    """What runs a step of Keras' as a strategy wants it.

    Arguments:
        model: The model.
        step: The step.
        strategy: The strategy.
        cut: Where the model is cut into pieces; as it was attached if left out.
    """
    run = _run()
    skips = run is not None and run.orders.on_nan == "skip"
    if strategy.plan.stages == 1:
        return MeshStep(model, step, strategy.plan, strategy.mesh, skips=skips)
    if skips:
        raise StrategyError(
            f"A run with --on-nan skip trains {model.name!r} in {strategy.plan.stages} "
            "stages.",
            "The stages of a pipeline update their weights on their own, before it is "
            "known whether a step is to be left out.",
            "Use --on-nan rollback or stop.",
        )
    cut = cut or cut_of(model)
    return PipelineStep(model, step, strategy.plan, strategy.mesh, cut)


def cut_of(model: Any) -> StageCut:
    """Where a model that has a strategy is cut into pieces."""
    cut: StageCut = getattr(model, _CUT)
    return cut


def refuse_placed_by_hand(model: Any, strategy: "Strategy") -> None:
    """Refuses a model whose layers were put on several devices by `mw.device`."""
    homes = sorted({name for _, name in homes_of(model)})
    if len(homes) > 1:
        raise StrategyError(
            f"{strategy!r} received {model.name!r}, whose layers were put on "
            f"{', '.join(homes)} by hand.",
            "This strategy decides itself where variables live and who computes.",
            "Build the model without mw.device, or train it without a strategy.",
        )


def attached(model: Any) -> "Strategy | None":
    """The strategy of a model, if it has one."""
    return getattr(model, _STRATEGY, None)


def place(model: Any, strategy: "Strategy") -> dict[str, VariableLayout]:
    """Moves all variables of a model, its optimizer and metrics onto the mesh.

    The model computes in the plan's precision from then on.
    """
    set_precision(model, strategy.plan.precision)
    layouts = lay_out_model(model, strategy.plan)
    if strategy.plan.stages > 1:
        # Steps place them, when it is known where the model is cut.
        return layouts
    meshes, offloads = (strategy.metrics_home, strategy.home), strategy.plan.offload
    places = place_variables(model, layouts, *meshes, offloads=offloads)
    for variable, where in places:
        _move(variable, where)
    return layouts


def _move(variable: Any, target: NamedSharding) -> None:
    variable._layout = target
    value = variable._value
    if value is None:
        return
    # Arrays that only some processes have do not look alike in all of them, so it is
    # remembered instead of seen that they are where they belong.
    was_moved = getattr(variable, _PLACE, None) == target
    setattr(variable, _PLACE, target)
    is_own = not target.is_fully_addressable and value.is_fully_addressable
    if (not was_moved) if belongs_to_some(target) else is_own:
        from jax.experimental import multihost_utils

        # Every process made its own; the first one's counts.
        value = np.asarray(multihost_utils.broadcast_one_to_all(_host_value(value)))
        # Processes that have no part of an array are told its type.
        given, dtype = value.__getitem__, value.dtype
        value = jax.make_array_from_callback(value.shape, target, given, dtype=dtype)
    variable._direct_assign(value)


def _host_value(value: Any) -> Any:
    """A value to be sent by the first process; others may have nothing of it."""
    if value.is_fully_addressable:
        return np.asarray(value)
    has_nothing = belongs_to_some(value.sharding) and not value.addressable_shards
    return np.zeros(value.shape, value.dtype) if has_nothing else to_host(value)
