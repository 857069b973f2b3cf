"""How recurrent layers are traced, whatever machine they are traced on.

Keras leaves LSTM layers to cuDNN where there is a single GPU. What that keeps for the
gradient is no array of the program's, but memory of the library's.
"""

from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any

from meshwright.devices.strategy_hooks import computing_recurrence

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

LIBRARY_CALLS = {"library_lstm", "library_lstm_gradient"}
"""The names of operations that stand for calls of the library."""

KEPT_PER_STATE = 20
"""Numbers that cuDNN keeps for the gradient, for each number of each step's state."""

_WORKING_PER_STATE, _WORKING_PER_UNIT, _COPIES_OF_WEIGHTS = 22, 40, 4
"""What it works in besides, as eight calls in programs for an H200 have it."""


def as_loops() -> AbstractContextManager[None]:
    """Traces recurrent layers as loops of steps, also where a library computes them."""
    return computing_recurrence(None)


def as_library_calls() -> AbstractContextManager[None]:
    """Traces LSTM layers as calls of cuDNN, which need not be here."""
    return computing_recurrence(_lstm)


def library_workspace(operation: Any, samples: float) -> int:
    """Bytes that a call works in, besides what it reads and makes.

    Arguments:
        operation: One of `LIBRARY_CALLS`, as `flatten` writes it.
        samples: Of its batch.
    """
    units, length = operation.params["units"], operation.params["length"]
    per_sample = units * (_WORKING_PER_STATE * length + _WORKING_PER_UNIT)
    weights = _COPIES_OF_WEIGHTS * operation.params["num_weights"]
    return int(4 * (samples * per_sample + weights))


_call = Primitive("library_lstm")
_call.multiple_results = True

_gradient = Primitive("library_lstm_gradient")
_gradient.multiple_results = True


def _shapes_of_call(x: Any, h: Any, c: Any, weights: Any, **facts: int) -> Any:
    samples, length, _ = x.shape
    units = facts["units"]
    kept = ShapedArray((samples, KEPT_PER_STATE * length * units), x.dtype)
    return ShapedArray((samples, length, units), x.dtype), h, c, kept


def _shapes_of_gradient(*given: Any, **facts: int) -> Any:
    return given[:4]


_call.def_abstract_eval(_shapes_of_call)
_gradient.def_abstract_eval(_shapes_of_gradient)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _computed(x: Any, h: Any, c: Any, weights: Any, units: int) -> Any:
    return _forward(x, h, c, weights, units)[0]


def _forward(x: Any, h: Any, c: Any, weights: Any, units: int) -> Any:
    y, *last, kept = _call.bind(x, h, c, weights, **_facts(x, weights, units))
    return (y, *last), (x, h, c, weights, y, kept)


def _backward(units: int, known: Any, gradients: Any) -> Any:
    x, _, _, weights, *_ = known
    return tuple(_gradient.bind(*known, *gradients, **_facts(x, weights, units)))


def _facts(x: Any, weights: Any, units: int) -> dict[str, int]:
    return {"units": units, "length": x.shape[1], "num_weights": prod(weights.shape)}


_computed.defvjp(_forward, _backward)


def _lstm(
    x: Any,
    h_0: Any,
    c_0: Any,
    weights: Any,
    seq_lengths: Any,
    *,
    hidden_size: int,
    bidirectional: bool,
    **others: Any,
) -> Any:
    """Takes the place of `jax.experimental.rnn.lstm`."""
    units = hidden_size * (2 if bidirectional else 1)
    return _computed(x, h_0, c_0, weights, units)
