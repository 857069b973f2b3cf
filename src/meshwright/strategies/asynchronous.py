"""`meshwright.AsyncServer`: workers that do not wait for each other."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Unpack

from meshwright.cluster.channel import channel
from meshwright.cluster.identity import process_count
from meshwright.devices.runtime import jax_devices
from meshwright.devices.scope import homes_of
from meshwright.devices.sizes import is_count
from meshwright.errors import PlanError, StrategyError
from meshwright.models.formulations import compiler_options
from meshwright.parallel.mesh import make_mesh, replicated
from meshwright.parallel.microbatch import cut_up
from meshwright.parallel.plan import Levers, Plan
from meshwright.parallel.staleness import Staleness
from meshwright.strategies.attach import place
from meshwright.strategies.strategy import DeviceNames, Strategy, choose_devices
from meshwright.train.async_pace import AsyncPace
from meshwright.train.async_process import ProcessWorker, shares_of_cores
from meshwright.train.async_server import Rules
from meshwright.train.async_step import AsyncStep
from meshwright.train.async_worker import (
    PATIENCE_SECONDS,
    DeviceWorker,
    Worker,
    WorkerTable,
)
from meshwright.train.mesh_step import MeshStep
from meshwright.train.pace import Pace
from meshwright.train.run import current_run
from meshwright.train.stage_cut import StageCut

from jax.sharding import Mesh

STALENESS_PER_WORKER = 4
"""So far the bound goes if nobody says otherwise: a worker may take four times as long
as the others before they wait for it."""

_NOT_REPEATABLE = (
    "AsyncServer with max_staleness > 0: a resumed training goes on with the weights "
    "that were saved, but not bit for bit as it would have without an interruption"
)


class AsyncServer(Strategy):
    """Workers compute gradients without waiting; a server applies them as they arrive.

    Each device is a worker. A batch is cut into as many as there are workers; whoever
    is ready takes the next of them and the newest weights, and what it computes is an
    update of its own. The first device is the server as well: it has the weights and
    the optimizer. The numbers depend on who is faster, so no two runs are the same,
    unless `max_staleness=0`.

    Arguments:
        max_staleness: How many updates others may make between the time when a worker
            takes weights and the time when its gradients are applied; workers wait so
            that none is older. 0 makes one update after the other, each on the newest
            weights. Four for each worker if left out.
        devices: The devices to use; all of the best kind if left out.
        processes: How many processes are the workers, in place of the devices. Each
            computes on a CPU of its own; one that dies is started again while the
            others go on.
        levers: `remat` and `precision`.

    Attributes:
        max_staleness: The bound.
        restarts: How many times a worker process may be started again in a `fit`; 3 at
            first. One that dies more often is given up.
        patience: After how many seconds a worker process that says nothing is taken for
            dead; 600 at first.
        delays: For tests and benchmarks: by the number of a worker, seconds that each
            of its batches takes longer.

    >>> import meshwright as mw
    >>> mw.AsyncServer(max_staleness=3, devices=["CPU:0", "CPU:1"])
    AsyncServer(2 workers, max_staleness=3)
    """

    restarts: int = 3
    patience: float = PATIENCE_SECONDS

    is_a_plan = False

    def __init__(
        self,
        max_staleness: int | None = None,
        devices: DeviceNames = None,
        *,
        processes: int | None = None,
        **levers: Unpack[Levers],
    ) -> None:
        chosen = choose_devices(devices)
        _refuse_bound(max_staleness)
        if processes is None:
            _refuse_devices(chosen)
        else:
            _refuse_processes(processes, chosen)
        if process_count() > 1:
            raise StrategyError(
                f"AsyncServer was made in a run of {process_count()} processes.",
                "One process has the weights, and starts those that work for it.",
                "Start one process with AsyncServer(processes="
                f"{process_count()}), or use Mirrored.",
            )
        if levers.get("accumulate", 1) != 1:
            raise PlanError(
                f"AsyncServer received accumulate={levers['accumulate']!r}.",
                "What a worker computes is an update of its own.",
                "Use a smaller batch_size, or let the optimizer add up gradients: "
                f"gradient_accumulation_steps={levers['accumulate']!r}.",
            )
        super().__init__(Plan(data=len(chosen), **levers), chosen)
        self._processes = processes
        usual = STALENESS_PER_WORKER * self.num_workers
        self.max_staleness = usual if max_staleness is None else max_staleness
        self.delays: Mapping[int, float] = {}
        self._staleness = Staleness()

    def __repr__(self) -> str:
        kind = "workers" if self._processes is None else "processes"
        return (
            f"AsyncServer({self.num_workers} {kind}, "
            f"max_staleness={self.max_staleness})"
        )

    @property
    def num_workers(self) -> int:
        """Into how many parts a batch is cut, each of them an update."""
        return self._processes or len(self.devices)

    @property
    def staleness(self) -> Staleness:
        """How many updates of the last `fit` were how old; it prints as a histogram."""
        return self._staleness

    @property
    def workers(self) -> WorkerTable:
        """What each worker did in the last `fit`; it prints as a table."""
        return WorkerTable(worker.figures for worker in self._crew)

    @cached_property
    def home(self) -> Mesh:
        """Where variables live: on the server."""
        return make_mesh(Plan(), self.devices[:1])

    @property
    def metrics_home(self) -> Mesh:
        """Where the variables of metrics live: on the server, which adds them up."""
        return self.home

    @cached_property
    def _crew(self) -> Sequence[Worker]:
        if self._processes is not None:
            shares = shares_of_cores(self._processes)
            options = compiler_options(self.home)
            return [
                ProcessWorker(number, cores, options)
                for number, cores in enumerate(shares)
            ]
        return [
            DeviceWorker(number, name, replicated(make_mesh(Plan(), (name,))))
            for number, name in enumerate(self.devices)
        ]

    def make_pace(self, model: Any, verb: str, most_steps: int | None) -> Pace:
        """How steps are dispatched: those of `fit` without a place on the mesh."""
        if verb != "fit":
            return super().make_pace(model, verb, most_steps)
        self._start_anew()
        if current_run() is not None and self.max_staleness:
            channel().say(notice=_NOT_REPEATABLE)
        return AsyncPace(model, verb, self.mesh, False, most_steps)

    def make_step(self, model: Any, step: Any, cut: StageCut | None = None) -> Any:
        """What trains asynchronously, and evaluates and predicts on all devices."""
        _refuse_placed(model)
        place(model, self)
        if step.__name__ != "train_step":
            # All variables are brought to all devices for it.
            return MeshStep(model, step, self.plan, self.mesh, places={})
        self._start_anew()
        return AsyncStep(
            model,
            step,
            self.home,
            self._crew,
            remat=self.plan.remat,
            rules=self._rules,
            staleness=self._staleness,
        )

    def _start_anew(self) -> None:
        """Sets all figures back."""
        self._staleness.clear()
        for worker in self._crew:
            worker.start_anew(self.delays.get(worker.number, 0.0), self.patience)

    def _rules(self) -> Rules:
        run = current_run()
        skips = run is not None and run.orders.on_nan == "skip"
        return Rules(self.max_staleness, self.restarts, skips)

    def updates_of(self, batch: Any, size: int) -> list[Any]:
        """The batches of the workers, in their order."""
        return cut_up(batch, size, self.num_workers)

    def refuse_verify(self) -> None:
        """Raises an error unless updates are made one after the other."""
        if self.max_staleness:
            raise StrategyError(
                f"verify received {self!r}.",
                "Which weights a gradient is computed on depends on who is faster, so "
                "no training on one device gives the same.",
                "Use max_staleness=0, which equals one device on the batches of the "
                "workers.",
            )

    def explain(self, model: Any, x: Any, y: Any) -> Any:
        """Refused: there is no program over all devices that could be explained."""
        raise _no_mesh("explain", "Look at strategy.workers and strategy.staleness.")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refused: replicas of a function would wait for each other."""
        raise _no_mesh("run", "Train with fit, or use Mirrored for loops of your own.")


def _no_mesh(name: str, change: str) -> StrategyError:
    return StrategyError(
        f"{name} was called on AsyncServer.",
        "Its workers run programs of their own, each on one device.",
        change,
    )


def _refuse_bound(most: Any) -> None:
    is_whole = isinstance(most, int) and not isinstance(most, bool)
    if most is not None and not (is_whole and most >= 0):
        raise PlanError(
            f"AsyncServer received max_staleness={most!r}.",
            "It is a number of updates, a whole number from 0.",
            "Use, for example, max_staleness=8, or leave it out.",
        )


def _refuse_devices(names: tuple[str, ...]) -> None:
    if len(names) < 2:
        raise PlanError(
            f"AsyncServer received one device, {names[0]}.",
            "It needs two workers at least: one alone has nobody to be ahead of.",
            "Use Single, or pass more devices as devices=[...].",
        )


def _refuse_processes(number: Any, names: tuple[str, ...]) -> None:
    if not (is_count(number) and number >= 1):
        raise PlanError(
            f"AsyncServer received processes={number!r}.",
            "It is a number of worker processes, from 1.",
            "Use, for example, processes=2, or leave it out: then devices work.",
        )
    gpus = [name for name in names if jax_devices()[name].platform != "cpu"]
    if gpus:
        raise PlanError(
            f"AsyncServer received processes={number} on {', '.join(gpus)}.",
            "Worker processes compute on CPUs.",
            "Leave processes out: then each of these devices is a worker. Or pass "
            "devices=['CPU:0'].",
        )


def _refuse_placed(model: Any) -> None:
    homes = sorted({name for _, name in homes_of(model)})
    if homes:
        raise StrategyError(
            f"{model.name!r} was to be trained asynchronously, and layers of it were "
            f"put on {', '.join(homes)} by hand.",
            "Every worker computes the whole model on its own device.",
            "Build the model outside of mw.device, or train it without a strategy.",
        )
