"""The strategies by the names of the field; each only yields a Plan.

All take the levers of a Plan as keywords: `accumulate`, `remat`, `precision` and
`offload`.
"""

from collections.abc import Sequence
from typing import Unpack

from meshwright.cluster.identity import process_count
from meshwright.devices.device import Device
from meshwright.errors import PlanError, StrategyError
from meshwright.parallel.plan import Levers, Plan, Spec
from meshwright.parallel.rules import check_rules
from meshwright.parallel.schedules import DEFAULT_SCHEDULE
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices


class Single(Strategy):
    """Everything on one device: what all other strategies are compared with.

    Arguments:
        device: The device to use; the first of the best kind if left out.
        levers: `accumulate`, `remat`, `precision` and `offload`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.Single("CPU:1").devices
    ('/device:CPU:1',)
    """

    def __init__(
        self, device: str | Device | None = None, **levers: Unpack[Levers]
    ) -> None:
        chosen = choose_devices(None if device is None else [device])
        if process_count() > 1:
            raise StrategyError(
                f"Single was made in a run of {process_count()} processes.",
                "One device belongs to one process, so the others would have none.",
                "Use Mirrored, or start one process.",
            )
        super().__init__(Plan(**levers), chosen[:1])


class Mirrored(Strategy):
    """Every device holds the whole model and computes a part of the batch.

    Arguments:
        devices: The devices to use; all of the best kind if left out.
        levers: `accumulate`, `remat`, `precision` and `offload`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.Mirrored(["CPU:0", "CPU:1"])
    Mirrored(data=2)
    """

    def __init__(self, devices: DeviceNames = None, **levers: Unpack[Levers]) -> None:
        chosen = choose_devices(devices)
        super().__init__(Plan(data=len(chosen), **levers), chosen)


class FSDP(Strategy):
    """Parameters and optimizer state are split; the batch too. Spare devices mirror.

    Arguments:
        degree: Ways they are split; as many as there are devices if left out.
        devices: The devices to use; all of the best kind if left out.
        levers: `accumulate`, `remat`, `precision` and `offload`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.FSDP(4)
    FSDP(data=2 x fsdp=4)
    """

    def __init__(
        self,
        degree: int | None = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        chosen = choose_devices(devices)
        degree = len(chosen) if degree is None else degree
        data = _spare(self, "degree", degree, len(chosen))
        super().__init__(Plan(data=data, fsdp=degree, **levers), chosen)


class TensorParallel(Strategy):
    """Single weights are split inside their layers. Spare devices mirror.

    Arguments:
        degree: Ways each weight is split.
        rules: Ordered pairs of a pattern and a spec that override the automatic choice.
        devices: The devices to use; all of the best kind if left out.
        levers: `accumulate`, `remat`, `precision` and `offload`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.TensorParallel(8)
    TensorParallel(tensor=8)
    """

    def __init__(
        self,
        degree: int,
        rules: Sequence[tuple[str, Spec]] | None = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        chosen = choose_devices(devices)
        data = _spare(self, "degree", degree, len(chosen))
        checked = check_rules(rules or ())
        plan = Plan(data=data, tensor=degree, rules=checked, **levers)
        super().__init__(plan, chosen)


class Pipeline(Strategy):
    """The model is cut into stages, and batches flow through in microbatches.

    Spare devices mirror every stage.

    Arguments:
        stages: How many there are, or the names of the layers at which the second and
            later ones begin.
        microbatches: Into how many parts a batch is cut; four for each stage if left
            out.
        schedule: `'1f1b'`, `'gpipe'`, `'interleaved'` or `'zero_bubble'`.
        chunks: Pieces of the model on each stage, for `'interleaved'`.
        devices: The devices to use; all of the best kind if left out.
        levers: `remat` and `precision`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.Pipeline(4, microbatches=8)
    Pipeline(data=2 x stages=4, microbatches=8, 1f1b)
    """

    def __init__(
        self,
        stages: int | Sequence[str],
        microbatches: int | None = None,
        schedule: str = DEFAULT_SCHEDULE,
        *,
        chunks: int | None = None,
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        chosen = choose_devices(devices)
        number, cuts = _stages_and_cuts(self, stages)
        data = _spare(self, "stages", number, len(chosen))
        plan = Plan(
            **levers,
            data=data,
            stages=number,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            cuts=cuts,
        )
        super().__init__(plan, chosen)


class Layerwise(Pipeline):
    """The model is cut into stages that compute one after the other.

    It saves memory and no time: one stage works while the others wait. `Pipeline`
    lets them work together.

    Arguments:
        stages: How many there are, or the names of the layers at which the second and
            later ones begin.
        devices: The devices to use; all of the best kind if left out.
        levers: `remat` and `precision`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.Layerwise(2, devices=["CPU:0", "CPU:1"])
    Layerwise(stages=2, microbatches=1, gpipe)
    """

    def __init__(
        self,
        stages: int | Sequence[str],
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        super().__init__(stages, 1, "gpipe", devices=devices, **levers)


class Hybrid(Strategy):
    """Any combination of degrees; their product is the number of devices.

    Arguments:
        data: Ways the batch is split, each with a replica of the state.
        fsdp: Ways parameters and optimizer state are split, and the batch too.
        tensor: Ways single weights are split inside their layers.
        stages: Pieces that the model is cut into, as `Pipeline` does.
        microbatches: Into how many parts a batch is cut, if there are stages.
        schedule: In which order they flow through the stages.
        chunks: Pieces of the model on each stage, for `'interleaved'`.
        cuts: The names of the layers at which the second and later pieces begin.
        rules: Ordered pairs of a pattern and a spec that override the automatic choice.
        devices: The devices to use; all of the best kind if left out.
        levers: `accumulate`, `remat`, `precision` and `offload`, as in `Plan`.

    >>> import meshwright as mw
    >>> mw.Hybrid(data=2, fsdp=2, tensor=2)
    Hybrid(data=2 x fsdp=2 x tensor=2)
    """

    def __init__(
        self,
        data: int = 1,
        fsdp: int = 1,
        tensor: int = 1,
        stages: int = 1,
        *,
        microbatches: int | None = None,
        schedule: str | None = None,
        chunks: int | None = None,
        cuts: Sequence[str] = (),
        rules: Sequence[tuple[str, Spec]] = (),
        devices: DeviceNames = None,
        **levers: Unpack[Levers],
    ) -> None:
        plan = Plan(
            **levers,
            data=data,
            fsdp=fsdp,
            tensor=tensor,
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            chunks=chunks,
            cuts=tuple(cuts),
            rules=check_rules(rules),
        )
        super().__init__(plan, choose_devices(devices))


def _stages_and_cuts(
    strategy: Strategy, stages: int | Sequence[str]
) -> tuple[int, tuple[str, ...]]:
    if isinstance(stages, int) and not isinstance(stages, bool) and stages > 1:
        return stages, ()
    if isinstance(stages, list | tuple) and stages:
        names = tuple(name for name in stages if isinstance(name, str))
        if len(names) == len(stages):
            return len(names) + 1, names
    raise PlanError(
        f"{type(strategy).__name__} received stages={stages!r}.",
        "It takes a number from 2, or a list of the names of the layers at which the "
        "second and later stages begin.",
        "Use, for example, stages=2 or stages=['head'].",
    )


def _spare(strategy: Strategy, name: str, degree: int, num_devices: int) -> int:
    """The degree of the data axis that uses the remaining devices."""
    Plan(fsdp=degree)  # checks that it is a count
    if num_devices % degree:
        raise PlanError(
            f"{type(strategy).__name__} received {name}={degree} for {num_devices} "
            "devices.",
            "Spare devices become the data axis, so the degree divides their number: "
            f"{num_devices} = {degree} x {num_devices // degree} + "
            f"{num_devices % degree}.",
            f"Use a degree that divides {num_devices}, or pass devices=[...].",
        )
    return num_devices // degree
