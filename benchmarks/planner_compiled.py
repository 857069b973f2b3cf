"""What a compiler says that training steps need, for any plan; nothing is run.

Models are compiled from shapes, so the devices need not be there to hold them: one GPU
compiles for eight if JAX is told that it has seven neighbours.
"""

from collections.abc import Callable
from typing import Any

from meshwright.data.resident import Shapes
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.runtime import jax_devices_of_all
from meshwright.devices.step import variables_of
from meshwright.models.precision import set_precision
from meshwright.models.stages import Input
from meshwright.parallel.batch import BatchSplit
from meshwright.parallel.layout import lay_out_model, reference_of, unique_variables
from meshwright.parallel.mesh import make_mesh, replicated, sharding
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan
from meshwright.train.mesh_programs import TRAIN_STATES, MeshPrograms
from meshwright.train.mesh_step import training_state
from meshwright.train.pipeline_step import PipelineStep
from meshwright.train.stage_cut import StageCut
from meshwright.train.stage_memory import memory_of_stages
from meshwright.train.staged_steps import TRAIN

import jax
import keras
import numpy as np
from jax.sharding import Mesh

Record = dict[str, Any]


def batch_of(model: keras.Model, size: int) -> Any:
    """Inputs and targets of zeros, as the model wants them."""
    inputs = [
        np.zeros((size, *each.shape[1:]), keras.backend.standardize_dtype(each.dtype))
        for each in model.inputs
    ]
    *dims, last = model.outputs[0].shape[1:]
    loss = model._compile_loss._user_loss
    is_sparse = "sparse" in f"{loss} {type(loss).__name__}".lower()
    targets = (
        np.zeros((size, *dims), np.int32)
        if is_sparse
        else np.zeros((size, *dims, last), np.float32)
    )
    return (inputs if len(inputs) > 1 else inputs[0]), targets


def on_host() -> Any:
    """Where models are built: a mocked GPU computes nothing."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def mesh_of(plan: Plan) -> Mesh:
    """The first devices here, those of a mocked topology included."""
    return make_mesh(plan, tuple(jax_devices_of_all())[: plan.num_devices])


def lower_step(model: keras.Model, plan: Plan, size: int) -> Callable[[], Record]:
    """Traces a training step; what is returned compiles it and says what it needs."""
    install_keras_hooks()
    batch = batch_of(model, size)
    with on_host():
        training_state(model, batch)
    set_precision(model, plan.precision)
    mesh = mesh_of(plan)
    if plan.stages > 1:
        return lambda: _stages(model, plan, mesh, batch)
    _lay_out(model, plan, mesh)
    programs = MeshPrograms(model, jax.jit(model.train_step), plan, mesh)
    shardings = programs.shardings(TRAIN_STATES)
    cut = Microbatches(size, plan.accumulate)
    places = tuple(list(group) for group in shardings)
    state = jax.tree.map(_placed, programs.state_shapes(), places)
    lowered = programs.one_step(cut, shardings).lower(state, _parts(batch, cut, mesh))

    def compile_it() -> Record:
        compiled = lowered.compile()
        found = compiled.memory_analysis()
        new = found.output_size_in_bytes - found.alias_size_in_bytes
        total = found.argument_size_in_bytes + found.temp_size_in_bytes + new
        return {
            "arguments": int(found.argument_size_in_bytes),
            "temporaries": int(found.temp_size_in_bytes),
            "outputs": int(found.output_size_in_bytes),
            "aliases": int(found.alias_size_in_bytes),
            "total": int(total),
            "program": compiled.as_text(),
        }

    return compile_it


def _lay_out(model: keras.Model, plan: Plan, mesh: Mesh) -> None:
    """Says where variables belong, and leaves them where they are."""
    whole, layouts = replicated(mesh), lay_out_model(model, plan)
    for path, variable in unique_variables(model).items():
        variable._layout = sharding(mesh, layouts[path].spec)
    for variable in model.metrics_variables:
        variable._layout = whole
    for slot in model.optimizer.variables:
        reference = reference_of(slot, model)
        slot._layout = whole if reference is None else reference._layout


def _parts(batch: Any, cut: Microbatches, mesh: Mesh) -> Any:
    if cut.wanted == 1:
        return _placed_batch(batch, BatchSplit(cut.size, mesh).placement())
    larger, smaller = cut.cut(batch)
    rest = None if smaller is None else _stack(smaller, cut.smaller, mesh)
    return _stack(larger, cut.larger, mesh), rest


def _stack(part: Any, size: int, mesh: Mesh) -> Any:
    return _placed_batch(part, BatchSplit(size, mesh).placement(1))


def _placed_batch(batch: Any, place: Any) -> Any:
    return jax.tree.map(lambda leaf: _placed(leaf, place), batch)


def _placed(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _stages(model: keras.Model, plan: Plan, mesh: Mesh, batch: Any) -> Record:
    cut = StageCut(model.name, plan)
    step = PipelineStep(model, jax.jit(model.train_step), plan, mesh, cut)
    size = len(jax.tree.leaves(batch)[0])
    microbatches = step.put(batch).arrays
    pieces = step.pieces(Shapes.of(microbatches[0]))
    state = []
    groups = variables_of(model, [()] * TRAIN_STATES)
    for role, group in zip(TRAIN, groups, strict=True):
        places = [step._variables.place(Input(role, i), v) for i, v in enumerate(group)]
        state.append([_placed(v._value, p) for v, p in zip(group, places, strict=True)])
    schedule = plan.schedule_of(len(microbatches))
    found = memory_of_stages(pieces, step._variables, tuple(state), schedule)
    largest = max(found, key=lambda each: each.total)
    return {
        "total": largest.total,
        "samples": size,
        "layers": cut.layers,
        "stages": [
            {
                "variables": each.variables,
                "gradients": each.gradients,
                "kept": each.kept,
                "working": each.working,
                "total": each.total,
            }
            for each in found
        ],
    }
