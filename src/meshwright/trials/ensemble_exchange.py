"""What the members of an ensemble in one process have for all others."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cluster.identity import process_count, process_index
from meshwright.cluster.store import say_to_all
from meshwright.devices.containers import map_leaves, named_leaves
from meshwright.errors import EnsembleError, PeerLostError

import jax.numpy as jnp
import numpy as np

PATIENCE_SECONDS = 7 * 24 * 3600
"""One process may train for long after another one has ended."""

_TOPIC = "ensemble"


def agree_on_members(members: Sequence[Any]) -> None:
    """Refuses members that are not alike in all processes of a run.

    Raises:
        EnsembleError: They differ.
    """
    shapes = [[list(v.shape) for v in member.variables] for member in members]
    sizes = [f"{member.count_params():,}" for member in members]
    here = f"{len(members)} members with {' / '.join(sizes)} parameters"
    words = [json.loads(w) for w in say_to_all(_TOPIC, json.dumps([here, shapes]))]
    if any(word != words[0] for word in words):
        told = [f"{said} in process {i}" for i, (said, _) in enumerate(words)]
        raise EnsembleError(
            f"Ensemble received {'; '.join(told)}.",
            "All processes of a run make the same members and train some of them each.",
            "Make all members in every process, from the same code.",
        )


def share_words(own: Mapping[int, Any]) -> dict[int, Any]:
    """JSON values by the number of a member, from all processes.

    Arguments:
        own: Those of this process.
    """
    if process_count() == 1:
        return dict(sorted(own.items()))
    return _merge(json.dumps(dict(own), default=float))


def share_failures(own: Mapping[int, Exception], names: Mapping[int, str]) -> None:
    """Raises the error of a member, in its own process and in all others.

    Arguments:
        own: The errors of this process, by the number of the member.
        names: What members are called.

    Raises:
        PeerLostError: A member of another process has failed.
    """
    said = _merge(json.dumps({n: f"{type(e).__name__}: {e}" for n, e in own.items()}))
    if not said:
        return
    for number, error in own.items():
        error.add_note(f"This happened to {names[number]}.")
    if own:
        raise own[min(own)]
    number = min(said)
    raise PeerLostError(
        f"Process {process_index()} heard from another one that {names[number]} failed "
        f"with {said[number].splitlines()[0]!r}.",
        "All processes go on when all members are done.",
        "Look at the output of the process that this member is in.",
    )


def share_arrays(own: Mapping[int, Any]) -> dict[int, Any]:
    """Trees of arrays by the number of a member, from all processes, bit by bit.

    Arguments:
        own: Those of this process: lists and dicts of NumPy arrays.
    """
    if process_count() == 1:
        return dict(own)
    from jax.experimental import multihost_utils

    forms = [(number, map_leaves(_form, tree)) for number, tree in own.items()]
    words = say_to_all(_TOPIC, json.dumps(forms), PATIENCE_SECONDS)
    said = [json.loads(word) for word in words]
    data = b"".join(np.asarray(leaf).tobytes() for leaf in _leaves(own))
    # A collective has pieces of the same size.
    longest = max(1, *(sum(map(_num_bytes, _leaves(forms))) for forms in said))
    padded = np.zeros(longest, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    found: dict[int, Any] = {}
    for forms, row in zip(said, rows, strict=True):
        rest = np.ascontiguousarray(row).data
        for number, form in forms:
            found[number], rest = _read(form, rest)
    return dict(sorted(found.items()))


def _merge(word: str) -> dict[int, Any]:
    said = say_to_all(_TOPIC, word, PATIENCE_SECONDS)
    merged = {int(n): value for words in said for n, value in json.loads(words).items()}
    return dict(sorted(merged.items()))


def _form(leaf: Any) -> str:
    array = np.asarray(leaf)
    return f"{array.dtype.name}:{','.join(map(str, array.shape))}"


def _read(form: Any, rest: memoryview) -> tuple[Any, memoryview]:
    if isinstance(form, str):
        return _read_array(form, rest)
    items = form.items() if isinstance(form, dict) else enumerate(form)
    read = {}
    for key, inner in items:
        read[key], rest = _read(inner, rest)
    return (read if isinstance(form, dict) else list(read.values())), rest


def _read_array(form: str, rest: memoryview) -> tuple[Any, memoryview]:
    kind, shape = _parse(form)
    size = _num_bytes(form)
    return np.frombuffer(rest[:size], kind).reshape(shape).copy(), rest[size:]


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in named_leaves("", tree)]


def _num_bytes(form: Any) -> int:
    """Of the array of a form; numbers of members beside it have none."""
    if not isinstance(form, str):
        return 0
    kind, shape = _parse(form)
    return math.prod(shape) * kind.itemsize


def _parse(form: str) -> tuple["np.dtype[Any]", tuple[int, ...]]:
    name, _, numbers = form.partition(":")
    shape = tuple(int(number) for number in numbers.split(",") if number)
    return np.dtype(getattr(jnp, name)), shape
