"""Max pooling by comparing slices.

XLA searches the largest number of every window again for the gradient, one window after
the other; comparing slices is faster on CPUs (`benchmarks/operations.py`) and was so on
an H200. Of equal numbers the first one counts, as in XLA.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def max_by_slices(inputs: Any, **params: Any) -> Any:
    """JAX' `reduce_window_max`, for windows side by side; None for others."""
    windows = _windows(params)
    if windows is None:
        return None
    outputs = _crop(inputs, windows)
    for dim, size in reversed(windows):
        outputs = _largest(_parts(outputs, dim, size))
    return outputs


def max_gradient_by_slices(
    gradient: Any, inputs: Any, *, select_prim: Any, **params: Any
) -> Any:
    """JAX' `select_and_scatter_add`, for the largest of windows side by side."""
    windows = _windows(params)
    if windows is None or select_prim.name != "ge":
        return None
    stages = [_crop(inputs, windows)]
    for dim, size in reversed(windows):
        stages.append(_largest(_parts(stages[-1], dim, size)))
    for (dim, size), before, largest in zip(
        windows, reversed(stages[:-1]), reversed(stages[1:]), strict=True
    ):
        gradient = _spread(gradient, _parts(before, dim, size), largest, dim)
    missing = [(0, s - g, 0) for s, g in zip(inputs.shape, gradient.shape, strict=True)]
    return lax.pad(gradient, jnp.zeros((), gradient.dtype), missing)


def _windows(params: dict[str, Any]) -> list[tuple[int, int]] | None:
    """The dims with their window sizes, if windows lie side by side."""
    sizes = params["window_dimensions"]
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    is_padded = any(low or high for low, high in params["padding"])
    if tuple(params["window_strides"]) != tuple(sizes) or is_padded:
        return None
    if any(dilation != 1 for dilation in dilations):
        return None
    return [(dim, size) for dim, size in enumerate(sizes) if size > 1]


def _crop(array: Any, windows: Sequence[tuple[int, int]]) -> Any:
    """Without what is too little for a window."""
    for dim, size in windows:
        whole = array.shape[dim] // size * size
        array = lax.slice_in_dim(array, 0, whole, axis=dim)
    return array


def _parts(array: Any, dim: int, size: int) -> list[Any]:
    """The first of every window, the second, and so on."""
    return [
        lax.slice_in_dim(array, start, array.shape[dim], stride=size, axis=dim)
        for start in range(size)
    ]


def _largest(parts: Sequence[Any]) -> Any:
    largest, *others = parts
    for other in others:
        largest = jnp.maximum(largest, other)
    return largest


def _spread(gradient: Any, parts: Sequence[Any], largest: Any, dim: int) -> Any:
    """Gives the gradient of each window to the first of its largest numbers."""
    zero, taken, shares = jnp.zeros((), gradient.dtype), None, []
    for part in parts:
        is_largest = part == largest
        gets = is_largest if taken is None else is_largest & ~taken
        taken = is_largest if taken is None else taken | is_largest
        shares.append(jnp.where(gets, gradient, zero))
    shape = list(gradient.shape)
    shape[dim] *= len(parts)
    return jnp.stack(shares, axis=dim + 1).reshape(shape)
