"""Bad data is refused before it is used, with the index of the first bad entry.

What stock Keras would take is taken too: where a shape is not the declared one, Keras
itself is asked. The rest cannot work, or gives wrong numbers without a word.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.data.demands import Demands, LabelDemand, output_shapes
from meshwright.devices.containers import named_leaves
from meshwright.errors import DataError

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 1 << 20
"""Entries that are looked at together when a bad one is searched."""

Index = tuple[int, ...]


class Parts(NamedTuple):
    """What a model is given: inputs, targets and the weights of samples."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """All arrays with their names."""
        for name, part in zip(self._fields, self, strict=True):
            yield from named_leaves(name, part)


@dataclass(frozen=True, slots=True)
class Where:
    """Where data came in; the beginning of a sentence.

    >>> print(Where("fit"), "|", Where("fit", batch=3))
    fit received | fit received batch 3 with
    """

    verb: str
    part: str = ""
    """The argument that it came in, if not its own one."""
    batch: int | None = None

    def __str__(self) -> str:
        what = self.part if self.batch is None else f"batch {self.batch}"
        return f"{self.verb} received" + (f" {what} with" if what else "")


def check_arrays(
    parts: Parts, demands: Demands, model: Any, where: Where, check_nan: bool
) -> None:
    """Refuses arrays in memory that a model cannot work on."""
    leaves = list(parts.leaves())
    equal_length(leaves, where)
    _check_numbers(leaves, where)
    _check_number_of_inputs(parts.x, demands, where)
    if has_unusual_shapes(parts, demands):
        settle_shapes(parts, demands, model, where)
    check_values(in_memory(parts), demands, where, check_nan)


def in_memory(parts: Parts) -> Parts:
    """The parts without those that are read from disk as they are used."""
    return Parts(*(None if is_on_disk(part) else part for part in parts))


def check_batch(parts: Parts, demands: Demands, where: Where, check_nan: bool) -> bool:
    """Refuses a batch; returns whether its shapes are left to `settle_shapes`."""
    leaves = list(parts.leaves())
    _check_not_empty(leaves, where)
    _check_numbers(leaves, where)
    _check_number_of_inputs(parts.x, demands, where)
    check_values(parts, demands, where, check_nan)
    return has_unusual_shapes(parts, demands)


def check_values(parts: Parts, demands: Demands, where: Where, check_nan: bool) -> None:
    """Refuses NaN and infinite inputs, and labels that no class has."""
    if check_nan:
        for name, leaf in named_leaves("x", parts.x):
            _check_finite(name, leaf, where)
    for demand in demands.labels:
        _check_labels(parts, demand, where)


def equal_length(leaves: Iterable[tuple[str, Any]], where: Where) -> int:
    """The number of samples that all arrays have."""
    leaves = list(leaves)
    lengths = {name: _length(leaf) for name, leaf in leaves}
    if None in lengths.values():
        name = next(name for name, length in lengths.items() if length is None)
        raise DataError(
            f"{where} {name} without a dim: it is a single number.",
            "The first dim of an array counts its samples.",
            "Pass an array with one entry per sample.",
        )
    if len(set(lengths.values())) > 1:
        _refuse_lengths(lengths, where)
    _check_not_empty(leaves, where)
    return int(next(iter(lengths.values()), None) or 0)


def _refuse_lengths(lengths: dict[str, int | None], where: Where) -> None:
    known = {name: length for name, length in lengths.items() if length is not None}
    *first, last = (f"{name} of {n} samples" for name, n in known.items())
    shortest = min(known, key=lambda name: known[name])
    raise DataError(
        f"{where} {', '.join(first)} and {last}.",
        "All of them have one entry per sample, so their lengths are equal.",
        f"{shortest} is the shortest: complete it, or cut the others to "
        f"{known[shortest]}.",
        index=known[shortest],
        batch=where.batch,
    )


def _check_not_empty(leaves: list[tuple[str, Any]], where: Where) -> None:
    for name, leaf in leaves:
        if _length(leaf) == 0:
            raise DataError(
                f"{where} {name} of 0 samples.",
                "There is at least one sample to compute with.",
                "Look at where the data comes from; a filter may have removed all.",
                batch=where.batch,
            )


def _check_numbers(leaves: list[tuple[str, Any]], where: Where) -> None:
    for name, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if isinstance(dtype, np.dtype) and not _is_numeric(dtype):
            index = _first_without_number(np.asarray(leaf))
            raise DataError(
                f"{where} {_at(name, index)} = {np.asarray(leaf)[index]!r} in an "
                f"array of dtype {dtype}.",
                "Models compute with integers, floats and booleans.",
                f"Turn {name} into numbers first, for example with "
                "np.asarray(..., dtype='float32') or by numbering the categories.",
                index=index[0] if index else None,
                batch=where.batch,
            )


def _check_number_of_inputs(x: Any, demands: Demands, where: Where) -> None:
    wanted = [demand.name for demand in demands.inputs]
    if not wanted:
        return
    quoted = ", ".join(map(repr, wanted))
    if isinstance(x, dict):
        missing = [name for name in wanted if name not in x]
        if demands.has_named_inputs and missing:
            raise DataError(
                f"{where} x with the names {', '.join(map(repr, x))}.",
                f"The inputs of the model are {quoted}.",
                f"Add {', '.join(map(repr, missing))}, or rename the inputs.",
                batch=where.batch,
            )
        return
    received = len(x) if isinstance(x, list | tuple) else 1
    if demands.has_named_inputs and received != len(wanted):
        raise DataError(
            f"{where} {_count(received, 'array')} as x.",
            f"The model has {_count(len(wanted), 'input')}: {quoted}.",
            "Pass one array per input, as a list in this order or as a dict by name.",
            batch=where.batch,
        )


def has_unusual_shapes(parts: Parts, demands: Demands) -> bool:
    """Whether a shape is not the declared one, or numbers of samples differ."""
    if _misfit(parts.x, demands) is not None:
        return True
    return demands.outputs_match_targets and len(set(_lengths(parts).values())) > 1


def settle_shapes(parts: Parts, demands: Demands, model: Any, where: Where) -> None:
    """Refuses unusual shapes, unless Keras can compute with them."""
    try:
        outputs = output_shapes(model, parts.x)
    except Exception as error:
        _refuse_shapes(parts, demands, where, error)
        return
    if not demands.outputs_match_targets:
        return
    allowed = {1, *(shape[0] for shape in outputs if shape)}
    if not set(_lengths(Parts(None, parts.y, parts.sample_weight)).values()) <= allowed:
        _refuse_lengths(_lengths(parts), where)


def _refuse_shapes(
    parts: Parts, demands: Demands, where: Where, error: Exception
) -> None:
    misfit = _misfit(parts.x, demands)
    if misfit is None:
        _refuse_lengths(_lengths(parts), where)
        return
    name, shape, wanted = misfit
    raise DataError(
        f"{where} {name} of shape {shape}.",
        f"The input {wanted.name!r} of the model has the shape {wanted.shape}; None "
        "is any size.",
        "Reshape the data, or build the model for its shape.",
        batch=where.batch,
    ) from error


def _misfit(x: Any, demands: Demands) -> tuple[str, tuple[int, ...], Any] | None:
    if isinstance(x, dict) and demands.has_named_inputs:
        names = [demand.name for demand in demands.inputs]
        leaves = [(f"x[{name!r}]", x[name]) for name in names]
    else:
        leaves = list(named_leaves("x", x))
    # With optional inputs that are left out there are fewer, and no telling which.
    if len(leaves) != len(demands.inputs):
        return None
    for (name, leaf), demand in zip(leaves, demands.inputs, strict=True):
        shape = tuple(getattr(leaf, "shape", ()))
        if not demand.is_met_by(shape):
            return name, shape, demand
    return None


def _check_finite(name: str, leaf: Any, where: Where) -> None:
    array = _dense(leaf)
    index = None if array is None else _first_not_finite(array)
    if array is None or index is None:
        return
    sample = f"sample {index[0]}" if index else "it"
    raise DataError(
        f"{where} {_at(name, index)} = {array[index]}.",
        "Inputs are finite numbers: one that is not spoils every weight in one step.",
        f"Remove or repair {sample}, or set strategy.check_nan = False if the model "
        "can deal with it.",
        index=index[0] if index else None,
        batch=where.batch,
    )


def _check_labels(parts: Parts, demand: LabelDemand, where: Where) -> None:
    found = demand.find(parts.y)
    labels = _dense(found)
    if labels is None or labels.dtype.kind not in "biuf" or not labels.size:
        return
    top = np.inf if demand.num_classes is None else demand.num_classes
    # Floats are cut off, as Keras does it. Comparisons with NaN are false.
    if labels.min() > -1 and labels.max() < top:
        return
    bad = ~((labels > -1) & (labels < top))
    if demand.ignored is not None:
        bad &= labels != demand.ignored
    bad &= _counts(demand.find(parts.sample_weight), labels.shape)
    if bad.any():
        _refuse_label(_name_of(found, parts.y), labels, _first(bad), demand, where)


def _refuse_label(
    name: str, labels: Any, index: Index, demand: LabelDemand, where: Where
) -> None:
    if demand.num_classes is None:
        rule = "Labels of a sparse categorical loss count from 0."
        change = "Number the classes from 0"
    else:
        output = f"the output {demand.name!r}" if demand.name else "the output"
        rule = (
            f"Labels of a sparse categorical loss are 0 to {demand.num_classes - 1}: "
            f"{output} has {demand.num_classes} classes."
        )
        change = "Number the classes from 0, or give the model more of them"
    raise DataError(
        f"{where} {_at(name, index)} = {labels[index]}.",
        rule,
        f"{change}; a label that shall not count is named by the loss: "
        "SparseCategoricalCrossentropy(ignore_class=...).",
        index=index[0] if index else None,
        batch=where.batch,
    )


def _counts(weights: Any, shape: tuple[int, ...]) -> Any:
    """Which labels have a weight other than 0, as something to combine with them."""
    array = _dense(weights)
    if array is None or array.shape != shape[: array.ndim]:
        return True
    return (array != 0).reshape(array.shape + (1,) * (len(shape) - array.ndim))


def _lengths(parts: Parts) -> dict[str, int | None]:
    """The numbers of samples; single numbers, which suit all, are left out."""
    found = {name: _length(leaf) for name, leaf in parts.leaves()}
    return {name: length for name, length in found.items() if length is not None}


def _length(leaf: Any) -> int | None:
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if shape else None


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    # The kind of bfloat16 and its like is that of raw bytes.
    return dtype.kind in "biufc" or bool(jnp.issubdtype(dtype, np.number))


def is_on_disk(part: Any) -> bool:
    """Whether arrays are read from disk as they are used; looking costs time then."""
    return any(isinstance(leaf, np.memmap) for _, leaf in named_leaves("", part))


def _dense(leaf: Any) -> Any:
    """An array on the host, if values can be looked at; None for sparse ones."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if isinstance(leaf, jax.Array):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        return np.asarray(leaf) if leaf.is_fully_addressable and not is_key else None
    return np.asarray(leaf) if hasattr(leaf, "__array__") else None


def _first_not_finite(array: Any) -> Index | None:
    if array.dtype.kind in "biu" or not _is_numeric(array.dtype):
        return None
    with np.errstate(all="ignore"):
        # A sum needs no memory and is finite only if everything in it is.
        wide = np.float32 if array.dtype.itemsize < 4 else None
        if np.isfinite(array.sum(dtype=wide)):
            return None
    rows = np.atleast_1d(array)
    step = max(1, CHUNK // max(1, rows[0].size))
    for start in range(0, len(rows), step):
        bad = ~np.isfinite(rows[start : start + step])
        if bad.any():
            found = _first(bad)
            return (start + found[0], *found[1:]) if array.ndim else ()
    return None


def _first_without_number(array: Any) -> Index:
    is_number = np.array([isinstance(e, int | float) for e in array.ravel()])
    return _first(~is_number.reshape(array.shape))


def _first(bad: Any) -> Index:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), bad.shape))


def _at(name: str, index: Index) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def _name_of(found: Any, targets: Any) -> str:
    return next(name for name, leaf in named_leaves("y", targets) if leaf is found)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
