"""What `fit`, `evaluate` and `predict` take as data, and what becomes of it.

Keras knows arrays, PyDataset, generators, and the datasets of tf.data, PyTorch and
Grain. Anything else that can be iterated is taken as an iterable of batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

from meshwright.devices.containers import named_leaves
from meshwright.devices.keras_hooks import is_known_to_keras, make_data_adapter
from meshwright.errors import DataError


def are_arrays(data: Any) -> bool:
    """Whether Keras takes data as arrays in memory, of which it makes batches."""
    return all(
        hasattr(leaf, "__array__") or hasattr(leaf, "tocsr")
        for _, leaf in named_leaves("", data)
    )


def open_source(x: Any, verb: str, others: dict[str, Any]) -> Any:
    """A stream of batches as Keras takes it; refuses one that is empty from the start.

    Arguments:
        x: What the user passed, if it is not arrays.
        verb: The method that it was passed to.
        others: Arguments that are part of the batches if `x` is a stream.
    """
    import keras

    if isinstance(x, GeneratorType):
        return _peek(x, verb)
    if isinstance(x, keras.utils.PyDataset):
        if x.num_batches == 0:
            refuse_empty(x, verb)
        return x
    if is_known_to_keras(x) or not hasattr(x, "__iter__") or _is_plain(x):
        return x
    _check_alone(x, verb, others)
    source = BatchSource(x, verb)
    if source.num_batches == 0:
        refuse_empty(x, verb)
    return make_data_adapter(source.batches, source.num_batches)


@dataclass(frozen=True, slots=True)
class BatchSource:
    """Any iterable of batches; every epoch iterates it anew."""

    iterable: Any
    verb: str

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch, if the iterable knows."""
        try:
            return len(self.iterable)
        except TypeError:
            return None

    def batches(self) -> Iterator[Any]:
        """The batches of one epoch, as tuples."""
        for number, batch in enumerate(self.iterable):
            yield self._as_tuple(batch, number)

    def _as_tuple(self, batch: Any, number: int) -> Any:
        if isinstance(batch, dict) or hasattr(batch, "__array__"):
            return (batch,)
        if isinstance(batch, list | tuple) and 1 <= len(batch) <= 3:
            return tuple(batch)
        parts = f" of {len(batch)}" if hasattr(batch, "__len__") else ""
        raise DataError(
            f"{self.verb} received batch {number} as a {type(batch).__name__}{parts}.",
            "A batch is inputs alone, or a tuple (inputs, targets) or "
            "(inputs, targets, sample_weights).",
            f"Let the {type(self.iterable).__name__} give such tuples of arrays.",
            batch=number,
        )


def refuse_empty(x: Any, verb: str) -> None:
    """Raises because a stream has not a single batch."""
    raise DataError(
        f"{verb} received a {type(x).__name__} without a batch.",
        "Data has at least one batch.",
        "Look at where it comes from. An iterator can be gone through once only: pass "
        "an object whose __iter__ starts anew.",
    )


def _peek(generator: Any, verb: str) -> Any:
    nothing = object()
    first = next(generator, nothing)
    if first is nothing:
        refuse_empty(generator, verb)

    def all_of_it() -> Iterator[Any]:
        yield first
        # Not `yield from`: that would close the user's generator with this one.
        for batch in generator:  # noqa: UP028
            yield batch

    return all_of_it()


def _is_plain(x: Any) -> bool:
    """Containers that Keras searches for arrays, and text."""
    return isinstance(x, list | tuple | dict | set | str | bytes)


def _check_alone(x: Any, verb: str, others: dict[str, Any]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise DataError(
            f"{verb} received a {type(x).__name__} as x, and also {', '.join(given)}.",
            "Batches that are iterated bring their targets and weights along.",
            "Let every batch be (inputs, targets, sample_weights), and pass x alone.",
        )
