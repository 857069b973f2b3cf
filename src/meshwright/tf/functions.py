"""`tf.function`: marks a function that TensorFlow would compile.

Here it runs as Python: what takes time in it is compiled by JAX operation by operation,
and `fit` compiles whole steps.
"""

import functools
from collections.abc import Callable
from typing import Any


class _Switch:
    eager = False


def run_eagerly(enabled: bool) -> None:
    """Whether functions are left as they are; here they are, in any case."""
    _Switch.eager = bool(enabled)


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    **_: Any,
) -> Any:
    """Marks a function; as a decorator, with or without arguments.

    >>> from meshwright import tf
    >>> @tf.function
    ... def double(x):
    ...     return x * 2
    >>> print(double(tf.constant(2.0)))
    tf.Tensor(4.0, shape=(), dtype=float32)
    """
    if func is None:
        return function

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    return call
