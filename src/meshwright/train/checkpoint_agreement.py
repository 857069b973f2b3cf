"""What all processes do with a checkpoint: if it fails in one, it fails in all."""

import json
from collections.abc import Callable
from typing import Any

from meshwright.cluster.identity import process_index
from meshwright.cluster.store import say_to_all
from meshwright.errors import CheckpointError

Explain = Callable[[Exception], CheckpointError]


def all_do(topic: str, act: Callable[[], str], explain: Explain) -> list[str]:
    """Lets every process do its part, and returns what each found, by process.

    Arguments:
        topic: What it is about; all processes come with it, in the same order.
        act: The part of this process.
        explain: Says in words what went wrong.

    Raises:
        CheckpointError: It went wrong in a process; all get the error of the first one.
    """
    own: Exception | None = None
    try:
        word: dict[str, Any] = {"found": act()}
    except Exception as error:
        own = error if isinstance(error, CheckpointError) else explain(error)
        own.__cause__ = error if own is not error else None
        word = {"failed": [own.received, own.rule, own.change]}
    words = [json.loads(said) for said in say_to_all(topic, json.dumps(word))]
    for process, said in enumerate(words):
        if "failed" in said:
            if process == process_index() and own is not None:
                raise own
            received, rule, change = said["failed"]
            raise CheckpointError(f"Process {process}: {received}", rule, change)
    return [said["found"] for said in words]


def first_does(topic: str, act: Callable[[], str], explain: Explain) -> str:
    """Lets the first process do something that the others wait for."""
    return all_do(topic, act if process_index() == 0 else str, explain)[0]
