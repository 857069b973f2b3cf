"""`meshwright.placement`: where every layer and variable of a model lives."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.devices.runtime import names_of
from meshwright.devices.scope import (
    default_device,
    home_of,
    is_input,
    own_variables,
)
from meshwright.devices.sizes import format_bytes
from meshwright.errors import PlacementError

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRow:
    """A variable of a layer, or a layer that has none."""

    layer: str
    layer_type: str
    variable: str | None
    """Name of the variable; None for a layer without any."""
    dtype: str | None
    shape: tuple[int, ...] | None
    shard_shape: tuple[int, ...] | None
    """The shape of the piece that each device holds."""
    devices: tuple[str, ...]
    bytes: int
    """Bytes on each of the devices."""


class PlacementTable(tuple[PlacementRow, ...]):
    """The rows of `meshwright.placement`; it prints as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, show_edge=False)
        for heading in ("layer", "variable", "shape", "shard"):
            table.add_column(heading, overflow="fold")
        table.add_column("bytes", justify="right")
        table.add_column("devices", overflow="fold")
        previous = None
        for row in self:
            table.add_row(*_cells(row, is_first=row.layer != previous))
            previous = row.layer
        text = io.StringIO()
        terminal = Console()
        width = max(terminal.width, 80) if terminal.is_terminal else 1000
        Console(file=text, width=width, color_system=None).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*lines, self._totals()])

    __str__ = __repr__

    def _totals(self) -> str:
        per_device: dict[str, int] = {}
        for row in self:
            for name in row.devices:
                per_device[name] = per_device.get(name, 0) + row.bytes
        sums = ", ".join(
            f"{n} {format_bytes(b)}" for n, b in sorted(per_device.items())
        )
        return f"per device: {sums or 'nothing yet'}"


def placement(model: Any) -> PlacementTable:
    """Lists every layer and variable of a model with its devices and shards.

    Arguments:
        model: A Keras model or layer. Before it is built it has no variables to list.

    >>> import keras
    >>> import meshwright as mw
    >>> with mw.device("CPU:0"):
    ...     layer = keras.layers.Dense(2, name="dense")
    >>> layer.build((None, 4))
    >>> print(mw.placement(layer))
    layer          variable  shape   shard   bytes  devices
    dense (Dense)  kernel    (4, 2)  (4, 2)   32 B  /device:CPU:0
                   bias      (2,)    (2,)      8 B  /device:CPU:0
    per device: /device:CPU:0 40 B
    """
    if not hasattr(model, "_flatten_layers"):
        raise PlacementError(
            f"placement received {model!r} (a {type(model).__name__}).",
            "It lists the layers of a Keras model or layer.",
            "Pass the model itself.",
        )
    return PlacementTable(row for rows in rows_by_layer(model) for row in rows)


def rows_by_layer(
    model: Any, values: Mapping[int, jax.Array] | None = None
) -> list[list[PlacementRow]]:
    """The rows of each layer that computes something itself.

    Arguments:
        model: A Keras model or layer.
        values: Arrays of variables by `id`, for a step in which they are kept apart.
    """
    found = []
    for layer in model._flatten_layers():
        variables = own_variables(layer)
        is_leaf = not layer._flatten_layers(include_self=False)
        if variables or (is_leaf and not is_input(layer)):
            path = layer.path or layer.name
            found.append(list(_layer_rows(layer, path, variables, values or {})))
    return found


def _layer_rows(
    layer: Any, path: str, variables: list[Any], values: Mapping[int, jax.Array]
) -> Iterator[PlacementRow]:
    layer_type = type(layer).__name__
    for variable in variables:
        known = values.get(id(variable))
        # Asking Keras for it would bring a variable of another stage here.
        held = variable._value if known is None else known
        value = variable.value if held is None else held
        shard = value.sharding.shard_shape(value.shape)
        yield PlacementRow(
            layer=path,
            layer_type=layer_type,
            variable=variable.name,
            dtype=str(value.dtype),
            shape=tuple(value.shape),
            shard_shape=shard,
            devices=names_of(value.sharding),
            bytes=prod(shard) * np.dtype(value.dtype).itemsize,
        )
    if not variables:
        yield PlacementRow(
            layer=path,
            layer_type=layer_type,
            variable=None,
            dtype=None,
            shape=None,
            shard_shape=None,
            devices=(home_of(layer) or default_device(),),
            bytes=0,
        )


def _cells(row: PlacementRow, is_first: bool) -> list[str]:
    return [
        f"{row.layer} ({row.layer_type})" if is_first else "",
        row.variable or "-",
        "-" if row.shape is None else str(row.shape),
        "-" if row.shard_shape is None else str(row.shard_shape),
        format_bytes(row.bytes),
        ", ".join(row.devices),
    ]
