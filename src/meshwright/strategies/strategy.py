"""A strategy: a Plan, the devices it runs on, and the ways to use it."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any

from meshwright.cluster.gloo import let_gloo_give_way
from meshwright.cluster.identity import process_count
from meshwright.cluster.randomness import share_random_state
from meshwright.data.loader import Batches
from meshwright.devices.device import Device
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.names import parse_device_name
from meshwright.devices.runtime import (
    belongs_to_some,
    jax_devices_of_all,
    usable_devices,
)
from meshwright.devices.strategy_hooks import ScopeHooks, in_scope
from meshwright.errors import PlanError, StrategyError, UnknownDeviceError
from meshwright.models.precision import making_layers_in
from meshwright.parallel.batch import batch_axes
from meshwright.parallel.layout import add_fsdp, is_arithmetic
from meshwright.parallel.mesh import make_mesh, replicated, sharding
from meshwright.parallel.plan import Plan
from meshwright.parallel.reduction import gather_values, reduce_values
from meshwright.strategies.attach import attach, attached, place, step_over_mesh
from meshwright.strategies.custom_loop import (
    check_values,
    compile_for_replicas,
    local_results,
    run,
)
from meshwright.strategies.dataset import DistributedDataset
from meshwright.strategies.explanation import Explanation, explain
from meshwright.strategies.replica_context import refuse_inside_replica, replica_id
from meshwright.train.pace import Pace
from meshwright.train.stage_cut import StageCut

import jax
from jax.sharding import Mesh

DeviceNames = Sequence[str | Device] | None


_open_scopes: ContextVar[tuple["Strategy", ...]] = ContextVar(
    "meshwright_open_scopes", default=()
)


class Strategy:
    """How one model is trained on several devices.

    Strategies are made by name (`Mirrored`, `FSDP`, ...); each is a Plan on devices.

    Attributes:
        plan: The plan.
        devices: Names of the devices, in the order of the mesh.
        check_nan: Whether inputs that are NaN or infinite are refused; True at first.
        prefetch: For how many dispatches a thread puts batches onto the mesh ahead of
            their use; 2 at first, 0 for no thread.
        resident: Whether arrays stay on the devices for a whole `fit` or `evaluate`, so
            that many steps can be dispatched together; None, as at first, if they do
            when they fit.
        pace: By the name of the method, `fit` or `evaluate`: how its last run went
            through its data and why; to be printed.
    """

    check_nan: bool = True
    is_a_plan: bool = True
    """Whether its steps are those of its plan, and nothing besides."""
    prefetch: int = 2
    resident: bool | None = None

    def __init__(self, plan: Plan, devices: tuple[str, ...]) -> None:
        if plan.num_devices != len(devices):
            raise PlanError(
                f"{type(self).__name__} wants {plan.describe()} = {plan.num_devices} "
                f"devices and received {len(devices)}: {', '.join(devices)}.",
                "data x fsdp x tensor x stages is the number of devices.",
                "Change a degree, or pass the devices to use as devices=[...].",
            )
        if plan.offload and not self.is_a_plan:
            raise PlanError(
                f"{type(self).__name__} received offload=True.",
                "It updates weights in a way of its own, with the optimizer's state "
                "at hand.",
                "Leave offload out, or use mw.Mirrored() or mw.FSDP().",
            )
        self.plan = plan
        self.devices = devices
        self.pace: dict[str, Pace] = {}

    @property
    def num_replicas(self) -> int:
        """Into how many parts a batch is split."""
        return self.plan.num_replicas

    @property
    def is_open(self) -> bool:
        """Whether the plan is still to be chosen; only `Auto` waits for the data."""
        return False

    def prepare(self, model: Any, arguments: Mapping[str, Any]) -> None:
        """Called before each run of a model, with the arguments of the run."""

    def make_step(self, model: Any, step: Any, cut: StageCut | None = None) -> Any:
        """What runs a step of Keras' (train, test or predict) of a model.

        That of the plan; strategies that are more than a plan have steps of their own.

        Arguments:
            model: The model.
            step: The step.
            cut: Where the model is cut into pieces; as it was attached if left out.
        """
        place(model, self)
        return step_over_mesh(model, step, self, cut)

    def what_travels(self, model: Any, program: str, batch: Any) -> tuple[str, ...]:
        """What `explain` says besides of what travels in a step; nothing for a plan.

        Arguments:
            model: The model.
            program: The text of its compiled training step.
            batch: A batch.
        """
        return ()

    def updates_of(self, batch: Any, size: int) -> list[Any]:
        """The batches on which one device makes the updates that a batch leads to."""
        return [batch]

    def refuse_verify(self) -> None:
        """Raises an error if no training on one device gives the same weights."""

    def make_pace(self, model: Any, verb: str, most_steps: int | None) -> Pace:
        """How the steps of a run of a model are dispatched.

        Arguments:
            model: The model.
            verb: `fit`, `evaluate` or `predict`.
            most_steps: How many steps may be dispatched together; None if that is free.
        """
        offloads = self.plan.offload and verb == "fit"
        return Pace(model, verb, self.mesh, self.resident, most_steps, offloads)

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the plan; making it starts the runtime."""
        mesh = make_mesh(self.plan, self.devices)
        if mesh.is_multi_process and mesh.devices.flat[0].platform == "cpu":
            let_gloo_give_way()
        return mesh

    @property
    def keeps_variables_on(self) -> str | None:
        """The one device that keeps all variables, if there is one."""
        return None

    @property
    def home(self) -> Mesh:
        """Where variables live, as a mesh; that of the plan."""
        return self.mesh

    @property
    def metrics_home(self) -> Mesh:
        """Where the variables of metrics live: where steps compute them."""
        return self.mesh

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plan.describe()})"

    @contextlib.contextmanager
    def scope(self) -> Iterator["Strategy"]:
        """Models made inside are trained by this strategy, also after the scope.

        Their variables are made split as far as their shape alone allows; what depends
        on the graph is laid out when the model first runs. Layers compute in the
        strategy's precision, unless they are given a dtype of their own.
        """
        install_keras_hooks()
        # Models that are loaded inside find its class by having it registered.
        importlib.import_module("meshwright.train.warmup")
        if any(other is not self for other in _open_scopes.get()):
            raise StrategyError(
                f"The scope of {self!r} was entered inside the scope of another "
                "strategy.",
                "A model is trained by one strategy, so scopes do not mix.",
                "Leave the other scope first, or use mw.distribute(model, strategy).",
            )
        share_random_state()
        token = _open_scopes.set((*_open_scopes.get(), self))
        try:
            with (
                in_scope(ScopeHooks(self._notice, self._first_layout)),
                making_layers_in(self.plan.precision),
            ):
                yield self
        finally:
            _open_scopes.reset(token)

    def explain(self, model: Any, x: Any, y: Any) -> Explanation:
        """Where every variable goes and why, and what travels in a training step.

        Arguments:
            model: A built and compiled model; it is placed on this strategy's mesh.
            x: Inputs of one global batch.
            y: Its targets.

        Like `evaluate`, it builds the model's metrics; Keras then draws one
        permutation less in a `fit` that follows, so shuffled batches are others.

        Returns:
            An `Explanation`, which prints well.
        """
        return explain(self, model, x, y)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which the replicas lie, for collectives in `run`.

        >>> import jax
        >>> import numpy as np
        >>> import meshwright as mw
        >>> strategy = mw.Mirrored(["CPU:0", "CPU:1"])
        >>> (batch,) = strategy.distribute_dataset([np.arange(4)])
        >>> axes = strategy.replica_axes
        >>> strategy.run(lambda x: jax.lax.psum(x.sum(), axes), args=(batch,))
        PerReplica:{0: Array(6, dtype=int32), 1: Array(6, dtype=int32)}
        """
        return batch_axes(self.mesh)

    def replica_id(self) -> jax.Array:
        """The number of the replica, from 0; only in functions that `run` runs."""
        return replica_id()

    def distribute_dataset(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> DistributedDataset:
        """Batches for `run`: iterating gives each batch split over the replicas.

        A thread splits batches ahead of their use, as many as `prefetch` says.

        Arguments:
            dataset: An iterable of global batches, which are trees of arrays that have
                their samples in the first dim, iterated over anew each time; or, with a
                `batch_size`, such a tree of arrays itself; or a function that takes a
                `Shard` and returns the batches of one process, for data in files;
                it is called for every epoch.
            batch_size: Samples in a global batch, if `dataset` is arrays.
            shuffle: Whether their samples are mixed anew in every epoch.
            seed: What their order depends on, besides the epoch.

        >>> import numpy as np
        >>> import meshwright as mw
        >>> strategy = mw.Mirrored(["CPU:0", "CPU:1"])
        >>> for batch in strategy.distribute_dataset(np.arange(7), batch_size=4):
        ...     print(batch)
        PerReplica:{0: Array([0, 1], dtype=int32), 1: Array([2, 3], dtype=int32)}
        PerReplica:{0: Array([4, 5], dtype=int32), 1: Array([6], dtype=int32)}
        """
        if batch_size is not None:
            dataset = Batches(dataset, batch_size, shuffle=shuffle, seed=seed)
        return DistributedDataset(dataset, self.mesh, self.prefetch)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function on every replica with that replica's part of the arguments.

        The function is compiled at its first run, and again for new shapes; it sees
        new values only in its arguments. It may be called inside of `jax.jit`.

        Arguments:
            fn: The function, pure as for `jax.jit`. Inside, `jax.lax.psum(x,
                strategy.replica_axes)` sums over the replicas.
            args: Its positional arguments. Of values per replica, each replica gets its
                own; everything else goes to all, numbers as arrays.
            kwargs: Its keyword arguments, likewise.

        Returns:
            What `fn` returns, with a value per replica for every array. What is no
            array is returned as it is.

        >>> import numpy as np
        >>> import meshwright as mw
        >>> strategy = mw.Mirrored(["CPU:0", "CPU:1"])
        >>> (batch,) = strategy.distribute_dataset([np.arange(3)])
        >>> strategy.run(lambda x, factor: (x * factor).sum(), args=(batch, 10))
        PerReplica:{0: Array(10, dtype=int32), 1: Array(20, dtype=int32)}
        """
        return run(fn, args, kwargs, self.mesh, self._program)

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Makes one value of the values of all replicas, whole on every device.

        Arguments:
            op: "SUM" or "MEAN", in any case.
            value: A tree of values per replica. Of what is not one per replica the mean
                is itself, and a sum is refused.
            axis: A dim of the values along which is reduced too, each element counting
                once, however many a replica has; None for the replicas alone.

        >>> import numpy as np
        >>> import meshwright as mw
        >>> strategy = mw.Mirrored(["CPU:0", "CPU:1"])
        >>> (batch,) = strategy.distribute_dataset([np.array([1.0, 2.0, 30.0])])
        >>> float(strategy.reduce("MEAN", batch, axis=0))
        11.0
        """
        self._check("reduce", value)
        return reduce_values(op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates the values of all replicas along a dim, whole on every device.

        Arguments:
            value: A tree of values per replica, which may differ in that dim. What is
                not one per replica stays as it is.
            axis: The dim.

        >>> import numpy as np
        >>> import meshwright as mw
        >>> strategy = mw.Mirrored()
        >>> (batch,) = strategy.distribute_dataset([np.arange(9)])
        >>> strategy.gather(batch)
        Array([0, 1, 2, 3, 4, 5, 6, 7, 8], dtype=int32)
        """
        self._check("gather", value)
        return gather_values(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, each on its own device.

        What holds no value per replica is the only result.

        >>> import meshwright as mw
        >>> mw.Mirrored(["CPU:0", "CPU:1"]).local_results(5)
        (5,)
        """
        return local_results(value)

    def _check(self, name: str, value: Any) -> None:
        refuse_inside_replica(name)
        check_values(name, value, self.mesh)

    @cached_property
    def _program(self) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
        return lru_cache(maxsize=128)(lambda fn: compile_for_replicas(fn, self.mesh))

    def _notice(self, made: Any) -> None:
        import keras

        if isinstance(made, keras.Model) and attached(made) is None:
            attach(made, self)

    def _first_layout(self, variable: Any) -> Any:
        if self.plan.stages > 1 or belongs_to_some(replicated(self.home)):
            return None  # the first step lays it out, in all processes at once
        shape = tuple(variable.shape)
        spec: tuple[str | None, ...] = (None,) * len(shape)
        if self.plan.fsdp > 1 and is_arithmetic(variable):
            spec, _ = add_fsdp(shape, spec, self.plan.fsdp)
        return sharding(self.home, spec)


def choose_devices(devices: DeviceNames) -> tuple[str, ...]:
    """The names of the devices of a strategy: those given, or all of the best kind.

    Strategies never fall back to other devices: a missing one is an error. In a run of
    several processes, these devices of every process.
    """
    usable = [device.name for device in usable_devices()]
    if devices is None:
        gpus = [d.name for d in usable_devices() if d.kind != "CPU"]
        return _of_every_process(tuple(gpus or usable))
    if isinstance(devices, str) or not len(devices):
        raise PlanError(
            f"devices received {devices!r}.",
            "It takes a list of at least one device.",
            f"Write, for example, devices=[{usable[0]!r}].",
        )
    names = tuple(str(_full_name(device, usable)) for device in devices)
    if len(set(names)) < len(names):
        raise PlanError(
            f"devices received {list(names)}, which names a device twice.",
            "Each device of a mesh is used once.",
            f"Name each once, out of: {', '.join(usable)}.",
        )
    return _of_every_process(names)


def _of_every_process(names: tuple[str, ...]) -> tuple[str, ...]:
    if process_count() == 1:
        return names
    wanted = [f"/process:{p}{name}" for p in range(process_count()) for name in names]
    existing = jax_devices_of_all()
    missing = [name for name in wanted if name not in existing]
    if missing:
        raise UnknownDeviceError(
            f"{', '.join(missing)} unknown device.",
            "In a run of several processes a strategy uses devices of the same names "
            "in every process.",
            "Give every process as many devices, or name those that all have out of "
            f"{', '.join(existing)}.",
        )
    return tuple(wanted)


def _full_name(device: str | Device, usable: list[str]) -> str:
    text = device.name if isinstance(device, Device) else device
    name = parse_device_name(text, tuple(usable))
    full = f"/device:{name.kind}:{name.index or 0}"
    if full not in usable:
        raise UnknownDeviceError(
            f"{full} unknown device.",
            "A strategy runs on the devices it names and never falls back.",
            f"Use some of {', '.join(usable)}.",
        )
    return full
