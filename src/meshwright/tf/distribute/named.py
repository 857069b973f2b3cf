"""The strategies by TensorFlow's names."""

import importlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from meshwright.devices.device import Device
from meshwright.strategies.names import Mirrored, Pipeline, Single
from meshwright.tf.config import LogicalDevice
from meshwright.tf.distribute.cluster import join_cluster
from meshwright.tf.distribute.strategy import Strategy
from meshwright.tf.started import initialize
from meshwright.tf.tensors import full_name

_logger = logging.getLogger("tensorflow")

Devices = Sequence[str | Device | LogicalDevice] | None


def _kinds(mirrored: type) -> dict[str, type]:
    """The classes of variables, which live in a file that is made of this one."""
    return vars(importlib.import_module(mirrored.__module__))


def _names(devices: Devices) -> list[str] | None:
    initialize()
    if devices is None:
        return None
    if isinstance(devices, str):
        raise ValueError(
            f"devices received {devices!r}. It takes a list of devices. Write "
            f"devices=[{devices!r}]."
        )
    names = [str(getattr(device, "name", device)) for device in devices]
    if len(set(names)) < len(names):
        raise AssertionError(
            f"No duplicates allowed in `devices` argument: {tuple(names)}"
        )
    return names


def _announce(strategy: Strategy, more: str = "") -> None:
    if not _logger.handlers:  # TensorFlow itself is not there, so nobody set it up
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        _logger.addHandler(handler)
        _logger.propagate = False
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    devices = tuple(full_name(name) for name in strategy.meshwright.devices)
    _logger.info("Using %s with devices %s%s", type(strategy).__name__, devices, more)


class MirroredStrategy(Strategy):
    """Every device holds the whole model: `meshwright.Mirrored`.

    Arguments:
        devices: The devices; all GPUs, or else all CPUs, if left out.
        cross_device_ops: Accepted; XLA chooses how values are reduced.

    >>> MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
    """

    def __init__(self, devices: Devices = None, cross_device_ops: Any = None) -> None:
        super().__init__(Mirrored(_names(devices)))
        _announce(self)


class OneDeviceStrategy(Strategy):
    """Everything on one device: `meshwright.Single`.

    >>> OneDeviceStrategy("CPU:1").extended.worker_devices
    ('/job:localhost/replica:0/task:0/device:CPU:1',)
    """

    def __init__(self, device: str | Device | LogicalDevice) -> None:
        (name,) = _names([device]) or [""]
        super().__init__(Single(name))

    def variable_kind(self, mirrored: type) -> type:
        """Plain variables: there is one copy."""
        return _kinds(mirrored)["Variable"]


class MultiWorkerMirroredStrategy(Strategy):
    """Every device of every process holds the whole model.

    The processes are those of `TF_CONFIG`, or of `meshwright train`, if it started this
    one. Without either there is one.

    Arguments:
        cluster_resolver: Not covered: `TF_CONFIG` tells the cluster.
        communication_options: Accepted; JAX chooses how values are reduced.
    """

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None
    ) -> None:
        if cluster_resolver is not None:
            raise AttributeError(
                "cluster_resolver is not covered by meshwright.tf. Set TF_CONFIG, or "
                "start the script with meshwright train --hosts a,b."
            )
        join_cluster(os.environ.get("TF_CONFIG"))
        super().__init__(Mirrored(_names(None)))
        _announce(self)


class PipelineStrategy(Strategy):
    """The model is cut into stages, one on each device: `meshwright.Pipeline`.

    TensorFlow has none; a guide that dreams of it is what this is called after. A model
    that is made in its scope trains by Keras' `fit`.

    Arguments:
        num_micro_batches: Into how many parts a batch is cut.
        devices: A device for each stage; all GPUs, or else all CPUs, if left out.
        schedule: The timetable, as for `meshwright.Pipeline`.

    >>> PipelineStrategy(num_micro_batches=4, devices=["CPU:0", "CPU:1"]).meshwright
    Pipeline(stages=2, microbatches=4, 1f1b)
    """

    def __init__(
        self,
        num_micro_batches: int = 4,
        devices: Devices = None,
        schedule: str = "1f1b",
    ) -> None:
        names = _names(devices)
        chosen = Mirrored(names).devices
        pipeline = Pipeline(len(chosen), num_micro_batches, schedule, devices=chosen)
        super().__init__(pipeline)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Not there: a replica of a pipeline is several devices."""
        raise AttributeError(
            "PipelineStrategy.run is not covered by meshwright.tf: a function of yours "
            "cannot be cut into stages. Make and compile a model in the scope, and "
            "call "
            "its fit."
        )


def _named(name: str) -> Any:
    """A strategy of Meshwright's that is looked up when it is used."""
    return getattr(importlib.import_module("meshwright"), name)


class CentralStorageStrategy(Strategy):
    """Variables on one device, gradients of all: `meshwright.CentralStorage`."""

    def __init__(
        self, compute_devices: Devices = None, parameter_device: str | None = None
    ) -> None:
        names = _names(compute_devices)
        central = _named("CentralStorage")
        super().__init__(central(parameter_device, devices=names))

    def variable_kind(self, mirrored: type) -> type:
        """Variables that live on one device and take updates from all replicas."""
        return _kinds(mirrored)["AggregatingVariable"]


class ParameterServerStrategy(Strategy):
    """Workers push gradients without waiting: `meshwright.AsyncServer`.

    Unlike in TensorFlow with Keras 3, `fit` works.

    Arguments:
        cluster_resolver: Not covered: processes are those of `meshwright train`.
        variable_partitioner: Accepted; variables are not cut.
        max_staleness: How many updates a gradient may lag behind; as in
            `meshwright.AsyncServer` if left out.
        devices: The workers; all GPUs, or else all CPUs, if left out.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        max_staleness: int | None = None,
        devices: Devices = None,
    ) -> None:
        if cluster_resolver is not None:
            raise AttributeError(
                "cluster_resolver is not covered by meshwright.tf. Start the script "
                "with "
                "meshwright train --hosts a,b, or use the devices of one process."
            )
        server = _named("AsyncServer")
        super().__init__(server(max_staleness, devices=_names(devices)))

    @property
    def num_replicas_in_sync(self) -> int:
        """One: workers do not wait for each other."""
        return 1
