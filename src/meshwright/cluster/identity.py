"""Which of the processes of a run this one is."""

from meshwright.devices.apart import is_apart

import jax


def process_index() -> int:
    """The number of this process, from 0; 0 without a launcher. Starts no device.

    >>> import meshwright as mw
    >>> mw.process_index()
    0
    """
    return int(jax.process_index()) if _is_one_of_several() else 0


def process_count() -> int:
    """The number of processes of this run; 1 without a launcher. Starts no device.

    >>> import meshwright as mw
    >>> mw.process_count()
    1
    """
    return int(jax.process_count()) if _is_one_of_several() else 1


def _is_one_of_several() -> bool:
    return jax.distributed.is_initialized() and not is_apart()
