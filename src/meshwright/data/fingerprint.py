"""What tells one data set from another, without reading all of it."""

import hashlib
from typing import Any

from meshwright.devices.containers import named_leaves

import numpy as np

NUM_ROWS = 256
"""So many rows of an array are looked at, evenly spread."""


def fingerprint(data: Any) -> str:
    """A short text that depends on the names, shapes, types and some rows of arrays.

    >>> fingerprint((np.zeros((4, 2)), np.arange(4)))
    'ca387456d933'
    """
    digest = hashlib.sha256()
    for name, leaf in named_leaves("", data):
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        digest.update(f"{name} {shape} {dtype}".encode())
        if not shape or not hasattr(leaf, "__array__"):
            continue
        step = max(-(-shape[0] // NUM_ROWS), 1)
        digest.update(np.ascontiguousarray(leaf[::step]).tobytes())
    return digest.hexdigest()[:12]
