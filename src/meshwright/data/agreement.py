"""Processes that train together go through the same batches, or all of them stop."""

from collections.abc import Callable
from itertools import count
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.cluster.store import say_to_all
from meshwright.data.fingerprint import fingerprint
from meshwright.devices.step import batch_size
from meshwright.errors import DataError

END = "the end of the data"
FAILURE = "an error"

_streams = count()


class Agreement:
    """What the processes have to say of the batches of one stream.

    Made and asked by all processes in the same order. Each says what it got before it
    goes on, so that none computes a part of a batch that another one does not have,
    and waits for it forever.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._topic = f"batches/{next(_streams)}"
        self._number = 0

    def on(self, read: Callable[[], tuple[Any, int, int]]) -> Any:
        """Reads batches; returns them if all processes have got alike.

        Arguments:
            read: Returns what was read, the samples of a batch and the number of them.
        """
        try:
            batches, size, number = read()
        except StopIteration:
            self._agree(END)
            raise
        except Exception:
            self._say(FAILURE)
            raise
        several = "" if number == 1 else f"{number} batches of "
        self._agree(f"{several}{size} samples", number)
        return batches

    def _say(self, word: str) -> list[str]:
        return say_to_all(self._topic, word)

    def _agree(self, word: str, num_batches: int = 1) -> None:
        words, number = self._say(word), self._number
        self._number += num_batches
        if len(set(words)) > 1:
            _refuse(self._verb, f"batch {number} as", words)


def agree_on_arrays(verb: str, arrays: Any) -> None:
    """Refuses arrays that are not the same in all processes, as far as is looked at."""
    if process_count() > 1:
        what = f"{batch_size(arrays)} samples (digest {fingerprint(arrays)})"
        words = say_to_all("arrays", what)
        if len(set(words)) > 1:
            _refuse(verb, "arrays of", words)


def _refuse(verb: str, what: str, words: list[str]) -> None:
    by_process = "; ".join(f"{word} in process {i}" for i, word in enumerate(words))
    raise DataError(
        f"{verb} received {what} {by_process}.",
        "Every process goes through the same batches and computes a part of each, so "
        "all have as many, of the same sizes.",
        "Give every process the same data, or stop streams of different lengths early "
        "with steps_per_epoch.",
    )
