"""One source of chance for all processes: shuffles and first weights must agree."""

import json
import random

from meshwright.cluster.identity import process_count
from meshwright.cluster.store import word_of_first

import numpy as np


def share_random_state() -> None:
    """Gives all processes the random state of the first, Python's and NumPy's.

    Keras draws the seeds of initial weights from Python's and its shuffles from
    NumPy's. Alone, a process keeps its own.
    """
    if process_count() == 1:
        return
    version, numbers, gauss = random.getstate()
    name, keys, position, *rest = np.random.get_state(legacy=True)
    own = [
        [version, numbers, gauss],
        [name, np.asarray(keys).tolist(), position, *rest],
    ]
    python, numpy = json.loads(word_of_first("random state", json.dumps(own)))
    random.setstate((python[0], tuple(python[1]), python[2]))
    np.random.set_state((numpy[0], np.asarray(numpy[1], np.uint32), *numpy[2:]))
