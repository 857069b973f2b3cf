"""Steps of models whose layers were put on several devices by hand."""

from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.devices.step import GuardedStep
from meshwright.errors import PlacementError
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.plan import Plan
from meshwright.train.pipeline_step import PipelineStep
from meshwright.train.placed_cut import PlacedCut


def make_placed_step(model: Any, step: Any) -> PipelineStep | GuardedStep:
    """A step in pieces, each on the device of its layers.

    In a run of several processes models are evaluated layer by layer, and not trained.
    """
    if process_count() > 1 and step.__name__ != "train_step":
        return GuardedStep(model, step.__wrapped__)
    if process_count() > 1:
        raise PlacementError(
            f"fit was called on {model.name!r}, whose layers live on several devices, "
            f"in one of {process_count()} processes.",
            "Layers that were put on devices by hand are the business of one process.",
            "Build the model in the scope of meshwright.Pipeline, which spans them.",
        )
    cut = PlacedCut(model)
    plan = Plan(stages=len(cut.devices), microbatches=1, schedule="gpipe")
    return PipelineStep(model, step, plan, make_mesh(plan, tuple(cut.devices)), cut)
