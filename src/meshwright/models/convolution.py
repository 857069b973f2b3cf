"""Convolutions in the form that is fastest where they run.

XLA's CPU compiler has fast code for a convolution whose dims are in the order (samples,
places, channels). JAX leaves the gradients of kernels in another one, for which there
is no such code inside of a loop. Where a kernel is larger than what it moves over, as
in gradients of transposed convolutions, XLA would let the two change places and read
one of them backwards, for which it has no fast code at all.
GPUs' libraries know such gradients only with the two in each other's place, too.
Kernels on a single channel are faster as a matrix product, on CPUs and on GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

YNNPACK_WITHOUT_CONVOLUTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": (
        "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    )
}
"""XLA's CPU compiler would hand convolutions without padding to YNNPACK, which takes
several times as long as its own code in JAX 0.10 (`benchmarks/operations.py`)."""

MOST_PLACES = 25
"""Places of a kernel, or of a gradient of one, that are written out as a matrix."""


def convolve_in_order(inputs: Any, kernel: Any, **params: Any) -> Any:
    """A convolution with its dims in order, or as a matrix product; for CPUs.

    Arguments:
        inputs: The first argument of JAX' operation.
        kernel: The second.
        params: Its parameters.

    Returns:
        The outputs, or None if it is best left as it is.
    """
    found = _Ordered.of(inputs, kernel, params)
    if found is None:
        return None
    outputs = found.gradient_as_matrix_product()
    if outputs is None:
        turned = found.with_places_changed()
        outputs = found.as_convolution() if turned is None else turned
    return found.restore(outputs)


def convolve_as_known(inputs: Any, kernel: Any, **params: Any) -> Any:
    """A convolution in a form that libraries for GPUs have fast code for.

    Arguments and returned value are those of `convolve_in_order`.
    """
    found = _Ordered.of(inputs, kernel, params)
    if found is None:
        return None
    outputs = found.as_matrix_product()
    if outputs is None and prod(params["lhs_dilation"]) > 1:
        outputs = found.with_places_changed()
    return None if outputs is None else found.restore(outputs)


@dataclass(frozen=True)
class _Ordered:
    """A convolution of (samples, places, channels) with (places, inputs, outputs)."""

    inputs: Any
    kernel: Any
    params: dict[str, Any]
    kernel_order: Sequence[int]
    """Where the dims of the kernel were."""
    output_order: Sequence[int]

    @classmethod
    def of(cls, inputs: Any, kernel: Any, params: dict[str, Any]) -> "_Ordered | None":
        """That of some arguments; None if it has groups."""
        params = dict(params)
        lhs, rhs, out = params.pop("dimension_numbers")
        if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
            return None
        inputs = inputs.transpose(lhs[0], *lhs[2:], lhs[1])
        order = (*rhs[2:], rhs[1], rhs[0])
        kernel = kernel.transpose(order)
        return cls(inputs, kernel, params, order, (out[0], *out[2:], out[1]))

    def restore(self, outputs: Any) -> Any:
        """Outputs with their dims where they were asked for."""
        return outputs.transpose(_inverse(self.output_order))

    def as_convolution(self) -> Any:
        """The outputs, by XLA's code."""
        last = self.inputs.ndim - 1
        places = tuple(range(1, last))
        samples = (0, last, *places)
        kernel = (last, last - 1, *(place - 1 for place in places))
        order = lax.ConvDimensionNumbers(samples, kernel, samples)
        return lax.conv_general_dilated(
            self.inputs, self.kernel, dimension_numbers=order, **self.params
        )

    def with_places_changed(self) -> Any:
        """The outputs, with the inputs as a kernel that moves over the larger kernel.

        None if the inputs are the larger ones. The places of the outputs are found from
        the last to the first.
        """
        *taps, _, _ = self.kernel.shape
        steps, spread = self._num_steps(), self.params["lhs_dilation"]
        own = self.inputs.shape[1:-1]
        if prod(taps) <= prod(own) or prod(self.params["window_strides"]) > 1:
            return None
        dilations = self.params["rhs_dilation"]
        padding = []
        for number, (low, _) in enumerate(self.params["padding"]):
            reach = (own[number] - 1) * spread[number] + 1
            size = (taps[number] - 1) * dilations[number] + 1
            before = steps[number] - 1 - low
            padding.append((before, steps[number] - 1 + reach - size - before))
        params = {
            **self.params,
            "padding": tuple(padding),
            "lhs_dilation": dilations,
            "rhs_dilation": spread,
        }
        last = self.inputs.ndim - 1
        places = range(1, last)
        moved = self.kernel.transpose(last, *range(last - 1), last - 1)
        over = self.inputs.transpose(*places, last, 0)
        turned = _Ordered(moved, over, params, (), ()).as_convolution()
        return lax.rev(turned, tuple(places)).transpose(last, *places, 0)

    def as_matrix_product(self) -> Any:
        """The outputs by a matrix product, or None if that is not faster."""
        *taps, features, _ = self.kernel.shape
        if features == 1 and prod(taps) <= MOST_PLACES:
            return self._of_few_taps(taps, self._num_steps())
        return self.gradient_as_matrix_product()

    def gradient_as_matrix_product(self) -> Any:
        """The same, if it is the gradient of a kernel on a single channel."""
        steps = self._num_steps()
        if self.inputs.shape[0] == 1 and prod(steps) <= MOST_PLACES:
            return self._of_few_steps(list(self.kernel.shape[:-2]), steps)
        return None

    def _of_few_taps(self, taps: list[int], steps: list[int]) -> Any:
        """Each tap of the kernel sees its part of the inputs, on a single channel."""
        dilations, strides = self.params["rhs_dilation"], self.params["window_strides"]
        places = range(1, self.inputs.ndim - 1)
        starts, sizes = _Grid(taps, dilations), _Grid(steps, strides)
        views = _views(self._padded(), places, starts, sizes)
        seen = jnp.concatenate(list(views), axis=-1)
        kernel = self.kernel.reshape(prod(taps), -1)
        return self._product(seen, kernel, [seen.ndim - 1], [0])

    def _of_few_steps(self, taps: list[int], steps: list[int]) -> Any:
        """For each place of the outputs, of a single sample, all that the kernel sees.

        This is what the gradient of a kernel on a single channel looks like. Inputs are
        seen in the order that the dims of the kernel had, so that it is not copied.
        """
        dilations, strides = self.params["rhs_dilation"], self.params["window_strides"]
        order = sorted(range(len(taps) + 1), key=self.kernel_order.__getitem__)
        inputs = self._padded().transpose(0, *(1 + dim for dim in order))
        places = [1 + order.index(dim) for dim in range(len(taps))]
        starts, sizes = _Grid(steps, strides), _Grid(taps, dilations)
        seen = jnp.concatenate(list(_views(inputs, places, starts, sizes)))
        outputs = self._product(seen, self.kernel, range(1, seen.ndim), order)
        return outputs.reshape(1, *steps, -1)

    def _product(
        self, seen: Any, kernel: Any, dims: Sequence[int], kernel_dims: Sequence[int]
    ) -> Any:
        contracted = (tuple(dims), tuple(kernel_dims))
        kind = {k: self.params[k] for k in ("precision", "preferred_element_type")}
        return lax.dot_general(seen, kernel, (contracted, ((), ())), **kind)

    def _padded(self) -> Any:
        """The inputs with the zeros around and between them."""
        padding, spread = self.params["padding"], self.params["lhs_dilation"]
        zeros = [(*ends, d - 1) for ends, d in zip(padding, spread, strict=True)]
        zero = jnp.zeros((), self.inputs.dtype)
        return lax.pad(self.inputs, zero, [(0, 0, 0), *zeros, (0, 0, 0)])

    def _num_steps(self) -> list[int]:
        """Places of the outputs."""
        taps, dilations = self.kernel.shape[:-2], self.params["rhs_dilation"]
        reaches = [(n - 1) * d + 1 for n, d in zip(taps, dilations, strict=True)]
        sizes = self._padded().shape[1:-1]
        strides = self.params["window_strides"]
        return [
            (size - reach) // stride + 1
            for size, reach, stride in zip(sizes, reaches, strides, strict=True)
        ]


class _Grid(NamedTuple):
    """Points along some dims, from 0 on."""

    counts: Sequence[int]
    strides: Sequence[int]


def _views(
    array: Any, dims: Sequence[int], starts: _Grid, points: _Grid
) -> Iterator[Any]:
    """Parts of an array: what lies on some points, moved to each of the starts."""
    for place in product(*map(range, starts.counts)):
        view = array
        for dim, index, step, count, stride in zip(
            dims, place, starts.strides, points.counts, points.strides, strict=True
        ):
            end = index * step + (count - 1) * stride + 1
            view = lax.slice_in_dim(view, index * step, end, stride, axis=dim)
        yield view


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
