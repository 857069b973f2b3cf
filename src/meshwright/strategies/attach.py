"""Ties a model to a strategy, so that its steps run over the strategy's mesh."""

from typing import TYPE_CHECKING, Any

from meshwright.data.intake import Intake
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.strategy_hooks import INTAKE_MAKER, STEP_MAKER
from meshwright.models.precision import set_precision
from meshwright.parallel.layout import VariableLayout, lay_out_model, unique_variables
from meshwright.parallel.mesh import replicated, sharding
from meshwright.train.mesh_step import MeshStep
from meshwright.train.pace import Pace

import jax
import numpy as np
from jax.sharding import NamedSharding

if TYPE_CHECKING:
    from meshwright.strategies.strategy import Strategy

_STRATEGY = "_meshwright_strategy"


def attach(model: Any, strategy: "Strategy") -> None:
    """Makes a strategy the one that runs a model's steps."""
    install_keras_hooks()

    def make_step(model: Any, step: Any) -> MeshStep:
        place(model, strategy)
        return MeshStep(model, step, strategy.plan, strategy.mesh)

    def make_intake(model: Any, verb: str) -> Intake:
        pace = Pace(model, verb, strategy.mesh, strategy.resident)
        strategy.pace[verb] = pace
        check_nan, depth = strategy.check_nan, strategy.prefetch
        return Intake(model, verb, pace, check_nan=check_nan, depth=depth)

    object.__setattr__(model, _STRATEGY, strategy)
    object.__setattr__(model, STEP_MAKER, make_step)
    object.__setattr__(model, INTAKE_MAKER, make_intake)
    # Programs that were made for other devices are void.
    model.train_function = model.test_function = model.predict_function = None


def attached(model: Any) -> "Strategy | None":
    """The strategy of a model, if it has one."""
    return getattr(model, _STRATEGY, None)


def place(model: Any, strategy: "Strategy") -> dict[str, VariableLayout]:
    """Moves all variables of a model, its optimizer and metrics onto the mesh.

    The model computes in the plan's precision from then on.
    """
    set_precision(model, strategy.plan.precision)
    layouts = lay_out_model(model, strategy.plan)
    whole = replicated(strategy.mesh)
    for path, variable in unique_variables(model).items():
        _move(variable, sharding(strategy.mesh, layouts[path].spec))
    for variable in model.metrics_variables:
        _move(variable, whole)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        for slot in optimizer.variables:
            reference = _reference_of(slot, model)
            _move(slot, whole if reference is None else reference._layout)
    return layouts


def _move(variable: Any, target: NamedSharding) -> None:
    variable._layout = target
    value = variable._value
    if value is None:
        return
    if not target.is_fully_addressable and value.is_fully_addressable:
        from jax.experimental import multihost_utils

        # Every process made its own; the first one's counts.
        value = multihost_utils.broadcast_one_to_all(np.asarray(value))
        value = jax.make_array_from_callback(value.shape, target, value.__getitem__)
    variable._direct_assign(value)


def _reference_of(slot: Any, model: Any) -> Any:
    """The weight that an optimizer's slot belongs to: same shape, path in its name."""
    candidates = [
        weight
        for weight in model.trainable_variables
        if tuple(weight.shape) == tuple(slot.shape)
        and slot.name.startswith(weight.path.replace("/", "_"))
    ]
    return max(candidates, key=lambda weight: len(weight.path), default=None)
