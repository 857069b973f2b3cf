"""Which of the processes of a run this one is."""

import jax


def process_index() -> int:
    """The number of this process, from 0; 0 without a launcher. Starts no device.

    >>> import meshwright as mw
    >>> mw.process_index()
    0
    """
    return int(jax.process_index()) if jax.distributed.is_initialized() else 0


def process_count() -> int:
    """The number of processes of this run; 1 without a launcher. Starts no device.

    >>> import meshwright as mw
    >>> mw.process_count()
    1
    """
    return int(jax.process_count()) if jax.distributed.is_initialized() else 1
