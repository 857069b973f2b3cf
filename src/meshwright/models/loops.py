"""Loops in traced programs, as versions of JAX write them."""

from collections.abc import Mapping
from typing import Any


def counts_of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many inputs of a `scan` stay as they are, and how many it changes.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.cumsum(x) + jax.lax.scan(
    ...     lambda sum, each: (sum + each, sum), 0.0, x)[1])(jax.numpy.ones(3))
    >>> [counts_of_scan(e.params) for e in jaxpr.eqns if e.primitive.name == "scan"]
    [(0, 1)]
    """
    if "num_carry" in params:  # until JAX 0.10
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)
