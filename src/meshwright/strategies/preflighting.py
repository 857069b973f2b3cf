"""`meshwright.preflight`: does a training fit, and if not, what is the least to do?"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any

from meshwright.devices.sizes import format_bytes, parse_bytes
from meshwright.errors import MeshwrightError, PlanError, StrategyError
from meshwright.parallel.plan import MICROBATCHES, Plan
from meshwright.planner.machines import parse_machine
from meshwright.planner.search import changes
from meshwright.planner.workload import Workload
from meshwright.strategies.attach import attached
from meshwright.strategies.names import Single
from meshwright.strategies.planning import check_question
from meshwright.strategies.strategy import Strategy
from meshwright.train.exact_memory import ExactMemory, exact_memory

MOST_COMPILED = 6
"""So many changes are compiled, to be certain that they fit."""

MARGIN = 1.25
"""Changes that need this much more by estimate are not compiled."""

HOPE = 2.0
"""Neither is the last resort, if it needs so much."""


_BY_KERNELS = 0.06
"""So far from the limit kernels may decide: on one H200 trainings took at the most so
much more than what they were said to, without kernels having been tried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A change that makes a training fit."""

    words: str
    """What to change."""
    plan: Plan
    batch_size: int
    bytes_per_device: int
    """What it needs then."""

    def __str__(self) -> str:
        return f"{self.words}: {format_bytes(self.bytes_per_device)} per device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """Whether a training step fits into the memory of its devices."""

    model: str
    plan: Plan
    batch_size: int
    fits: bool
    bytes_per_device: int
    """Of the device that needs most, by the compiler's own account."""
    bytes_to_run: int
    """What it must have free, which is compared with the limit.

    A GPU takes batches that are on their way besides, and kernels that are tried out;
    those that win may need more than others; and what is free is not in one piece.
    """
    by_kind: Mapping[str, int]
    """`bytes_per_device` by kind: parameters, optimizer state, batch, ..."""
    limit: int | None
    """Bytes that a step may use; None if nobody knows."""
    because: str
    """Where the limit comes from."""
    suggestion: Suggestion | None = None
    """The smallest change that fits, if this does not and there is one."""
    is_close: bool = False
    """Whether the verdict may change with the kernels of a GPU, which were not tried.

    `try_kernels=True` tries them.
    """

    def __str__(self) -> str:
        what = f"{self.model}, batch of {self.batch_size}, {self.plan.describe()}"
        limit = "unknown" if self.limit is None else format_bytes(self.limit)
        verdict = "fits" if self.fits else "does not fit"
        needs = format_bytes(self.bytes_per_device)
        if self.bytes_to_run > self.bytes_per_device:
            needs += f", and {format_bytes(self.bytes_to_run)} to run,"
        lines = [
            f"{what}: {verdict}",
            f"  needs  {needs} per device",
            f"  limit  {limit} ({self.because})",
        ]
        lines += [f"    {format_bytes(size):>12}  {k}" for k, size in self._kinds()]
        if self.is_close:
            lines.append(
                "  close to the limit: it depends on kernels that were not tried out; "
                "try_kernels=True decides"
            )
        if self.suggestion is not None:
            lines.append(f"  smallest change that fits: {self.suggestion}")
        elif not self.fits:
            lines.append("  no change that was tried fits; use more devices")
        return "\n".join(lines)

    def _kinds(self) -> list[tuple[str, int]]:
        return [(kind, size) for kind, size in self.by_kind.items() if size]

    def to_json(self) -> dict[str, Any]:
        """What is known, as JSON values."""
        change = self.suggestion
        return {
            "model": self.model,
            "plan": self.plan.to_json(),
            "batch_size": self.batch_size,
            "fits": self.fits,
            "is_close": self.is_close,
            "bytes_per_device": self.bytes_per_device,
            "bytes_to_run": self.bytes_to_run,
            "by_kind": dict(self.by_kind),
            "limit": self.limit,
            "because": self.because,
            "suggestion": None
            if change is None
            else {
                "words": change.words,
                "plan": change.plan.to_json(),
                "batch_size": change.batch_size,
                "bytes_per_device": change.bytes_per_device,
            },
        }


def preflight(
    model: Any,
    batch_size: int,
    strategy: Strategy | None = None,
    memory: int | str | None = None,
    data: Any = None,
    *,
    try_kernels: bool = False,
) -> Preflight:
    """Says whether a training fits, by compiling its step; nothing is allocated or run.

    Arguments:
        model: A built and compiled model, with or without values.
        batch_size: Samples of the global batch.
        strategy: How it is to be trained; the model's own, or one device, if left out.
        memory: What a step may use of each device, as `'16GiB'`; what the devices have
            if left out.
        data: A batch as `(x, y)`, or its shapes, for models that do not say what they
            take.
        try_kernels: Whether the compiler may try kernels out on GPUs, as `fit` lets it;
            that takes time and memory there, and what kernels need is known then
            instead of guessed.

    Returns:
        A `Preflight`: `fits`, `bytes_per_device`, `by_kind` and, if it does not fit,
        the smallest change that does as `suggestion`.

    >>> import keras
    >>> import meshwright as mw
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    >>> model.compile("adam", "mse")
    >>> mw.preflight(model, batch_size=256, strategy=mw.Mirrored(), memory="1MiB").fits
    True
    """
    check_question("preflight", model, batch_size)
    chosen = _checked(strategy) or attached(model) or Single()
    if not chosen.is_a_plan:
        raise StrategyError(
            f"preflight received {chosen!r}.",
            "It weighs the step of a plan, and this strategy has steps of its own.",
            "Ask about mw.Mirrored() on the same devices; docs/strategies/ says what "
            "this one needs beside it.",
        )
    limit, because = _limit(chosen, memory)
    found = exact_memory(
        model,
        chosen.plan,
        chosen.mesh,
        batch_size,
        data,
        tries_kernels=try_kernels,
    )
    platform = chosen.mesh.devices.flat[0].platform
    room = _room(found, platform)
    fits = limit is None or room <= limit
    answer = Preflight(
        model=model.name,
        plan=chosen.plan,
        batch_size=batch_size,
        fits=fits,
        bytes_per_device=found.bytes_per_device,
        bytes_to_run=room,
        by_kind=found.by_kind,
        limit=limit,
        because=because,
        is_close=platform == "gpu" and not try_kernels and _is_close(room, limit),
    )
    if fits or limit is None:
        return answer
    changes = _Changes(model, chosen, data, limit, try_kernels=try_kernels)
    return replace(answer, suggestion=changes.smallest(answer))


def _checked(strategy: Any) -> Strategy | None:
    if strategy is None or isinstance(strategy, Strategy):
        return strategy
    raise StrategyError(
        f"preflight received {strategy!r} (a {type(strategy).__name__}) as strategy.",
        "It takes a strategy, or None for the model's own.",
        "Pass, for example, mw.Mirrored().",
    )


def _room(found: ExactMemory, platform: str) -> int:
    """What a device must have free: the allocator of a GPU has more to give."""
    return found.bytes_to_run if platform == "gpu" else found.bytes_per_device


def _is_close(room: int, limit: int | None) -> bool:
    """Whether kernels may decide.

    >>> _is_close(97, 100), _is_close(90, 100), _is_close(104, 100), _is_close(9, None)
    (True, False, True, False)
    """
    return limit is not None and abs(room / limit - 1) < _BY_KERNELS


def _limit(strategy: Strategy, memory: int | str | None) -> tuple[int | None, str]:
    if memory is not None:
        return parse_bytes(memory, "memory"), "as memory= says"
    machine = parse_machine(list(strategy.devices))
    return machine.usable_memory, machine.memory_because


class _Changes:
    """Ways to need less memory on the same devices, the smallest first."""

    def __init__(
        self,
        model: Any,
        strategy: Strategy,
        data: Any,
        limit: int,
        *,
        try_kernels: bool = False,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._data = data
        self._limit = limit
        self._tries_kernels = try_kernels
        machine = parse_machine(list(strategy.devices))
        self._platform = strategy.mesh.devices.flat[0].platform
        self._estimates = Workload.of(model, machine.kind, data).memory

    def smallest(self, answer: Preflight) -> Suggestion | None:
        """The first change that fits, by the compiler's account."""
        # The memory of a CPU is the host's, so nothing is gained there.
        may = self._platform != "cpu"
        ordered = _ordered(answer.plan, answer.batch_size, may_offload=may)
        found = self._first(ordered)
        if found is None:
            return None
        plan, size, needed = found
        words = _words(answer.plan, plan, answer.batch_size, size)
        return Suggestion(
            words=words, plan=plan, batch_size=size, bytes_per_device=needed
        )

    def _first(self, ordered: list[tuple[Plan, int]]) -> tuple[Plan, int, int] | None:
        num_left, most = MOST_COMPILED - 1, MARGIN * self._limit
        for plan, size in ordered:
            estimate = self._estimate(plan, size)
            if estimate >= most:
                continue
            needed = self._needed(plan, size)
            if needed is not None and needed <= self._limit:
                return plan, size, needed
            if needed is not None:
                # What is as large as something that does not fit does not fit either.
                most = estimate
            num_left -= 1
            if not num_left:
                break
        return self._leanest(ordered)

    def _leanest(self, ordered: list[tuple[Plan, int]]) -> tuple[Plan, int, int] | None:
        """The last resort: better a change that is too large than none."""
        sizes = [self._estimate(*each) for each in ordered]
        least = min(sizes, default=inf)
        if least >= HOPE * self._limit:
            return None
        plan, size = ordered[sizes.index(least)]
        needed = self._needed(plan, size)
        if needed is None or needed > self._limit:
            return None
        return plan, size, needed

    def _estimate(self, plan: Plan, batch_size: int) -> float:
        try:
            return self._estimates.estimate(plan, batch_size).total
        except PlanError:
            return inf  # the model cannot be cut into so many pieces

    def _needed(self, plan: Plan, batch_size: int) -> int | None:
        """What a device must have free; None if the plan does not suit the model."""
        mesh = Strategy(plan, self._strategy.devices).mesh
        try:
            found = exact_memory(
                self._model,
                plan,
                mesh,
                batch_size,
                self._data,
                tries_kernels=self._tries_kernels,
            )
        except MeshwrightError:
            return None
        return _room(found, mesh.devices.flat[0].platform)


def _ordered(
    plan: Plan, batch_size: int, *, may_offload: bool = False
) -> list[tuple[Plan, int]]:
    """Changes of a plan and its batch, those that change the least first.

    What leaves the result as it is (accumulate, remat, fsdp, tensor, stages, offload:
    each alone, then together) comes before what rounds it, and that before what trains
    on smaller batches.
    """
    found = []
    is_even = batch_size % _num_parts(plan) == 0
    for (rounds, *efforts), changed in _changed_plans(plan, may_offload):
        for halvings in range(5):
            size = batch_size >> halvings
            divides = size % _num_parts(changed) == 0 or not is_even
            if size and divides and (changed != plan or halvings):
                depth = 2 * (halvings > 0) + rounds
                found.append(((depth, halvings, *efforts), changed, size))
    found.sort(key=lambda each: each[0])
    return [(each, size) for _, each, size in found]


def _num_parts(plan: Plan) -> int:
    """Into how many parts a batch is cut."""
    return plan.num_replicas * (plan.microbatches or plan.accumulate)


def _changed_plans(
    plan: Plan, may_offload: bool
) -> Iterator[tuple[tuple[int, ...], Plan]]:
    """Plans with what they change: rounding, how many other things, which, how far."""
    precisions = [plan.precision]
    if plan.precision not in ("bfloat16", "float16"):
        precisions.append("bfloat16")
    offloads = {plan.offload, may_offload or plan.offload}
    for mesh, precision, remat, offload, doublings in product(
        _meshes(plan), precisions, {plan.remat, True}, offloads, range(5)
    ):
        changed = _changed(plan, mesh, offload, doublings)
        if changed is None:
            continue
        # In the order of intrusiveness.
        splits = (each > 1 for each in mesh)
        which = (doublings > 0, remat != plan.remat, *splits, offload != plan.offload)
        weight = sum(2**place for place, is_new in enumerate(which) if is_new)
        rounds = precision != plan.precision
        effort = (int(rounds), sum(which), weight, prod(mesh), doublings)
        yield effort, replace(changed, precision=precision, remat=remat)


def _changed(
    plan: Plan, mesh: tuple[int, int, int], offload: bool, doublings: int
) -> Plan | None:
    """The plan on another mesh of as many devices, and with smaller microbatches."""
    fsdp, tensor, stages = mesh
    is_cut = plan.stages * stages > 1
    if (is_cut and offload) or (stages > 1 and doublings):
        return None
    smaller: dict[str, Any] = {"accumulate": plan.accumulate << doublings}
    if stages > 1:
        number = max(MICROBATCHES * stages, plan.accumulate)
        smaller = {"accumulate": 1, "stages": stages, "microbatches": number}
    elif is_cut:
        smaller = {"microbatches": (plan.microbatches or 1) << doublings}
    return replace(
        plan,
        data=plan.data // prod(mesh),
        fsdp=plan.fsdp * fsdp,
        tensor=plan.tensor * tensor,
        offload=offload,
        **smaller,
    )


def _meshes(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Ways in which replicas may share a model: by fsdp, tensor and stages."""
    degrees = [n for n in range(1, plan.data + 1) if plan.data % n == 0]
    cuts = degrees if plan.stages == 1 else [1]
    for mesh in product(degrees, degrees, cuts):
        if plan.data % prod(mesh) == 0:
            yield mesh


def _words(plan: Plan, changed: Plan, batch_size: int, size: int) -> str:
    wanted = changes(plan, changed) if changed != plan else []
    if size != batch_size:
        wanted.append(f"batch_size={size}")
    return ", ".join(wanted)
