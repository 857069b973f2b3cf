"""`tf.debugging`: the placement log in TensorFlow's words."""

import logging
import sys

from meshwright.devices import LOG_LEVEL_ASKED_FOR
from meshwright.devices.keras_hooks import install_keras_hooks
from meshwright.devices.placement_log import logger, name_devices_by, switch_log
from meshwright.tf.absent import refuse
from meshwright.tf.tensors import full_name


class _Asked:
    on = False


class _Lines(logging.Handler):
    """Writes bare lines to standard error, as TensorFlow does."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(record.getMessage() + "\n")


_lines = _Lines()


def set_log_device_placement(enabled: bool) -> None:
    """Switches the log of placements on or off, at any time.

    `TF_CPP_MIN_LOG_LEVEL=1` hides its lines, as it does in TensorFlow.

    >>> from meshwright import tf
    >>> tf.debugging.set_log_device_placement(True)
    >>> tf.debugging.get_log_device_placement()
    True
    >>> tf.debugging.set_log_device_placement(False)
    """
    _Asked.on = bool(enabled)
    is_hidden = LOG_LEVEL_ASKED_FOR not in ("", "0")
    install_keras_hooks()
    name_devices_by(full_name if enabled else str)
    switch_log(_Asked.on and not is_hidden)
    (logger.addHandler if enabled else logger.removeHandler)(_lines)
    # Libraries set up logging when they are imported, and would decorate the lines.
    logger.propagate = not enabled


def get_log_device_placement() -> bool:
    """Whether the log was switched on."""
    return _Asked.on


__getattr__ = refuse(
    "tf.debugging",
    {
        "check_numerics": "fit stops at a loss that is not finite; meshwright train "
        "--on-nan chooses what happens",
        "enable_check_numerics": "meshwright train --on-nan",
    },
)
