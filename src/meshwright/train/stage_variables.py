"""Where the variables of a model lie on the stages of a pipeline."""

from functools import cached_property
from typing import Any

from meshwright.models.stages import Input
from meshwright.parallel.layout import (
    lay_out_model,
    reference_of,
    unique_variables,
)
from meshwright.parallel.mesh import sharding, stage_meshes
from meshwright.parallel.plan import Plan, Spec
from meshwright.train.cut import Cut

from jax.sharding import Mesh, NamedSharding


class StageVariables:
    """Where the variables of a model lie on the stages.

    Arguments:
        model: The model, built.
        plan: The plan.
        mesh: All devices.
        cut: Where the model is cut.
    """

    def __init__(self, model: Any, plan: Plan, mesh: Mesh, cut: Cut) -> None:
        self.mesh = mesh
        self.meshes = stage_meshes(mesh)
        self._model = model
        self._cut = cut
        cut.keep_for([*model.trainable_variables, *model.non_trainable_variables])
        layouts = lay_out_model(model, plan)
        found = unique_variables(model)
        self._specs = {id(v): layouts[path].spec for path, v in found.items()}

    def spec(self, variable: Any) -> Spec:
        """How a variable is split over the devices of its stage."""
        return self._specs.get(id(variable), (None,) * len(variable.shape))

    def stage(self, given: Input) -> int | None:
        """The stage of a variable; None for those that are on all of them."""
        if given.role == "shared":
            weight = self._weight_of_slot(given.index)
            if weight is not None:
                return self.stage(Input("weight", weight))
        if given.role == "metric" and self.mesh.is_multi_process:
            return None  # every process reads them at the end of an epoch
        return self._cut.stage(given)

    def place(self, given: Input, variable: Any) -> NamedSharding:
        """Where a variable lies."""
        stage, spec = self.stage(given), self.spec(variable)
        weight = self._weight_of_slot(given.index) if given.role == "shared" else None
        if weight is not None:
            spec = self.spec(self._model.trainable_variables[weight])
        return sharding(self.mesh if stage is None else self.meshes[stage], spec)

    def _weight_of_slot(self, number: int) -> int | None:
        return self._weights_of_slots[number]

    @cached_property
    def _weights_of_slots(self) -> list[int | None]:
        weights = self._model.trainable_variables
        positions = {id(weight): i for i, weight in enumerate(weights)}
        slots = self._model.optimizer.variables
        found = [reference_of(slot, self._model) for slot in slots]
        return [None if w is None else positions[id(w)] for w in found]
