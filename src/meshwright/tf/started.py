"""Whether TensorFlow's runtime would have started: from then on much is settled.

`tf.config` keeps what was asked for until then, and hands it to
`meshwright.configure` at once where that is possible.
"""

from collections.abc import Callable

from meshwright.devices import start

import jax


class _Waiting:
    checks: tuple[Callable[[], None], ...] = ()


def before_start(check: Callable[[], None]) -> None:
    """Has a function called before the runtime starts, once for each start."""
    _Waiting.checks = (*_Waiting.checks, check)


def is_initialized() -> bool:
    """Whether the runtime has started."""
    return start.has_started()


def initialize() -> None:
    """Starts the runtime, as TensorFlow does at the first operation."""
    if start.has_started():
        return
    for check in _Waiting.checks:
        check()
    jax.devices()
