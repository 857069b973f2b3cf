"""Steps that lead to NaN are left out: everything stays as it was before them."""

from typing import Any

import jax.numpy as jnp


def keep_finite(logs: Any, before: Any, after: Any) -> Any:
    """Inside a program: the state after a step, or before it if the step went wrong.

    Arguments:
        logs: What the step returned; its loss is looked at, if it has one.
        before: The state before the step, lists of values; the first has the weights.
        after: The state after it.
    """
    finite = jnp.isfinite(jnp.asarray(logs.get("loss", 0.0))).all()
    for weight in after[0]:
        finite &= jnp.isfinite(weight).all()
    # Of two values, so that a NaN does not come through as it would by arithmetic.
    return tuple(
        [jnp.where(finite, new, old) for new, old in zip(news, olds, strict=True)]
        for news, olds in zip(after, before, strict=True)
    )
