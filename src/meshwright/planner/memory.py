"""What a training step needs in memory under a plan, by arithmetic alone.

The step is traced once from shapes. For a plan it is split as XLA's partitioner splits
it (`planner.partitioning`), fused and ordered as its compiler does (`models.fusing`,
`models.ordering`), and the tensors that are alive at the same time are added up
(`planner.liveness`). Nothing is compiled.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import Any

from meshwright.errors import PlanError
from meshwright.models.blocks import keeps_blocks_apart
from meshwright.models.formulations import Platform
from meshwright.models.kernels import flattened, renewed_values
from meshwright.models.profile import shape_of
from meshwright.models.stages import Input, StagedProgram
from meshwright.models.training import (
    ROLES,
    TrainingStep,
    trace_loss,
    trace_training,
)
from meshwright.parallel.layout import lay_out_model, reference_of, unique_variables
from meshwright.parallel.microbatch import Microbatches
from meshwright.parallel.plan import Plan, Spec
from meshwright.planner.accumulating import accumulated
from meshwright.planner.liveness import LivesBySize
from meshwright.planner.partitioning import InputSplit, Partitioned, partition
from meshwright.planner.pipelining import (
    CutStep,
    Shares,
    TracedPieces,
    cut_evenly,
    starts_of,
)

Trace = Callable[[str | None, bool], TrainingStep]
"""Traces a model's training step: in a precision, with remat or without."""


TraceCalls = Callable[[str | None, bool, frozenset[str]], TrainingStep]
"""The same, with layers that a library computes."""


TracePieces = Callable[[str | None], StagedProgram]
"""Traces the forward pass of a training step, to be cut into stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on each device, at the moment at which it needs the most.

    Updates are computed in the place of what they update, so they need nothing.
    """

    parameters: int
    """Trained weights, or a device's part of them."""
    optimizer: int
    """The optimizer's variables."""
    gradients: int
    """Gradients of weights that are alive at that moment, or their sums. They are
    forgotten as soon as their weight is updated, so it may be few of them."""
    activations: int
    """What the forward pass has made, and the backward pass still wants."""
    temporaries: int
    """All else that is alive then: gradients of activations, gathered weights, copies
    of weights that are still read when their update is written."""
    batch: int
    """The data."""
    other: int
    """States that are not trained, metrics, and what is returned besides."""

    @property
    def total(self) -> int:
        """All together: arguments, temporaries and outputs of the compiled step."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """The bytes by kind."""
        return asdict(self)


class MemoryModel:
    """Estimates what plans need, for one model on one kind of device.

    Arguments:
        model: A built and compiled model, with or without values.
        trace: Traces its training step; each is asked for once.
        platform: What it is compiled for.
        trace_pieces: Traces what is cut into stages; `trace_loss` if left out.
        trace_calls: Traces its training step with layers that a library computes, as on
            GPUs; `trace_training` if left out.
    """

    def __init__(
        self,
        model: Any,
        trace: Trace,
        platform: Platform = "gpu",
        trace_pieces: TracePieces | None = None,
        trace_calls: TraceCalls | None = None,
    ) -> None:
        self._model = model
        self._platform: Platform = platform
        self._step = lru_cache(maxsize=None)(trace)
        pieces = trace_pieces or (
            lambda precision: trace_loss(model, precision=precision)
        )
        calls = trace_calls or (
            lambda precision, remat, library: trace_training(
                model, precision=precision, remat=remat, library=library
            )
        )
        self._step_with_calls = lru_cache(maxsize=None)(calls)
        self._staged = lru_cache(maxsize=None)(pieces)
        self._held = lru_cache(maxsize=None)(self._find_held)
        self._pieces = lru_cache(maxsize=None)(self._trace_pieces)
        self._cut = lru_cache(maxsize=None)(self._make_cut)
        self._known_splits: dict[tuple[InputSplit, ...], _Splits] = {}
        self._splits = lru_cache(maxsize=None)(self._find_splits)
        self._program = lru_cache(maxsize=None)(self._make_program)

    def estimate(self, plan: Plan, batch_size: int) -> MemoryEstimate:
        """What a training step on a batch needs on each device.

        Raises:
            PlanError: The step cannot be cut into so many pieces.
        """
        if plan.stages > 1:
            return max(self._stages(plan, batch_size), key=lambda each: each.total)
        cut = Microbatches(batch_size, plan.accumulate)
        pieces = gcd(cut.larger, plan.num_replicas)
        program = self._program(
            self._precision(plan),
            plan.remat and keeps_blocks_apart(self._platform),
            self._splits(plan.fsdp, plan.tensor, plan.rules),
            pieces > 1,
            cut.number > 1,
            self._may_call(plan),
        )
        rest = gcd(cut.smaller, plan.num_replicas)
        held = cut.num_larger * cut.larger // pieces
        held += cut.num_smaller * cut.smaller // rest
        found = program.estimate(cut.larger // pieces, held, plan.fsdp, plan.tensor)
        if not plan.offload or self._platform == "cpu":  # whose memory is the host's
            return found
        # The state of one weight at a time comes from the host, is renewed, and goes.
        return replace(found, optimizer=self._most_state_of_a_weight(plan))

    def _most_state_of_a_weight(self, plan: Plan) -> int:
        splits = self._splits(plan.fsdp, plan.tensor, plan.rules).inputs
        weights = self._weights_of_slots
        sizes: Counter[int | None] = Counter()
        slots = (
            (each.variable, split)
            for each, split in zip(self._step(None, False).inputs, splits, strict=True)
            if each.kind == "slot"
        )
        for number, (variable, split) in enumerate(slots):
            size = prod(variable.shape) * _itemsize(variable)
            sizes[weights.get(number)] += size // _ways(split, plan.fsdp, plan.tensor)
        return max(sizes.values(), default=0)

    def _stages(self, plan: Plan, batch_size: int) -> list[MemoryEstimate]:
        """What each stage of a pipeline needs."""
        size = Microbatches(batch_size, plan.microbatches or 1).larger
        pieces = gcd(size, plan.num_replicas)
        splits = self._splits(plan.fsdp, plan.tensor, plan.rules)
        traced = self._pieces(
            self._precision(plan), plan.remat, plan.num_pieces, plan.cuts
        )
        cut = self._cut(traced, splits, pieces > 1)
        schedule = plan.schedule_of(min(plan.microbatches or 1, batch_size))
        has_several = plan.num_devices > plan.stages
        shares = Shares(size // pieces, size, plan.fsdp, plan.tensor, has_several)
        return [
            self._stage(plan, cut, stage, schedule.most_alive(stage), shares)
            for stage in range(plan.stages)
        ]

    def _stage(
        self,
        plan: Plan,
        cut: CutStep,
        stage: int,
        most: int,
        shares: Shares,
    ) -> MemoryEstimate:
        mine = range(stage, cut.num_pieces, plan.stages)
        needs = [cut.needs(piece, shares) for piece in mine]
        largest = max(each.kept for each in needs)
        splits = self._splits(plan.fsdp, plan.tensor, plan.rules)
        held = self._held(cut, splits, stage, plan.stages, plan.fsdp, plan.tensor)
        return MemoryEstimate(
            parameters=held["weight"],
            optimizer=held["shared"],
            gradients=int(sum(each.gradients for each in needs)),
            activations=int(max(largest * most, sum(each.kept for each in needs))),
            temporaries=int(max(each.working for each in needs)),
            batch=0,
            other=held["state"] + held["metric"],
        )

    def _find_held(
        self,
        cut: CutStep,
        splits: "_Splits",
        stage: int,
        num_stages: int,
        fsdp: int,
        tensor: int,
    ) -> dict[str, int]:
        """Bytes of the variables of a stage, and of those of others that it reads."""
        step = self._step(None, False)
        counts: Counter[str] = Counter()
        found: Counter[str] = Counter()
        slots = self._weights_of_slots
        mine = range(stage, cut.num_pieces, num_stages)
        read = {each for piece in mine for each in cut.reads(piece)}
        for number, each in enumerate(step.inputs):
            if each.kind == "data":
                continue
            role = ROLES[each.kind]
            given = Input(role, counts[role])
            counts[role] += 1
            weight = slots.get(given.index) if role == "shared" else None
            home = cut.homes.get(
                Input("weight", weight) if weight is not None else given
            )
            is_here = home is None or home % num_stages == stage or given in read
            if is_here:
                split = splits.inputs[number]
                value = prod(each.variable.shape) * _itemsize(each.variable)
                ways = _ways(split, fsdp, tensor)
                found[role] += value // ways
        return {role: found[role] for role in ("weight", "state", "shared", "metric")}

    def _may_call(self, plan: Plan) -> frozenset[str]:
        """Layers that count as calls of a library, if there are such.

        Attention is one under `tensor` and `remat` too, but programs for that could not
        be looked at.
        """
        if self._platform == "cpu":
            return frozenset()
        found = {"lstm"} if plan.num_devices == 1 else set[str]()
        if plan.tensor == 1 and not plan.remat:
            found.add("attention")
        return frozenset(found)

    @cached_property
    def _paths(self) -> list[str | None]:
        """The variable that decides how each input is split."""
        paths = {id(v): path for path, v in unique_variables(self._model).items()}
        found = []
        for each in self._step(None, False).inputs:
            variable = each.variable
            if each.kind == "slot":
                variable = reference_of(variable, self._model)
            found.append(paths.get(id(variable)))
        return found

    @cached_property
    def _weights_of_slots(self) -> dict[int, int]:
        """The numbers of the weights that the optimizer's variables belong to."""
        step = self._step(None, False)
        weights = {id(v): i for i, v in enumerate(self._model.trainable_variables)}
        slots = [each.variable for each in step.inputs if each.kind == "slot"]
        found = [reference_of(slot, self._model) for slot in slots]
        return {i: weights[id(w)] for i, w in enumerate(found) if w is not None}

    def _make_cut(
        self, pieces: TracedPieces, splits: "_Splits", sums_over_samples: bool
    ) -> CutStep:
        return CutStep(pieces, splits.inputs, sums_over_samples=sums_over_samples)

    def _trace_pieces(
        self,
        precision: str | None,
        remat: bool,
        num_pieces: int,
        names: tuple[str, ...],
    ) -> TracedPieces:
        staged = self._staged(precision)
        starts = starts_of(staged, names) if names else cut_evenly(staged, num_pieces)
        if starts is None and names:
            raise PlanError(
                f"Stages of {self._model.name!r} were to begin at "
                f"{', '.join(map(repr, names))}.",
                "Each begins at a layer that computes something in the training step.",
                "Use the names of layers, as model.summary() shows them.",
            )
        if starts is None:
            most = sum(staged.is_cuttable) + 1
            raise PlanError(
                f"{self._model.name!r} was to be cut into {num_pieces} pieces.",
                f"Its training step has {most} that can stand alone.",
                f"Use at most {most} stages x chunks.",
            )
        return TracedPieces(staged, starts, self._platform, remat=remat)

    def _precision(self, plan: Plan) -> str | None:
        """What steps compute in: for CPUs, numbers of 16 bits are made wider first."""
        if self._platform == "cpu" and plan.precision == "bfloat16":
            return "float32"
        return plan.precision

    def _find_splits(
        self,
        fsdp: int,
        tensor: int,
        rules: tuple[tuple[str, Spec], ...],
    ) -> "_Splits":
        step = self._step(None, False)
        layouts = lay_out_model(
            self._model, Plan(fsdp=fsdp, tensor=tensor, rules=rules)
        )
        found = []
        for each, path in zip(step.inputs, self._paths, strict=True):
            spec = layouts[path].spec if path is not None else ()
            found.append(_input_split(spec, each.kind in ("weight", "state")))
        # Degrees that split the same dims share all programs.
        return self._known_splits.setdefault(tuple(found), _Splits(tuple(found)))

    def _make_program(
        self,
        precision: str | None,
        remat: bool,
        splits: "_Splits",
        sums_over_samples: bool,
        is_accumulated: bool,
        may_call: frozenset[str],
    ) -> "_Program":
        step = self._step(precision, remat)
        calls = step.wanted & may_call
        if calls:
            step = self._step_with_calls(precision, remat, calls)
        flat = flattened(step, self._platform)
        renewed = renewed_values(step, flat)
        platform = self._platform
        parts = partition(
            flat, splits.inputs, renewed, platform, sums_over_samples=sums_over_samples
        )
        return _Program(step, parts, renewed, splits.inputs, platform, is_accumulated)


def _itemsize(variable: Any) -> int:
    return int(shape_of(variable).dtype.itemsize)


def _ways(split: InputSplit, fsdp: int, tensor: int) -> int:
    degrees = ((fsdp, split.fsdp), (tensor, split.tensor))
    return prod(degree for degree, dim in degrees if dim is not None)


@dataclass(frozen=True, eq=False)
class _Splits:
    """How the inputs of a step are split; there is one for each way."""

    inputs: tuple[InputSplit, ...]


def _input_split(spec: Spec, is_gathered: bool) -> InputSplit:
    axes = list(spec)
    fsdp = axes.index("fsdp") if "fsdp" in axes else None
    tensor = axes.index("tensor") if "tensor" in axes else None
    return InputSplit(fsdp, tensor, is_gathered)


class _Program:
    """The program of one device, for batches of any size and splits of any degree."""

    def __init__(
        self,
        step: TrainingStep,
        parts: Partitioned,
        renewed: dict[int, int],
        splits: Sequence[InputSplit],
        platform: Platform,
        is_accumulated: bool,
    ) -> None:
        self._step = step
        self._splits = splits
        self._parts = accumulated(parts) if is_accumulated else parts
        self._lives = LivesBySize(self._parts, renewed, platform)
        self.estimate = lru_cache(maxsize=None)(self._estimate)

    def _estimate(
        self, samples: int, held: int, fsdp: int, tensor: int
    ) -> MemoryEstimate:
        alive = self._lives.at(samples).most(samples, fsdp, tensor)
        given = dict.fromkeys(("weight", "state", "slot", "metric", "data"), 0)
        flat = self._parts.flat
        for value, each, split in zip(
            flat.inputs, self._step.inputs, self._splits, strict=True
        ):
            ways = _ways(split, fsdp, tensor)
            size = flat.values[value].bytes.at(held if each.kind == "data" else samples)
            given[each.kind] += int(size) // ways
        return MemoryEstimate(
            parameters=given["weight"],
            optimizer=given["slot"],
            gradients=int(alive.gradients),
            activations=int(alive.activations),
            temporaries=int(alive.rest),
            batch=given["data"],
            other=given["state"] + given["metric"] + int(alive.returned),
        )
