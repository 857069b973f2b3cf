"""What there is to do in a training step, as the planner sees it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from meshwright.models.formulations import Platform
from meshwright.models.kernels import Kernels, kernels_of
from meshwright.models.stages import StagedProgram
from meshwright.models.training import (
    SAMPLES,
    TrainingStep,
    batch_shapes,
    trace_loss,
    trace_training,
)
from meshwright.models.work import guess_seconds, steps_in_stretch
from meshwright.parallel.layout import VariableLayout, lay_out_model
from meshwright.parallel.plan import Plan
from meshwright.planner.memory import MemoryModel
from meshwright.planner.splitting import TensorSplit, split_by_tensor

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Workload:
    """A model's training step.

    Arguments:
        name: The model's.
        kernels_for: The kernels of a step, for a precision and with or without remat.
        layouts_for: Where a plan puts each variable, by path.
        split_for: How the axis `tensor` of a degree splits the step.
        memory: What the step needs.
    """

    name: str
    kernels_for: Callable[[str | None, bool], Kernels]
    layouts_for: Callable[[Plan], Mapping[str, VariableLayout]]
    split_for: Callable[[str | None, bool, int], TensorSplit]
    memory: MemoryModel

    @classmethod
    def of(cls, model: Any, kind: str, data: Any = None) -> "Workload":
        """The training step of a model on devices of a kind.

        Arguments:
            model: A built and compiled model, with or without values.
            kind: `'CPU'`, `'GPU'` or `'TPU'`.
            data: A batch as `(x, y)`, or its shapes; inferred if left out.
        """
        platform: Platform = "cpu" if kind == "CPU" else "gpu"

        @cache
        def batch() -> Any:
            return batch_shapes(model, data, SAMPLES)

        @cache
        def trace(precision: str | None, remat: bool) -> TrainingStep:
            return trace_training(model, batch(), precision=precision, remat=remat)

        def trace_calls(
            precision: str | None, remat: bool, library: frozenset[str]
        ) -> TrainingStep:
            levers: Any = {"precision": precision, "remat": remat}
            return trace_training(model, batch(), **levers, library=library)

        def trace_pieces(precision: str | None) -> StagedProgram:
            return trace_loss(model, batch(), precision=precision)

        @cache
        def kernels_for(precision: str | None, remat: bool) -> Kernels:
            return kernels_of(trace(precision, remat), platform)

        @cache
        def layouts_for(plan: Plan) -> Mapping[str, VariableLayout]:
            return lay_out_model(model, plan)

        @cache
        def split_for(precision: str | None, remat: bool, degree: int) -> TensorSplit:
            layouts = layouts_for(Plan(tensor=degree))
            inputs = trace(precision, remat).inputs
            specs = {
                number: layouts[given.path].spec
                for number, given in enumerate(inputs)
                if given.path in layouts
            }
            return split_by_tensor(kernels_for(precision, remat), specs)

        memory = MemoryModel(model, trace, platform, trace_pieces, trace_calls)
        return cls(model.name, kernels_for, layouts_for, split_for, memory)

    @cached_property
    def weight_sizes(self) -> dict[str, int]:
        """Bytes of the weights that are trained, by path."""
        return {
            buffer.given.path: buffer.bytes.number
            for buffer in self.kernels_for(None, False).buffers
            if buffer.given is not None and buffer.given.kind == "weight"
        }

    @cached_property
    def has_state(self) -> bool:
        """Whether a step changes more than weights: statistics, seeds."""
        given = [buffer.given for buffer in self.kernels_for(None, False).buffers]
        return any(each is not None and each.kind == "state" for each in given)

    def num_together(self, batch_size: int, cores: int | None) -> int:
        """How many steps `fit` dispatches together, if there are as many.

        Arguments:
            batch_size: Samples of a step.
            cores: Those of a CPU, or None for an accelerator.
        """
        kernels = self.kernels_for(None, False)
        if cores and any(p.groups > 1 for k in kernels.kernels for p in k.products):
            return 1
        flops = _flops(kernels, batch_size)
        seconds = guess_seconds(flops, len(kernels.kernels), cores)
        return steps_in_stretch(seconds, on_cpu=cores is not None)

    @cached_property
    def num_weights(self) -> int:
        """How many weights are trained."""
        return len(self.weight_sizes)

    def weight_bytes(self, tensor: int) -> float:
        """Bytes of the weights that are trained, on a device of the axis `tensor`."""
        kernels = self.kernels_for(None, False)
        given = [
            (number, buffer)
            for number, buffer in enumerate(kernels.buffers)
            if buffer.given is not None and buffer.given.kind == "weight"
        ]
        if tensor == 1:
            return float(sum(buffer.bytes.number for _, buffer in given))
        divided = self.split_for(None, False, tensor).divided_buffers
        return sum(
            buffer.bytes.number / (tensor if divided[number] else 1)
            for number, buffer in given
        )

    def num_batch_sums(self, precision: str | None, remat: bool) -> int:
        """Reductions over all samples on the way forward, as of BatchNorm.

        There are as many on the way back; those of gradients of weights are made
        together, at the end.
        """
        kernels = self.kernels_for(precision, remat)
        buffers = kernels.buffers
        return sum(
            kernel.kind == "reduction"
            and kernel.phase == "forward"
            and any(buffers[b].bytes.power for b in kernel.reads)
            and not any(buffers[b].bytes.power for b in kernel.makes)
            and not _layer(kernel.layer).startswith("compile_loss")
            for kernel in kernels.kernels
        )

    def layers(self, precision: str | None, remat: bool) -> "Layers":
        """The same step, layer by layer."""
        return _layers(self.kernels_for, precision, remat)


def _flops(kernels: Kernels, samples: int) -> float:
    return sum(
        k.times * _flops(k.inner, samples)
        if k.inner is not None
        else sum(p.flops(samples) for p in k.products)
        for k in kernels.kernels
    )


@cache
def _layers(kernels_for: Any, precision: str | None, remat: bool) -> "Layers":
    return Layers(kernels_for(precision, remat))


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a model in their order, and the kernels of each."""

    kernels: Kernels

    @cached_property
    def names(self) -> list[str]:
        """The layers, in the order in which the forward pass comes to them."""
        forward = [k for k in self.kernels.kernels if k.phase == "forward"]
        forward.sort(key=lambda kernel: max(kernel.members, default=0))
        return list(dict.fromkeys(_layer(kernel.layer) for kernel in forward))

    @cached_property
    def numbers(self) -> Array:
        """The number of each kernel's layer; -1 for those that have none."""
        index = {name: i for i, name in enumerate(self.names)}
        return np.array(
            [index.get(_layer(kernel.layer), -1) for kernel in self.kernels.kernels],
            dtype=int,
        )

    def sums(self, seconds: Array, phase: str) -> Array:
        """Seconds of each layer in a phase."""
        chosen = [kernel.phase == phase for kernel in self.kernels.kernels]
        mine = np.array(chosen) & (self.numbers >= 0)
        found = np.zeros(len(self.names))
        np.add.at(found, self.numbers[mine], seconds[mine])
        return found

    @cached_property
    def crossing(self) -> Array:
        """Bytes for each sample that pass from the layers before each to it or later.

        One entry for each layer; 0 for the first.
        """
        made: dict[int, int] = {}
        last: dict[int, int] = {}
        for kernel, layer in zip(self.kernels.kernels, self.numbers, strict=True):
            if kernel.phase != "forward" or layer < 0:
                continue
            for buffer in kernel.makes:
                made.setdefault(buffer, layer)
            for buffer in kernel.reads:
                last[buffer] = max(last.get(buffer, 0), layer)
        changes = np.zeros(len(self.names) + 1)
        for buffer, layer in made.items():
            size = self.kernels.buffers[buffer].bytes
            if buffer in last and last[buffer] > layer and size.power:
                changes[layer + 1] += size.number
                changes[last[buffer] + 1] -= size.number
        return changes.cumsum()[:-1]


_WRAPPER = re.compile(r"\w+\((.*)\)")
_NAME = re.compile(r"[\w.-]+")
_PASSES = ("rematted_computation", "checkpoint", "while", "body", "cond")


def _layer(scope: str) -> str:
    """A layer, whatever pass it is in.

    >>> _layer("transpose(jvp(block))/rematted_computation/dense/ab,bc->ac")
    'block/dense'
    """
    found: list[str] = []
    for part in scope.split("/"):
        while match := _WRAPPER.fullmatch(part):
            part = match[1]
        is_new = part not in _PASSES and part not in found[-1:]
        if _NAME.fullmatch(part) and is_new:
            found.append(part)
    return "/".join(found)
