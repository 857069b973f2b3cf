"""What hardware there is, how it is configured, and where work is placed."""

import os
import sys

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_set_by_jax = "jax" in sys.modules or _LEVEL not in os.environ

# JAX sets this variable when it is imported; what the user said is known before only.
LOG_LEVEL_ASKED_FOR = "0" if _set_by_jax else os.environ[_LEVEL]
"""How little TensorFlow's C++ code shall log, as far as the user said so."""


def environment_to_inherit() -> dict[str, str]:
    """The environment for processes that are started, without what JAX set in it.

    >>> "PATH" in environment_to_inherit()
    True
    """
    kept = dict(os.environ)
    if _set_by_jax:
        kept.pop(_LEVEL, None)
    return kept
