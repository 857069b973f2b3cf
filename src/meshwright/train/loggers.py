"""Loggers of other packages, each by its own object; none of them is imported here."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from meshwright.errors import ConfigurationError

import numpy as np


class Logger(Protocol):
    """Takes numbers of a step, and the values of weights."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes numbers."""

    def log_weights(self, step: int, weights: Iterator[tuple[str, Any]]) -> None:
        """Takes weights by name, if it wants them."""


def adapt(given: Any) -> Logger:
    """A logger of another package, by what it can do.

    Arguments:
        given: A TensorBoard writer (tensorboardX or PyTorch's `SummaryWriter`), the
            module `mlflow` or a client like it, a run of Weights & Biases, or a
            function of a step and its numbers.

    Raises:
        ConfigurationError: It is none of these.

    >>> logger = adapt(lambda step, numbers: print(step, numbers))
    >>> logger.log(3, {"loss": 0.5})
    3 {'loss': 0.5}
    """
    if callable(getattr(given, "add_scalar", None)):
        return _TensorBoard(given)
    if callable(getattr(given, "log_metrics", None)):
        return _Mlflow(given)
    if callable(getattr(given, "log", None)):
        return _WeightsAndBiases(given)
    if callable(given):
        return _Function(given)
    raise ConfigurationError(
        f"Monitor received {given!r} (a {type(given).__name__}) as a logger.",
        "A logger is a TensorBoard writer, the module mlflow, a run of Weights & "
        "Biases, or a function of a step and its numbers.",
        "Pass, for example, loggers=[tensorboardX.SummaryWriter('runs/x')].",
    )


class _Quiet:
    def __init__(self, given: Any) -> None:
        self._given = given

    def __repr__(self) -> str:
        return f"{type(self._given).__module__}.{type(self._given).__name__}"

    def log_weights(self, step: int, weights: Iterator[tuple[str, Any]]) -> None:
        """Weights are nothing for it."""


class _TensorBoard(_Quiet):
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a scalar for each."""
        for name, number in numbers.items():
            self._given.add_scalar(name, number, step)
        self._given.flush()

    def log_weights(self, step: int, weights: Iterator[tuple[str, Any]]) -> None:
        """Writes a histogram for each."""
        for name, value in weights:
            self._given.add_histogram(name, np.asarray(value), step)
        self._given.flush()


class _Mlflow(_Quiet):
    def __repr__(self) -> str:
        return getattr(self._given, "__name__", super().__repr__())

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs them as metrics of the run that is active."""
        self._given.log_metrics(dict(numbers), step=step)


class _WeightsAndBiases(_Quiet):
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs them in the history of the run."""
        self._given.log(dict(numbers), step=step)


class _Function(_Quiet):
    def __init__(self, given: Callable[[int, dict[str, float]], None]) -> None:
        super().__init__(given)

    def __repr__(self) -> str:
        return f"the function {getattr(self._given, '__name__', self._given)}"

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Calls it."""
        self._given(step, dict(numbers))
