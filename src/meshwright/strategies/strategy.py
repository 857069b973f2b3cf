"""A strategy: a Plan, the devices it runs on, and the ways to use it."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.cluster.randomness import share_random_state
from meshwright.devices.device import Device
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.names import parse_device_name
from meshwright.devices.runtime import jax_devices_of_all, usable_devices
from meshwright.devices.scope import listening
from meshwright.errors import PlanError, StrategyError, UnknownDeviceError
from meshwright.models.precision import making_layers_in
from meshwright.parallel.layout import add_fsdp, is_arithmetic
from meshwright.parallel.mesh import make_mesh, sharding
from meshwright.parallel.plan import Plan
from meshwright.strategies.attach import attach, attached
from meshwright.strategies.explanation import Explanation, explain

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
        prefetch: Batches that a thread puts onto the mesh ahead of their use; 2 at
            first, 0 for no thread.
    """

    check_nan: bool = True
    prefetch: int = 2

    def __init__(self, plan: Plan, devices: tuple[str, ...]) -> None:
        if plan.num_devices != len(devices):
            raise PlanError(
                f"{type(self).__name__} wants {plan.describe()} = {plan.num_devices} "
                f"devices and received {len(devices)}: {', '.join(devices)}.",
                "data x fsdp x tensor is the number of devices.",
                "Change a degree, or pass the devices to use as devices=[...].",
            )
        self.plan = plan
        self.devices = devices

    @property
    def num_replicas(self) -> int:
        """Into how many parts a batch is split."""
        return self.plan.num_replicas

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the plan; making it starts the runtime."""
        return make_mesh(self.plan, self.devices)

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
                listening(self._notice, self._first_layout),
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

    def _notice(self, made: Any) -> None:
        import keras

        if isinstance(made, keras.Model) and attached(made) is None:
            attach(made, self)

    def _first_layout(self, variable: Any) -> Any:
        shape = tuple(variable.shape)
        spec: tuple[str | None, ...] = (None,) * len(shape)
        if self.plan.fsdp > 1 and is_arithmetic(variable):
            spec, _ = add_fsdp(shape, spec, self.plan.fsdp)
        return sharding(self.mesh, spec)


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
