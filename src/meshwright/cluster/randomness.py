"""One source of chance for all processes: shuffles and first weights must agree."""

import json
import random
from typing import Any

from meshwright.cluster.identity import process_count
from meshwright.cluster.store import word_of_first

import numpy as np


def random_state() -> Any:
    """The random state of this process, Python's and NumPy's, as JSON values.

    Keras draws the seeds of initial weights from Python's and its shuffles from
    NumPy's.
    """
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return [
        [version, list(numbers), gauss],
        [name, np.asarray(keys).tolist(), *rest],
    ]


def set_random_state(state: Any) -> None:
    """Goes on drawing as after `random_state` gave this."""
    python, numpy = state
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state((numpy[0], np.asarray(numpy[1], np.uint32), *numpy[2:]))


def share_random_state() -> None:
    """Gives all processes the random state of the first.

    Alone, a process keeps its own.
    """
    if process_count() > 1:
        word = word_of_first("random state", json.dumps(random_state()))
        set_random_state(json.loads(word))
