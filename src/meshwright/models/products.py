"""Matrix products that come out as they are wanted."""

from typing import Any

import jax


def product_in_order(
    factors: tuple[Any, Any], product: Any, permutation: tuple[int, ...]
) -> Any:
    """A product that is transposed afterwards, computed from its factors in turn.

    Gradients of kernels are such products. XLA sees that by itself, unless a collective
    is between the two: then the transposed one is added up over the devices, and what
    follows reads it across its rows, which is slow.

    Arguments:
        factors: The factors.
        product: The parameters of the product, by name.
        permutation: That of the transposition.

    Returns:
        The result of both operations; None if the transposition does something else.
    """
    lhs, rhs = factors
    (lhs_sums, rhs_sums), (lhs_batch, rhs_batch) = product["dimension_numbers"]
    num_batch = len(lhs_batch)
    middle = lhs.ndim - len(lhs_sums)
    end = middle + rhs.ndim - len(rhs_sums) - num_batch
    batch, left, right = range(num_batch), range(num_batch, middle), range(middle, end)
    if tuple(permutation) != (*batch, *right, *left):
        return None
    precision = product["precision"]
    return jax.lax.dot_general(
        rhs,
        lhs,
        ((rhs_sums, lhs_sums), (rhs_batch, lhs_batch)),
        precision=precision[::-1] if isinstance(precision, tuple) else precision,
        preferred_element_type=product["preferred_element_type"],
    )
