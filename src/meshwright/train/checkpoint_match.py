"""Whether a checkpoint is that of the model at hand, by names, shapes and dtypes."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.train.checkpoint_manifest import Entry

import jax

_SHOWN = 5


def check_match(
    arrays: Mapping[str, Entry],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    where: str,
) -> None:
    """Refuses a checkpoint of another model, before anything is allocated.

    Arguments:
        arrays: What the checkpoint has.
        targets: What the model wants.
        where: Which checkpoint it is, for the message.
    """
    missing = sorted(targets.keys() - arrays.keys())
    extra = sorted(arrays.keys() - targets.keys())
    others = [
        f"{name} is {arrays[name]} there and {wanted} here"
        for name, target in sorted(targets.items())
        if name in arrays and str(arrays[name]) != (wanted := _shown(target))
    ]
    told = [
        *_list("it does not have", missing, extra),
        *_list("it has, and the model has not,", extra, ()),
        *([f"{'; '.join(others[:_SHOWN])}{_more(others)}"] if others else []),
    ]
    if told:
        raise CheckpointError(
            f"{where} is not of this model: {'; '.join(told)}.",
            "A run goes on with the variables that it began with, of the same names, "
            "shapes and dtypes.",
            "Use the model that the checkpoint was made with, or another run folder.",
        )


def _list(what: str, names: list[str], others: Collection[str]) -> Iterator[str]:
    if names:
        shown = ", ".join(_with_near_miss(name, others) for name in names[:_SHOWN])
        yield f"{what} {shown}{_more(names)}"


def _with_near_miss(name: str, others: Collection[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.7)
    return f"{name} (did you mean {near[0]}?)" if near else name


def _more(found: list[Any]) -> str:
    return f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""


def _shown(target: jax.ShapeDtypeStruct) -> str:
    return str(Entry(tuple(target.shape), str(target.dtype)))
