"""What a training step needs on each device, by the compiler's own account.

The program that `fit` would run is compiled from shapes; no array is made, and nothing
runs. It is the slower and exact one of the planner's two ways to know the memory.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from meshwright.devices.kernel_trials import largest_trial, with_workspaces
from meshwright.devices.memory import (
    StepMemory,
    Tensor,
    is_out_of_memory,
    own_names,
)
from meshwright.devices.step import labels_of, variables_of
from meshwright.models.training import ready_to_train
from meshwright.models.work import MOST_STEPS
from meshwright.parallel.layout import lay_out_model
from meshwright.parallel.plan import Plan
from meshwright.train.mesh_programs import TRAIN_STATES
from meshwright.train.mesh_step import MeshStep
from meshwright.train.pace import STACK_BYTES
from meshwright.train.pipeline_step import PipelineStep
from meshwright.train.placements import place_variables
from meshwright.train.stage_cut import StageCut

import jax
from jax.sharding import Mesh

AHEAD = 3
"""Batches beside that of a step: two are made ready, and one may be used still."""

SPARE = 0.01
SPARE_BYTES = 2**27
"""What stays free: this share of a device's memory, and at least so many bytes.

The allocator of a GPU does not divide a piece if less than 128 MiB of it would be left.
"""

_NEW = ("temporaries", "outputs not in place")
_UNTRIED = {"xla_gpu_autotune_level": 0}
"""Kernels are not tried out, so that nothing runs on the device."""

_OPTIONS = {
    # Machine code is made faster; which arrays there are does not depend on it.
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": _UNTRIED,
}
_BY_LIBRARY = (
    _UNTRIED
    | {"xla_gpu_experimental_autotune_backends": "CUBLASLT_FISSION,CUBLASLT,CUDNN"},
    _UNTRIED | {"xla_gpu_enable_triton_gemm": False},
)
"""Without trials XLA computes a product together with what surrounds it, in a kernel of
its own. With trials the library's may win, which wants its inputs as arrays. These are
two ways to ask for that; the first is nearer to what trials lead to, but it is an
experiment of XLA's that may go as it came, and does not know all types.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMemory:
    """The memory of one training step, in bytes."""

    by_stage: tuple[Mapping[str, int], ...]
    """What each device of a stage needs, by kind; without stages there is one.

    Without stages gradients and activations are among the `temporaries`, because the
    compiler lets them share room.
    """
    largest: tuple[Tensor, ...] = ()
    """The largest tensors, by layer; none of a step in stages."""
    trials: int = 0
    """What compiling needs beside what the step takes, to try out kernels on a GPU."""

    @property
    def stage(self) -> int:
        """The stage that needs most; 0 without stages."""
        totals = [sum(kinds.values()) for kinds in self.by_stage]
        return totals.index(max(totals))

    @property
    def by_kind(self) -> Mapping[str, int]:
        """What a device of that stage needs; it adds up to `bytes_per_device`."""
        return self.by_stage[self.stage]

    @property
    def bytes_per_device(self) -> int:
        """What a device needs at the most."""
        return sum(self.by_kind.values())

    @property
    def bytes_to_run(self) -> int:
        """What the allocator of a device must be able to give, so that `fit` runs.

        What is free need not be in one piece.
        """
        needed = self.bytes_in_use
        return max(int(needed / (1 - SPARE)), needed + SPARE_BYTES)

    @property
    def bytes_in_use(self) -> int:
        """What `fit` has on a device at the most.

        Beside the step's own batch others are on their way. While the step is compiled
        it has no temporaries yet, but kernels are tried out.
        """
        new = sum(self.by_kind.get(kind, 0) for kind in _NEW)
        compiling = self.bytes_per_device - new + self.trials
        ahead = _bytes_ahead(self.by_kind.get("batch", 0))
        return max(self.bytes_per_device, compiling) + ahead


def exact_memory(
    model: Any,
    plan: Plan,
    mesh: Mesh,
    batch_size: int | None = None,
    data: Any = None,
    *,
    tries_kernels: bool = False,
) -> ExactMemory:
    """Compiles the training step of a model for a mesh, and reads what it needs.

    The model stays as it is, whatever strategy it has.

    Arguments:
        model: A built and compiled model, with or without values.
        plan: How it is split.
        mesh: The mesh of the plan.
        batch_size: Samples in a global batch; as `data` has them if left out.
        data: A batch as `(x, y)` or `(x, y, sample_weight)`, or its shapes; inferred
            from the model and its loss if left out.
        tries_kernels: Whether a compiler for GPUs may run kernels on the devices to
            choose the fastest, as `fit` lets it; they may need room of their own.

    Raises:
        ProfileError: The model is not built or not compiled, or its data is not known.
        StrategyError: The plan does not suit the model.
        MemoryLimitError: A single operation is too large for a stage of the plan.

    >>> import keras
    >>> import meshwright as mw
    >>> layers = [keras.Input((256,)), keras.layers.Dense(256, use_bias=False)]
    >>> model = keras.Sequential(layers)
    >>> model.compile(optimizer="adam", loss="mse")
    >>> strategy = mw.FSDP(devices=["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    >>> found = exact_memory(model, strategy.plan, strategy.mesh, batch_size=64)
    >>> found.by_kind["parameters"] == 256 * 256 * 4 // 4
    True
    """
    platform = mesh.devices.flat[0].platform
    options = None if tries_kernels else _OPTIONS.get(platform)
    with ready_to_train(model, data, batch_size, plan.precision) as batch:
        step = jax.jit(model.train_step)
        if plan.stages > 1:
            cut = StageCut(model.name, plan)
            stages = PipelineStep(model, step, plan, mesh, cut)
            found = stages.memory_of_shapes(batch, options)
            return ExactMemory(by_stage=tuple(each.by_kind() for each in found))
        layouts = lay_out_model(model, plan)
        placed = place_variables(model, layouts, mesh, offloads=plan.offload)
        places = {id(v): at for v, at in placed}
        lowered = MeshStep(model, step, plan, mesh, places).lower_shapes(batch)
        labels = labels_of(variables_of(model, [()] * TRAIN_STATES), "state")
        with own_names():
            if platform == "gpu" and not tries_kernels:
                return _whatever_kernels_win(lowered, labels)
            compiled = lowered.compile(compiler_options=options)
    memory = StepMemory.of(compiled, labels)
    trials = largest_trial(compiled.as_text()) if platform == "gpu" else 0
    return _exact(memory, trials)


def _exact(memory: StepMemory, trials: int) -> ExactMemory:
    return ExactMemory(
        by_stage=(memory.by_kind(),), largest=memory.largest, trials=trials
    )


def _whatever_kernels_win(lowered: Any, labels: Mapping[str, Any]) -> ExactMemory:
    """The most that a step may need on a GPU, by programs without trials of kernels."""
    with ThreadPoolExecutor(2) as pool:
        by_library = pool.submit(_compiled_by_library, lowered)
        by_compiler = lowered.compile(compiler_options=_UNTRIED)
    programs = [by_compiler, *by_library.result()]
    found = []
    for program in programs:
        memory = StepMemory.of(program, labels)
        temporaries = with_workspaces(program.as_text(), memory.temporaries)
        found.append(replace(memory, temporaries=temporaries))
    trials = max(largest_trial(program.as_text()) for program in programs)
    return _exact(max(found, key=lambda memory: memory.needed), trials)


def _compiled_by_library(lowered: Any) -> list[Any]:
    """The program with kernels of libraries, if this XLA can be asked for it."""
    for options in _BY_LIBRARY:
        try:
            return [lowered.compile(compiler_options=options)]
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                raise
    return []


def _bytes_ahead(batch: int) -> int:
    """Bytes of the batches that are on a device beside that of the step.

    Small ones come in stacks, and the step takes its own out of one.
    """
    together = min(STACK_BYTES // max(batch, 1), MOST_STEPS)
    return AHEAD * batch if together < 2 else (AHEAD + 1) * together * batch
