"""Trials that differ in values only, trained as one program: `mw.packed_trials`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.data.checks import Parts
from meshwright.errors import PackedTrialsError
from meshwright.strategies.strategy import DeviceNames, choose_devices
from meshwright.trials.packed_data import Orders, PackedData, take_data
from meshwright.trials.packed_members import make_members
from meshwright.trials.packed_places import Places
from meshwright.trials.packed_programs import PackedPrograms
from meshwright.trials.packed_stopping import EarlyStops, refuse_other_callbacks

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackedTrial:
    """What came of one config."""

    config: Any
    """The config, as it was given."""
    history: dict[str, list[float]]
    """What Keras' `History` would hold: for each name a value per epoch."""
    weights: list["np.ndarray[Any, Any]"]
    """What the model's `get_weights` would return after its `fit`."""


def packed_trials(
    make_model: Callable[[Any], Any],
    configs: Sequence[Any],
    x: Any,
    y: Any = None,
    epochs: int = 1,
    batch_size: int = 32,
    *,
    sample_weight: Any = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    shuffle: bool = True,
    callbacks: Sequence[Any] = (),
    devices: DeviceNames = None,
) -> list[PackedTrial]:
    """Trains models that differ in values only, all at once, as one program.

    Each ends as `make_model(config).fit(x, y, ...)` would by itself, to float
    tolerance: same first weights, same order of samples, same dropout. What may differ
    is what a config does to numbers in the step and to first values: learning rate,
    momentum, weight decay, dropout rate, label smoothing, seeds.

    Arguments:
        make_model: Takes a config; returns a compiled Keras model.
        configs: The configs; anything that `make_model` takes.
        x: Inputs, arrays in memory.
        y: Targets.
        epochs: Times to go through the data.
        batch_size: Samples in a batch; the last one may have fewer.
        sample_weight: Weights of samples.
        validation_data: `(x, y)` or `(x, y, sample_weight)`, evaluated on after each
            epoch.
        validation_split: Share of the samples, the last ones, to do so instead.
        shuffle: Whether samples are in a new order in each epoch.
        callbacks: `keras.callbacks.EarlyStopping`, which each member follows for
            itself; other callbacks are refused.
        devices: The devices over which members are spread; all of the best kind if
            left out.

    Returns:
        One result for each config, in their order: `config`, `history`, `weights`.

    Raises:
        PackedTrialsError: Nothing to train, or configs that differ in more than values.
        MemoryLimitError: More members than fit.
        DataError: Data that the model cannot work on.

    >>> import keras, meshwright as mw, numpy as np
    >>> def make_model(config):
    ...     keras.utils.set_random_seed(config["seed"])
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile(keras.optimizers.SGD(config["rate"]), loss="mse")
    ...     return model
    >>> configs = [{"rate": rate, "seed": 1} for rate in (0.0, 0.1, 0.2)]
    >>> x = np.ones((8, 2), "float32")
    >>> trials = mw.packed_trials(make_model, configs, x, x.sum(1), batch_size=4)
    >>> [trial.config["rate"] for trial in trials]
    [0.0, 0.1, 0.2]
    >>> trials[1].history["loss"] < trials[0].history["loss"]
    True
    """
    _check_arguments(configs, epochs, batch_size, shuffle)
    refuse_other_callbacks(callbacks)
    names = choose_devices(devices)
    parts = Parts(x, y, sample_weight)
    data = take_data(parts, batch_size, shuffle, validation_data, validation_split)
    training = PackedTraining(make_model, configs, data, names, callbacks)
    training.run(epochs)
    return [
        PackedTrial(config=config, history=history, weights=weights)
        for config, history, weights in zip(
            configs, training.histories, training.weights, strict=True
        )
    ]


def _check_arguments(
    configs: Sequence[Any], epochs: int, batch_size: int, shuffle: Any
) -> None:
    if process_count() > 1:
        raise PackedTrialsError(
            f"packed_trials was called in a run of {process_count()} processes.",
            "Members are spread over the devices of one process.",
            "Call it in a process of its own, or give each process a part of the "
            "configs without a launcher.",
        )
    if not isinstance(configs, Sequence) or isinstance(configs, str) or not configs:
        raise PackedTrialsError(
            f"packed_trials received configs={configs!r}.",
            "It takes a list with at least one config, each of which make_model turns "
            "into a model.",
            "Pass a list such as [{'learning_rate': 0.1}, {'learning_rate': 0.01}].",
        )
    numbers: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise PackedTrialsError(
                f"packed_trials received {name}={value!r}.",
                f"{name} is a whole number of at least 1.",
                f"Pass {name}={32 if name == 'batch_size' else 1}, for example.",
            )
    if not isinstance(shuffle, bool):
        raise PackedTrialsError(
            f"packed_trials received shuffle={shuffle!r}.",
            "Samples are in a new order in each epoch, or in their own.",
            "Pass shuffle=True or shuffle=False.",
        )


class PackedTraining:
    """All members of a packed training.

    Arguments:
        make_model: Makes the model of a config.
        configs: The configs.
        data: What all are trained on.
        names: The devices over which they are spread.
        callbacks: What each member follows a copy of.

    Attributes:
        histories: What each member logged.
        weights: Its weights when it was done.
    """

    def __init__(
        self,
        make_model: Callable[[Any], Any],
        configs: Sequence[Any],
        data: PackedData,
        names: Sequence[str],
        callbacks: Sequence[Any] = (),
    ) -> None:
        members = make_members(make_model, configs, data)
        number = len(configs)
        self._data = data
        self._stops = EarlyStops(callbacks, members.model, number)
        self._places = Places(names, members)
        self._orders = Orders(data.train, members.random_states)
        self._programs = PackedPrograms(members.steps, self._places)
        self._weight_places = members.weight_places
        self._running: set[int] = set()
        self.histories: list[dict[str, list[float]]] = [{} for _ in range(number)]
        self.weights: list[list[Any]] = [[] for _ in range(number)]

    def run(self, epochs: int) -> None:
        """Trains until all members are done; called again, it goes on from there."""
        self._running = set(self._places.members)
        order = self._draw()
        for epoch in range(epochs):
            logs = self._programs.train(self._data.train, order)
            if self._data.validation is not None:
                validation = self._programs.validate(self._data.validation)
            else:
                validation = {}
            if epoch + 1 < epochs:
                # The devices compute meanwhile.
                order = self._draw()
            found = _flat(logs) | {f"val_{k}": v for k, v in _flat(validation).items()}
            before = self._places.members
            self._end_epoch(epoch, found, is_last=epoch + 1 == epochs)
            if not self._running:
                return
            if self._places.members is not before and order.ndim > 1:
                rows = [before.index(member) for member in self._places.members]
                order = self._places.put_order(np.asarray(order)[rows])

    def _draw(self) -> jax.Array:
        return self._places.put_order(self._orders.draw(self._places.members))

    def _end_epoch(self, epoch: int, logs: Mapping[str, Any], is_last: bool) -> None:
        values = {name: np.asarray(logs[name]) for name in sorted(logs)}
        snapshot = _Snapshot(self._places, self._weight_places)
        done = []
        for place, member in enumerate(self._places.members):
            if member not in self._running:
                continue
            own = {name: _as_shown(value[place]) for name, value in values.items()}
            for name, value in own.items():
                self.histories[member].setdefault(name, []).append(value)

            def get_weights(place: int = place) -> list[Any]:
                return snapshot.weights(place)

            stops = self._stops.end_epoch(member, epoch, own, get_weights)
            if stops or is_last:
                self.weights[member] = self._stops.end(member, get_weights)
                done.append(member)
        self._running -= set(done)
        if self._running and done:
            gone = set(self._places.members) - self._running
            self._places.leave(sorted(gone))


class _Snapshot:
    """The weights of all members after an epoch; brought to the host if asked for."""

    def __init__(self, places: Places, weight_places: Sequence[tuple[int, int]]):
        self._values = [places.state[group][place] for group, place in weight_places]
        self._on_host: list[Any] | None = None

    def weights(self, place: int) -> list[Any]:
        """Those of the member in a place."""
        if self._on_host is None:
            self._on_host = [np.asarray(value) for value in self._values]
        return [value[place].copy() for value in self._on_host]


def _as_shown(value: Any) -> Any:
    """A value as Keras' callbacks see it; metrics of several numbers stay arrays."""
    return float(value) if np.ndim(value) == 0 else value


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Logs without dicts inside, as Keras shows them."""
    found: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        found |= _flat(value) if isinstance(value, dict) else {name: value}
    return found
