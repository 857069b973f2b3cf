"""How long a step of a plan takes: kernels, collectives, the bubble of a pipeline."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from meshwright.models.blocks import keeps_blocks_apart
from meshwright.parallel.balance import choose_stage_cuts
from meshwright.parallel.plan import Plan
from meshwright.parallel.schedules import Schedule, make_schedule
from meshwright.planner.costs import KernelCosts
from meshwright.planner.links import Group, Links
from meshwright.planner.machines import Machine
from meshwright.planner.speed import Speed
from meshwright.planner.splitting import TensorSplit
from meshwright.planner.workload import Layers, Workload

import numpy as np

Array = np.ndarray

HOST_LINK = 5e10
"""Bytes a second between a GPU and the memory of its host, in one direction, through 16
lanes of PCIe 5; they could carry 63 GB/s."""

GATHERS_OF_STATISTICS = 7 / 2
"""For each sum of BatchNorm's, where `fsdp` divides it; counted in XLA's programs."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step, by part."""

    parts: Mapping[str, float]
    bubble: float | None = None
    """The share of the stages' time in which they wait."""

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(self.parts.values())


class _Work(NamedTuple):
    """Seconds of the kernels of a step on one device."""

    forward: float
    backward: float
    update: float
    by_layer: Array
    """Forward and backward of each layer."""


@dataclass
class Predictor:
    """Predicts the steps of plans; what plans have in common is computed once.

    Arguments:
        work: The training step.
        machine: The devices.
        speed: How fast they are.
    """

    work: Workload
    machine: Machine
    speed: Speed
    _links: Links = field(init=False)

    def __post_init__(self) -> None:
        self._links = Links(self.machine, self.speed)
        self._costs = cache(self._costs_of)
        self._seconds = cache(self._seconds_of)
        self._cut = cache(self._cut_of)
        self._weight_bytes = cache(self.work.weight_bytes)
        self._num_batch_sums = cache(self.work.num_batch_sums)

    def predict(self, plan: Plan, batch_size: int) -> Prediction:
        """The seconds of a step of a plan."""
        if plan.stages > 1:
            return self._pipeline(plan, batch_size)
        samples = _samples(plan, batch_size, plan.accumulate)
        crowd = self._crowd(plan)
        key = (plan.precision, plan.remat, plan.tensor, samples, crowd)
        work = self._seconds(*key, plan.fsdp)
        adding = self._adding(plan, plan.accumulate)
        prediction = Prediction(
            parts={
                "compute": crowd
                * (plan.accumulate * (work.forward + work.backward) + adding),
                "communication": self._gradients(plan) + self._inside(plan, samples),
                "update": crowd * work.update / plan.fsdp
                + self._offloading(plan, batch_size),
                "overhead": 0.0,
            }
        )
        return self._with_overhead(prediction, plan, batch_size)

    def _adding(self, plan: Plan, parts: int) -> float:
        """Seconds to add up the gradients of a batch that comes in parts."""
        held = self._weight_bytes(plan.tensor) / plan.stages
        moved = self.speed.stream_seconds(np.array([3.0 * held]))
        return (parts - 1) * float(moved[0])

    def _offloading(self, plan: Plan, batch_size: int) -> float:
        """Seconds for the optimizer's state to come from the host and go back."""
        if not plan.offload:
            return 0.0
        beside = replace(plan, offload=False)
        held = self.work.memory.estimate(beside, batch_size).optimizer
        if self.machine.kind == "CPU":
            copied = self.speed.stream_seconds(np.array([4.0 * held]))
            return self._crowd(plan) * float(copied[0])
        return 2 * held / HOST_LINK

    def _crowd(self, plan: Plan) -> int:
        """How often the same cores do the work of a device."""
        return plan.num_devices if self.machine.shares_cores else 1

    def _with_overhead(
        self, prediction: Prediction, plan: Plan, batch_size: int
    ) -> Prediction:
        """Adds what the host takes, and memory that is used for the first time.

        Both are spent once for all steps that are dispatched together.
        """
        once = self.speed.dispatch
        if self.speed.fresh:
            needs = self.work.memory.estimate(plan, batch_size)
            made = needs.activations + needs.temporaries + needs.gradients
            once += self.speed.fresh * made * self._crowd(plan)
        cores = os.cpu_count() if self.machine.kind == "CPU" else None
        together = self.work.num_together(batch_size, cores)
        parts = {**prediction.parts, "overhead": once / together}
        return replace(prediction, parts=parts)

    def _costs_of(self, precision: str | None, remat: bool) -> KernelCosts:
        return KernelCosts(self.work.kernels_for(precision, remat), self.speed)

    def _split(self, precision: str | None, remat: bool, degree: int) -> TensorSplit:
        return self.work.split_for(precision, remat, degree)

    def _seconds_of(
        self,
        precision: str | None,
        remat: bool,
        tensor: int,
        samples: float,
        crowd: int,
        shards: int,
    ) -> _Work:
        costs = self._costs(precision, remat)
        if tensor > 1:
            split = self._split(precision, remat, tensor)
            divided = split.divided_kernels
            each = costs.seconds(samples, divided, tensor, crowd, shards)
        else:
            each = costs.seconds(samples, crowd=crowd, shards=shards)
        if crowd > 1:
            each = each * costs.crowd_ratios(each, crowd)
        layers = self._layers(precision, remat)
        forward, backward = layers.sums(each, "forward"), layers.sums(each, "backward")
        # Where the kernels do not tell of it, it is computed again nevertheless.
        is_told = self.machine.kind != "CPU" or keeps_blocks_apart("cpu")
        again = 1.0 if remat and not is_told else 0.0
        seconds = {
            phase: float(each[costs.kernels.phases == phase].sum())
            for phase in ("forward", "backward", "update")
        }
        return _Work(
            seconds["forward"],
            seconds["backward"] + again * seconds["forward"],
            seconds["update"],
            (1.0 + again) * forward + backward,
        )

    def _layers(self, precision: str | None, remat: bool) -> Layers:
        return self.work.layers(precision, remat)

    def _gradients(self, plan: Plan) -> float:
        """Gradients are summed over replicas; shards of weights are gathered before.

        Nothing of it is hidden: in programs that XLA compiled for eight GPUs, the sums
        of gradients begin when the last of them is there.
        """
        held = self._weight_bytes(plan.tensor) / plan.stages
        inner = plan.tensor
        shard = held / plan.fsdp
        fsdp = Group(plan.fsdp, inner)
        data = Group(plan.data, inner * plan.fsdp)
        return (
            self._gathers(plan, held, fsdp)
            + self._links.reduce_scatter(held, fsdp)
            + self._links.all_reduce(shard, data)
            + self._links.waiting(Group(plan.num_replicas, inner))
        )

    def _gathers(self, plan: Plan, held: float, group: Group) -> float:
        """Seconds to make weights whole; with remat the backward pass does it again.

        On CPUs they come one by one, and with them what is made of statistics.
        """
        times = 2 if plan.remat else 1
        found = times * self._links.all_gather(held, group)
        if self.machine.kind == "CPU" and group.size > 1:
            sums = self._num_batch_sums(plan.precision, plan.remat)
            number = times * self.work.num_weights / plan.stages
            number += GATHERS_OF_STATISTICS * sums
            found += number * self._links.waiting(group)
        return found

    def _inside(self, plan: Plan, samples: float) -> float:
        """Sums inside of the model: of split products, and over the whole batch."""
        total = 0.0
        if plan.tensor > 1:
            split = self._split(plan.precision, plan.remat, plan.tensor)
            buffers = self.work.kernels_for(plan.precision, plan.remat).buffers
            group = Group(plan.tensor, 1)
            for number in split.all_reduced:
                num_bytes = buffers[number].bytes.at(samples)
                total += self._links.all_reduce(num_bytes, group)
                total += self._links.waiting(group)
        replicas = plan.data * plan.fsdp
        if replicas > 1:
            group = Group(replicas, plan.tensor)
            number = self._num_batch_sums(plan.precision, plan.remat)
            each = self._links.all_reduce(1024, group) + self._links.waiting(group)
            total += 2 * number * each
        return plan.accumulate * total

    def _pipeline(self, plan: Plan, batch_size: int) -> Prediction:
        assert plan.microbatches is not None
        samples = _samples(plan, batch_size, plan.microbatches)
        key = (plan.precision, plan.remat, plan.tensor, samples, self._crowd(plan))
        work = self._seconds(*key, 1)
        cut = self._cut(*key, plan.num_pieces)
        share = work.forward / max(work.forward + work.backward, 1e-12)
        schedule = schedule_of(plan)
        inner = plan.tensor * plan.fsdp * plan.data
        send = self._links.send(cut.travels, Group(plan.stages, inner))
        busy = float(cut.pieces.sum()) * plan.microbatches
        update = work.update / plan.fsdp / plan.stages
        adding = self._adding(plan, plan.microbatches)
        if self.machine.shares_cores:
            actions = len(schedule.actions)
            parts = {
                "compute": (busy + adding * plan.stages) * inner,
                "communication": self._gradients(plan) + actions * send / 2,
                "bubble": 0.0,
                "update": update * plan.num_devices,
                "overhead": self.speed.dispatch * (actions + plan.stages)
                + self._fresh_in_stages(plan, batch_size),
            }
            return Prediction(parts=parts, bubble=schedule.bubble)
        length = _length(schedule, cut.pieces, share, send)
        ideal = busy / plan.stages
        parts = {
            "compute": ideal + adding,
            "communication": self._gradients(plan)
            + plan.microbatches * self._inside(plan, samples) / plan.stages,
            "bubble": length - ideal,
            "update": update,
            "overhead": self.speed.dispatch * len(schedule.actions) / plan.stages,
        }
        return Prediction(parts=parts, bubble=schedule.bubble)

    def _fresh_in_stages(self, plan: Plan, batch_size: int) -> float:
        """Seconds for memory that programs of a step use for the first time.

        Each of them makes what it returns anew, gradients of weights among it.
        """
        assert plan.microbatches is not None
        whole = Plan(precision=plan.precision, remat=plan.remat)
        needs = self.work.memory.estimate(whole, batch_size)
        kept = needs.activations + needs.temporaries
        gradients = self._weight_bytes(1) * plan.num_replicas
        made = kept + plan.microbatches * gradients
        return self.speed.fresh * made

    def _cut_of(
        self,
        precision: str | None,
        remat: bool,
        tensor: int,
        samples: float,
        crowd: int,
        num_pieces: int,
    ) -> "_Cut":
        work = self._seconds(precision, remat, tensor, samples, crowd, 1)
        crossing = self._layers(precision, remat).crossing
        scale = 1e12
        costs = [round(scale * each) for each in work.by_layer]
        travels = [round(each) for each in crossing]
        places = [True] * len(costs)
        cuts = choose_stage_cuts(costs, travels, places, num_pieces)
        if cuts is None:
            # More pieces than layers: the engine cuts inside of them.
            each = work.by_layer.sum() / num_pieces
            return _Cut(np.full(num_pieces, each), float(crossing.max()) * samples)
        ends = pairwise([0, *cuts, len(costs)])
        pieces = np.array([work.by_layer[a:b].sum() for a, b in ends])
        return _Cut(pieces, float(crossing[cuts].max()) * samples)


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan."""
    name, number = plan.schedule or "", plan.microbatches or 1
    return make_schedule(name, plan.stages, number, plan.chunks)


class _Cut(NamedTuple):
    pieces: Array
    """Seconds of each piece for a microbatch, forward and backward."""
    travels: float
    """Bytes that pass the widest cut."""


def _samples(plan: Plan, batch_size: int, parts: int) -> float:
    """Samples that a device computes at once."""
    size = -(-batch_size // parts)
    return size / gcd(size, plan.num_replicas)


def _length(schedule: Schedule, pieces: Array, share: float, send: float) -> float:
    """Seconds from the first action of a schedule to the end of the last.

    A stage begins an action when it is done with the one before, and has what others
    send it for it.
    """
    split = (1 - share) / 2
    shares = {"forward": share, "backward": 1 - share}
    shares |= {"input_gradients": split, "weight_gradients": split}
    seconds = pieces.tolist()
    free = [0.0] * schedule.num_stages
    done: dict[tuple[bool, int, int], float] = {}
    for action in schedule.actions:
        piece = action.piece(schedule.num_stages)
        is_forward = action.kind == "forward"
        before = (is_forward, piece - 1 if is_forward else piece + 1, action.microbatch)
        ready = done.get(before, -send) + send
        if action.kind == "weight_gradients":
            ready = 0.0
        end = max(free[action.stage], ready) + seconds[piece] * shares[action.kind]
        free[action.stage] = end
        if action.kind != "weight_gradients":
            done[is_forward, piece, action.microbatch] = end
    return max(free)
