"""Words between the processes of a run, without a device.

JAX' coordination service keeps keys and values for a run of several processes; its
client has no public name yet, hence the private import, which only this file has.
"""

from collections import Counter

from meshwright.cluster.identity import process_count, process_index
from meshwright.errors import PeerLostError

import jax
from jax._src.distributed import global_state

PATIENCE_SECONDS = 600
"""How long others are waited for; whoever is slower than that is called missing."""

_turns: Counter[str] = Counter()


def say_to_all(topic: str, word: str, patience: int | None = None) -> list[str]:
    """Says a word, waits for those of all processes, and returns them by process.

    All processes say as many words on a topic, in the same order.

    Arguments:
        topic: What it is about.
        word: The word.
        patience: Seconds to wait for those of the others; `PATIENCE_SECONDS` if left
            out.
    """
    if process_count() == 1:
        return [word]
    turn = f"meshwright/{topic}/{_turns[topic]}"
    _turns[topic] += 1
    client = global_state.client
    client.key_value_set(f"{turn}/{process_index()}", word)
    patience = patience or PATIENCE_SECONDS
    words = [
        _hear(f"{turn}/{process}", process, patience)
        for process in range(process_count())
    ]
    if _turns[topic] > 1:
        # Everybody has read the turn before this one, or nobody would be here.
        before = f"meshwright/{topic}/{_turns[topic] - 2}"
        client.key_value_delete(f"{before}/{process_index()}")
    return words


def word_of_first(topic: str, word: str) -> str:
    """The first process's word; those of the others are not looked at."""
    return say_to_all(topic, word if process_index() == 0 else "")[0]


def _hear(key: str, process: int, patience: int) -> str:
    try:
        return str(global_state.client.blocking_key_value_get(key, patience * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise PeerLostError(
            f"Process {process_index()} waited {patience} s for process "
            f"{process} ({key}).",
            "All processes of a run go on together.",
            f"Look at the output of process {process}: it has ended, or it is stuck.",
        ) from error
