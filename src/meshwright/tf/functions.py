"""`tf.function`: marks a function that TensorFlow would compile.

Here it runs as Python: what takes time in it is compiled by JAX operation by operation,
and `fit` compiles whole steps.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_called_before: ContextVar[bool] = ContextVar("meshwright_tf_called", default=False)


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

    has_run = False

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        token = _called_before.set(has_run and not _Switch.eager)
        try:
            return func(*args, **kwargs)
        finally:
            has_run = True
            _called_before.reset(token)

    return call


def refuse_variable_of_later_call() -> None:
    """Raises if a function that was called before makes another variable."""
    if _called_before.get():
        raise ValueError(
            "tf.function only supports singleton tf.Variables created on the first "
            "call. "
            "Make the variable outside of the function, or only if it is not there yet."
        )
