"""The placement log: what runs where, one line each, to `meshwright.placement`."""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from meshwright.devices import eager_trace
from meshwright.devices.operation_names import operation_name
from meshwright.devices.runtime import names_of
from meshwright.devices.table import rows_by_layer

import jax

logger = logging.getLogger("meshwright.placement")


class _Log:
    on = False
    number = 0
    level = logging.NOTSET
    name_device: Callable[[str], str] = str
    num_steps = 0
    """Compiled steps that are being dispatched."""
    counting = threading.Lock()


class _LastResort(logging.StreamHandler[TextIO]):
    """Prints to standard error as long as nobody has set up logging."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        others = [h for h in logger.handlers if h is not self]
        if not others and not logging.getLogger().handlers:
            self.setStream(sys.stderr)
            super().emit(record)


_last_resort = _LastResort()


def switch_log(enabled: bool) -> None:
    """Starts or stops writing lines; to do what is done already is fine."""
    if enabled == _Log.on:
        return
    if enabled:
        eager_trace.listen(_log_operation)
        logger.addHandler(_last_resort)
        _Log.level = logger.level
        logger.setLevel(logging.INFO)
        _Log.number += 1
    else:
        eager_trace.stop()
        logger.removeHandler(_last_resort)
        logger.setLevel(_Log.level)
    _Log.on = enabled


def name_devices_by(naming: Callable[[str], str]) -> None:
    """Chooses how lines of the log call a device; `str` leaves its name as it is."""
    _Log.name_device = staticmethod(naming)


def log_number() -> int:
    """Which switching-on of the log this is; 0 while it is off."""
    return _Log.number if _Log.on else 0


@contextlib.contextmanager
def told_by_layer() -> Iterator[None]:
    """While a compiled step is dispatched: `log_step` tells of it, not its programs.

    It holds for all threads, since some steps are dispatched by several.
    """
    with _Log.counting:
        _Log.num_steps += 1
    try:
        yield
    finally:
        with _Log.counting:
            _Log.num_steps -= 1


def log_step(
    model: Any, step: str, variables: Any, values: Any, device: str | None = None
) -> None:
    """Writes a line for every layer of a step that is about to run.

    Arguments:
        model: The Keras model.
        step: The step's name.
        variables: Lists of the model's variables, as in the step's state.
        values: The arrays of these variables, which `fit` keeps apart from them.
        device: The device that the step takes them to, if not where they are.
    """
    placed = {
        id(variable): value
        for group, arrays in zip(variables, values, strict=True)
        for variable, value in zip(group, arrays, strict=True)
    }
    for rows in rows_by_layer(model, placed):
        shards = ", ".join(
            f"{row.variable} {row.shape} in shards {row.shard_shape}"
            for row in rows
            if row.variable
        )
        names = [device] if device else [d for r in rows for d in r.devices]
        where = ", ".join(_Log.name_device(name) for name in dict.fromkeys(names))
        logger.info(
            "Running %s: layer %s (%s) in device %s%s",
            step,
            rows[0].layer,
            rows[0].layer_type,
            where,
            f": {shards}" if shards else "",
        )


def _log_operation(name: str, result: Any) -> None:
    if _Log.num_steps:
        return
    if isinstance(result, jax.Array) and not isinstance(result, jax.core.Tracer):
        where = ", ".join(_Log.name_device(n) for n in names_of(result.sharding))
        logger.info(
            "Executing op %s in device %s", operation_name(name, result.ndim), where
        )
