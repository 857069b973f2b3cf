"""Explains errors of Python code that wants to know values while it is traced."""

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.devices.start import user_line_of
from meshwright.errors import StrategyError

import jax

_KINDS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


@contextmanager
def explaining_tracing(model: Any) -> Iterator[None]:
    """Says what is wrong with a model whose Python code depends on data."""
    try:
        yield
    except Exception as error:
        cause = _asks_for_values(error)
        if cause is None:
            raise
        file, line = user_line_of(cause) or ("<unknown>", 0)
        raise StrategyError(
            f"{model.name!r} asks for the values of a tensor while it is traced, in "
            f"{file}, line {line}: {linecache.getline(file, line).strip()!r}.",
            "A step is traced once and compiled for all batches, so if, while, int() "
            "and NumPy cannot depend on data.",
            "Let the data choose by keras.ops.where, keras.ops.cond or "
            "keras.ops.while_loop.",
        ) from error


def _asks_for_values(error: BaseException | None) -> BaseException | None:
    """The error of JAX's behind one of Keras', if it is that there are no values."""
    while error is not None and not isinstance(error, _KINDS):
        error = error.__cause__ or error.__context__
    return error
