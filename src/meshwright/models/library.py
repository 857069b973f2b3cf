"""Layers that a library for GPUs computes as a whole, traced whatever is here.

Keras leaves LSTM layers to cuDNN on a single GPU, and attention in 16 bits on GPUs
since Ampere. What such a call keeps for the gradient is not what XLA would keep.
"""

from collections.abc import Callable, Collection
from functools import partial
from math import prod
from typing import Any

from meshwright.devices.strategy_hooks import Library

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

KEPT_PER_STATE = 20
"""Numbers that cuDNN keeps for the gradient, for each number of each LSTM's state."""

_WORKING_PER_STATE, _WORKING_PER_UNIT, _COPIES_OF_WEIGHTS = 22, 40, 4
"""What it works in besides, as eight calls in programs for an H200 have it."""


def library_of(names: Collection[str] = ()) -> Library:
    """A library that computes these layers, of `"lstm"` and `"attention"`."""
    return Library(
        lstm=_lstm if "lstm" in names else None,
        attention=_attention if "attention" in names else None,
    )


def library_workspace(operation: Any, samples: float) -> int:
    """Bytes that a call works in, besides what it reads and makes.

    Arguments:
        operation: One of `LIBRARY_CALLS`, as `flatten` writes it.
        samples: Of its batch.
    """
    facts = operation.params
    if operation.name == "library_attention":
        return 0
    if operation.name == "library_attention_gradient":
        # The gradient of the queries in float32, and a number for each of them.
        queries = facts["length"] * facts["heads"]
        return int(4 * samples * queries * (facts["size"] + 1))
    units, length = facts["units"], facts["length"]
    per_sample = units * (_WORKING_PER_STATE * length + _WORKING_PER_UNIT)
    return int(4 * (samples * per_sample + _COPIES_OF_WEIGHTS * facts["num_weights"]))


def _primitive(name: str, shapes: Callable[..., Any]) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(shapes)
    return made


def _shapes_of_lstm(x: Any, h: Any, c: Any, weights: Any, **facts: int) -> Any:
    samples, length, _ = x.shape
    units = facts["units"]
    kept = ShapedArray((samples, KEPT_PER_STATE * length * units), x.dtype)
    return ShapedArray((samples, length, units), x.dtype), h, c, kept


def _shapes_of_attention(query: Any, key: Any, value: Any, *bias: Any, **_: int) -> Any:
    samples, length, heads, _ = query.shape
    kept = ShapedArray((samples, heads, length), jnp.float32)
    return query, kept


_lstm_call = _primitive("library_lstm", _shapes_of_lstm)
_lstm_gradient = _primitive("library_lstm_gradient", lambda *given, **_: given[:4])
_attention_call = _primitive("library_attention", _shapes_of_attention)
_attention_gradient = _primitive(
    "library_attention_gradient", lambda *given, **_: given[:3]
)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _computed_lstm(x: Any, h: Any, c: Any, weights: Any, units: int) -> Any:
    return _lstm_forward(x, h, c, weights, units)[0]


def _lstm_forward(x: Any, h: Any, c: Any, weights: Any, units: int) -> Any:
    facts = _facts_of_lstm(x, weights, units)
    y, *last, kept = _lstm_call.bind(x, h, c, weights, **facts)
    return (y, *last), (x, h, c, weights, y, kept)


def _lstm_backward(units: int, known: Any, gradients: Any) -> Any:
    x, _, _, weights, *_ = known
    facts = _facts_of_lstm(x, weights, units)
    return tuple(_lstm_gradient.bind(*known, *gradients, **facts))


def _facts_of_lstm(x: Any, weights: Any, units: int) -> dict[str, int]:
    return {"units": units, "length": x.shape[1], "num_weights": prod(weights.shape)}


_computed_lstm.defvjp(_lstm_forward, _lstm_backward)


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
    return _computed_lstm(x, h_0, c_0, weights, units)


def _compute_attention(query: Any, key: Any, value: Any, bias: Any) -> Any:
    return _attention_forward(query, key, value, bias)[0]


def _attention_forward(query: Any, key: Any, value: Any, bias: Any) -> Any:
    given = (query, key, value, *jax.tree.leaves(bias))
    made, kept = _attention_call.bind(*given, **_facts_of_attention(query))
    return made, (given, made, kept, bias)


def _attention_backward(known: Any, gradient: Any) -> Any:
    given, made, kept, bias = known
    facts = _facts_of_attention(given[0])
    found = _attention_gradient.bind(*given, made, kept, gradient, **facts)
    return *found, jax.tree.map(jnp.zeros_like, bias)


def _facts_of_attention(query: Any) -> dict[str, int]:
    _, length, heads, size = query.shape
    return {"length": length, "heads": heads, "size": size}


_computed_attention = jax.custom_vjp(_compute_attention)
_computed_attention.defvjp(_attention_forward, _attention_backward)


def _attention(query: Any, key: Any, value: Any, bias: Any, mask: Any) -> Any:
    """Takes the place of cuDNN's attention, in which masks are added."""
    if mask is not None:
        hidden = jnp.where(mask, 0, -1e9).astype(query.dtype)
        bias = hidden if bias is None else bias + hidden
    return _computed_attention(query, key, value, bias)
