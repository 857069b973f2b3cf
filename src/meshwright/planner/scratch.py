"""Memory that libraries for GPUs need besides what they read and make.

It is given to them while they compute, so it counts for small models above all.
"""

from collections import Counter
from math import prod
from typing import Any

from meshwright.models.kernels import Kernel, Kernels, Product
from meshwright.models.library import library_workspace
from meshwright.models.operations import LIBRARY_CALLS, Operation, Size

LIBRARY_WORKSPACE = 32 * 2**20
"""Bytes that XLA gives to cuBLAS for a matrix product, on Hopper chips."""

LIBRARY_FLOPS = 5 * 10**8
"""Products from this size on are often computed by cuBLAS; trials decide it.

Of 745 products in programs for an H200 it had a third of the 202 that are as large, so
mostly one of those that count, and 6 % of smaller ones.
"""

KERNEL_WORKSPACE = 2 * 2**20
"""Bytes that cuDNN takes for the gradient of a convolution's kernel, typically."""

TILE_BYTES = 64 * 64 * 4
"""What one of a GPU's processors computes of a product at a time."""

NUM_PROCESSORS = 132
"""Of a Hopper chip; where a product has fewer tiles, its sums are taken in parts."""

MOST_PARTS, SHORTEST_SUM = 16, 64
"""Parts of a sum at the most; numbers that are summed in each part at the least."""


class Scratch:
    """What the kernels of a program need while they run.

    Arguments:
        kernels: The kernels, in order.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._products = [
            (number, product, kernel.makes[0], list(kernel.reads))
            for number, kernel in enumerate(kernels.kernels)
            for product in kernel.products
        ]
        self._library_calls = [
            (number, kernels.flat.operations[member])
            for number, kernel in enumerate(kernels.kernels)
            for member in kernel.members
            if kernels.flat.operations[member].name in LIBRARY_CALLS
        ]
        self._moving = [
            (number, kernel.reads)
            for number, kernel in enumerate(kernels.kernels)
            if _moves_what_it_reads(kernels, kernel)
        ]

    def needed(self, samples: float, sizes: Any, ways: Any) -> Counter[int]:
        """The bytes, by the numbers of kernels.

        Arguments:
            samples: Of the batch on a device.
            sizes: The bytes of buffers.
            ways: Between how many devices each buffer is divided by `tensor`.
        """
        found: Counter[int] = Counter()
        for number, product, made, read in self._products:
            if product.is_convolution:
                found[number] += KERNEL_WORKSPACE * (product.form == "kernel")
                continue
            # What is divided along the dim that is summed over is made whole.
            parts = max(ways[made], ways[read].max(initial=1))
            if product.flops(samples) >= LIBRARY_FLOPS * parts:
                found[number] += LIBRARY_WORKSPACE
            found[number] += _parts_of_sums(product, samples, sizes[made])
        for number, operation in self._library_calls:
            found[number] += library_workspace(operation, samples)
            if operation.name.startswith("library_lstm"):
                found[number] += LIBRARY_WORKSPACE
        for number, reads in self._moving:
            # They are moved for the library, which moves them once more.
            found[number] += 2 * int(sum(sizes[buffer] for buffer in reads))
        return found


def _parts_of_sums(product: Product, samples: float, size: float) -> int:
    """Bytes of the parts of sums, where a product is cut along what it sums over."""
    parts, inner = 1, product.inner.at(samples)
    while (
        parts < MOST_PARTS
        and parts * size < NUM_PROCESSORS * TILE_BYTES
        and inner >= 2 * parts * SHORTEST_SUM
    ):
        parts *= 2
    return int(parts * size) if parts > 1 else 0


def _moves_what_it_reads(kernels: Kernels, kernel: Kernel) -> bool:
    operations = [kernels.flat.operations[number] for number in kernel.members]
    return any(_is_gradient_of_spread(operation) for operation in operations)


def _is_gradient_of_spread(operation: Operation) -> bool:
    """Whether it is the gradient of the kernel of a transposed convolution.

    Libraries have none of those, so samples are put where they expect channels.
    """
    if operation.name != "conv_general_dilated":
        return False
    channels = operation.params["dimension_numbers"].lhs_spec[1]
    sums_samples = Size.of(operation.shapes[0][channels]).power > 0
    return sums_samples and prod(operation.params["lhs_dilation"]) > 1
